"""What comes from the hosts: lines with the host's name before them, and files of their log folders."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet_train.hosts.entries import Host
from fleet_train.launch.terminal import show, show_lines
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


class Screen:
    """Shows what hosts write, each line after its host's name; a report that all of them make once, at the end."""

    def __init__(self, hosts: Sequence[Host], folder: Path | None = None, plain: int | None = None) -> None:
        """``plain``: the host whose standard output is shown as it is, and no other one's."""
        width = max(len(host.name) for host in hosts)
        self._logs = [LogFiles(folder / host.name) if folder is not None else None for host in hosts]
        self._streams = {}
        for index, host in enumerate(hosts):
            prefix = f"{host.name + ':':<{width + 1}} ".encode()
            self._streams[index, "err"] = Lines(prefix, _show_err)
            if plain is None:
                self._streams[index, "out"] = Lines(prefix, show)
            elif plain == index:
                self._streams[index, "out"] = Lines(b"", show)
        self._reports: dict[int, str] = {}

    def take(self, index: int, message: Mapping[str, Any]) -> None:
        for kind in ("out", "err"):
            if kind in message and (index, kind) in self._streams:
                self._streams[index, kind].feed(message[kind].encode("latin-1"))
        logs = self._logs[index]
        if "log" in message and logs is not None:
            logs.write(message["log"], message["at"], message["data"])
        if "report" in message:
            self._reports[index] = message["report"]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        if self._reports:
            message, _, table = self._reports[min(self._reports)].partition("\n")
            logger.info(message)
            if table:
                show_lines(table)


def _show_err(text: bytes) -> None:
    show_lines(text.decode(errors="replace").replace("\r\n", "\n").rstrip("\r\n"))
