"""What comes from the hosts: lines with the host's name before them, and files of their log folders."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    """A host's log files in a folder here. The first one that cannot be written ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, log: str, at: int, data: str) -> None:
        if "/" in log or log.startswith("."):
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / log).open("r+b" if at else "wb") as file:
                file.seek(at)
                file.write(base64.b64decode(data))


def is_log(message: dict[str, Any]) -> bool:
    return message.keys() == {"log", "at", "data"}
