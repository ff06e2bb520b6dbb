"""What comes from the hosts: lines with the host's name before them, and files of their log folders."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path

from fleet_train.log import logger

_ENDS = re.compile(rb"(?<=[\n\r])(?<!\r(?=\n))")


class Lines:
    """One stream of a host: whole lines go to ``show``, each after ``prefix``; a progress bar's states are lines."""

    def __init__(self, prefix: bytes, show: Callable[[bytes], None]) -> None:
        self._prefix, self._show = prefix, show
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = _ENDS.split(self._rest + piece)
        if lines:
            self._show(b"".join(self._prefix + line for line in lines))

    def close(self) -> None:
        """Show the rest, as a line."""
        if self._rest:
            self._show(self._prefix + self._rest + b"\n")
        self._rest = b""


class LogFiles:
    """A host's log files in a folder here. The first problem with writing them is reported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reported = False

    def write(self, name: str, at: int, data: str) -> None:
        """A piece of a file, which has ``at`` bytes before it."""
        if "/" in name or name.startswith("."):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / name).open("r+b" if at else "wb") as file:
                file.seek(at)
                file.write(base64.b64decode(data))
        except OSError as error:
            if not self._reported:
                logger.warning(f"{self._folder / name} cannot be written: {error.strerror}; logs here are incomplete")
            self._reported = True
