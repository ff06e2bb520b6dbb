"""The launcher's view of its running ranks: their end records and rank 0's output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train.cluster.network import connections_at
from fleet_train.files import read_regular
from fleet_train.launch import processes, terminal, worker_main
from fleet_train.launch.node import Node
from fleet_train.launch.report import WorkerResult, last_lines, result_from_record
from fleet_train.launch.terminal import Everything, Outlet, StartupLines, without_startup_lines

_TAIL_BYTES = _RECORD_BYTES = 64 * 1024

Records = dict[int, dict[str, Any]]


class RankFiles:
    """The logs and end records of this node's ranks, in ``log_dir``.

    ``heard`` gives the records that could not be written there, by local rank; ``verbose``: last lines include
    Paddle's start-up lines.
    """

    def __init__(
        self,
        node: Node,
        log_dir: Path,
        token: str,
        attempt: int = 0,
        heard: Callable[[], Records] = dict,
        verbose: bool = False,
    ) -> None:
        self.node = node
        self.log_dir = log_dir
        self.token = token
        self.attempt = attempt
        self._heard = heard
        self._verbose = verbose

    def prepare(self) -> None:
        """Create the folder; remove an earlier job's files, keep the logs of this job's earlier attempts."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for local in range(self.node.processes):
            (self.log_dir / worker_main.record_name(local)).unlink(missing_ok=True)
            log = self.log_file(local)
            if self.attempt == 0:
                for old in [log, *self.log_dir.glob(f"{log.name}.attempt*")]:
                    old.unlink(missing_ok=True)
            elif log.exists():
                log.replace(log.with_name(f"{log.name}.attempt{self.attempt - 1}"))

    def log_file(self, local_rank: int) -> Path:
        return self.log_dir / worker_main.log_name(local_rank)

    def records(self) -> Records:
        """Local rank -> the record that its wrapper has written, or sent, so far."""
        found = {}
        for local in range(self.node.processes):
            # Absent until the rank has started, and if the disk fails. Our records are replaced atomically: an
            # unreadable one is not ours.
            with suppress(OSError, ValueError, RecursionError):
                record = json.loads(read_regular(self.log_dir / worker_main.record_name(local), _RECORD_BYTES))
                if isinstance(record, dict) and record.get("token") == self.token:
                    found[local] = record
        for local, record in self._heard().items():
            if local not in found or "ended_monotonic" in record:
                found[local] = record
        return found

    def all_have_started(self) -> bool:
        return len(self.records()) == self.node.processes

    def without_wrapper(self) -> list[int]:
        """Local ranks whose wrapper is gone without a record of its end."""
        gone = [local for local, record in self.records().items() if not processes.runs(record["wrapper_pid"])]
        records = self.records()  # read again: an end may have been written in between
        return [local for local in gone if "ended_monotonic" not in records[local]]

    def wrapper_pids(self) -> list[int]:
        return [record["wrapper_pid"] for record in self.records().values() if "ended_monotonic" not in record]

    def ends(self, start: float) -> dict[int, WorkerResult]:
        """Local rank -> its end, for those that have ended."""
        return {
            local: result_from_record(record, start, self.endpoint(local), self.node.index, str(self.log_file(local)))
            for local, record in self.records().items()
            if "ended_monotonic" in record
        }

    def endpoint(self, local_rank: int) -> str:
        return f"{self.node.address}:{self.node.started_port + local_rank}"

    def result_without_trace(self, local_rank: int, seconds: float) -> WorkerResult:
        """For a rank that is gone without a record of its end."""
        rank, log_file = self.node.ranks[local_rank], str(self.log_file(local_rank))
        return WorkerResult(rank, self.endpoint(local_rank), self.node.index, None, None, seconds, False, log_file)

    def tail(self, local_rank: int) -> tuple[str, ...]:
        end = end_of(self.log_file(local_rank))
        return last_lines(end if self._verbose else without_startup_lines(end))


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
    back.

    The file is the buffer for a slow reader: what does not fit now is read later.
    """

    def __init__(
        self,
        path: Path,
        outlet: Outlet = terminal.out,
        show: Callable[[bytes], None] = terminal.show,
        passing: StartupLines | Everything | None = None,
    ) -> None:
        self._path = path
        self._outlet = outlet
        self._write = show
        self._passing = passing or Everything()
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
            self._show(self._passing.feed(chunk))
            came = True
        if not came and self._outlet.has_room():
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
        self._show(self._passing.rest())
        self._show(b"" if self._last.endswith(b"\n") else b"\n")
        if self._file is not None:
            self._outlet.leave_out(sum(chunk.count(b"\n") for chunk in iter(partial(self._file.read, 1 << 20), b"")))
            self._file.close()


class NoFollower:
    """For nodes whose ranks are not shown on the terminal."""

    def pump(self) -> None: ...

    def close(self) -> None: ...
