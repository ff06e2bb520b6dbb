"""The launcher's view of its running ranks: their output, and whether they connect to each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fleet_train.cluster.network import connections_at
from fleet_train.launch import terminal
from fleet_train.launch.node import Node
from fleet_train.launch.terminal import Outlet, StartupLines

_TAIL_BYTES = 64 * 1024


class Connections:
    """Whether ranks that have not called ``fleet.init`` connect at the job's endpoints: Paddle's own store, with which
    ``init_parallel_env`` forms a process group, is at rank 0's."""

    def __init__(self, node: Node) -> None:
        ports = range(node.started_port, node.started_port + node.processes)
        self._endpoints = [(address, port) for address in node.addresses for port in ports]
        self._before = connections_at(self._endpoints)
        self.seen = False

    def look(self) -> None:
        self.seen = self.seen or bool(connections_at(self._endpoints) - self._before)


def end_of(log: Path) -> str:
    """The end of a process's output; empty if there is nothing to read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Follower:
    """Shows a growing file on the terminal, byte for byte, so that progress bars work; except what ``passing`` holds
    back (None: nothing).

    The file is the buffer for a slow reader: what does not fit now is read later.
    """

    def __init__(
        self,
        path: Path,
        outlet: Outlet = terminal.out,
        show: Callable[[bytes], None] = terminal.show,
        passing: StartupLines | None = None,
    ) -> None:
        self._path = path
        self._outlet = outlet
        self._write = show
        self._passing = passing
        self._file: BinaryIO | None = None
        self._last = b"\n"

    def pump(self) -> None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return
        came = False
        while self._outlet.has_room() and (chunk := self._file.read(1 << 16)):
            self._show(chunk if self._passing is None else self._passing.feed(chunk))
            came = True
        if not came and self._outlet.has_room():
            self._show_rest()

    def _show_rest(self) -> None:
        if self._passing is not None:
            self._show(self._passing.rest())

    def _show(self, text: bytes) -> None:
        if text:
            self._write(text)
            self._last = text

    def close(self) -> None:
        """Show the rest and end the line, so that later output does not continue a progress bar.

        Bounded: output that is not read within seconds is counted and dropped.
        """
        self.pump()
        while not self._outlet.has_room() and self._outlet.drain():
            self.pump()
        self._show_rest()
        self._show(b"" if self._last.endswith(b"\n") else b"\n")
        if self._file is not None:
            self._outlet.leave_out(sum(chunk.count(b"\n") for chunk in iter(partial(self._file.read, 1 << 20), b"")))
            self._file.close()
