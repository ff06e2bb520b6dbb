"""What the launcher sees of its ranks while they run: their end records and rank 0's output."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train.launch import processes, worker
from fleet_train.launch.ends import RankEnd, end_from_record, last_lines
from fleet_train.launch.node import Node

_TAIL_BYTES = 64 * 1024


class RankFiles:
    """The logs and end records of this node's ranks, in ``log_dir``."""

    def __init__(self, node: Node, log_dir: Path, token: str, attempt: int = 0) -> None:
        self.node = node
        self.log_dir = log_dir
        self.token = token
        self.attempt = attempt

    def prepare(self) -> None:
        """Make the folder; remove what an earlier job has left, keep the logs of this job's earlier attempts."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for local in range(self.node.processes):
            (self.log_dir / worker.record_name(local)).unlink(missing_ok=True)
            log = self.log_file(local)
            if self.attempt == 0:
                for old in [log, *self.log_dir.glob(f"{log.name}.attempt*")]:
                    old.unlink(missing_ok=True)
            elif log.exists():
                log.replace(log.with_name(f"{log.name}.attempt{self.attempt - 1}"))

    def log_file(self, local_rank: int) -> Path:
        return self.log_dir / worker.log_name(local_rank)

    def records(self) -> dict[int, dict[str, Any]]:
        """Local rank -> what its wrapper has written down so far."""
        found = {}
        for local in range(self.node.processes):
            # Absent until the rank has started; unreadable is impossible, records are replaced in one piece.
            with suppress(FileNotFoundError):
                record = json.loads((self.log_dir / worker.record_name(local)).read_text())
                if record["token"] == self.token:
                    found[local] = record
        return found

    def all_have_started(self) -> bool:
        return len(self.records()) == self.node.processes

    def without_wrapper(self) -> list[int]:
        """Local ranks whose wrapper is gone and has not written down an end."""
        gone = [local for local, record in self.records().items() if not processes.runs(record["wrapper_pid"])]
        records = self.records()  # read again: an end may have been written in between
        return [local for local in gone if "ended_monotonic" not in records[local]]

    def wrapper_pids(self) -> list[int]:
        return [record["wrapper_pid"] for record in self.records().values() if "ended_monotonic" not in record]

    def ends(self, start: float) -> dict[int, RankEnd]:
        """Local rank -> its end, for those that have ended."""
        return {
            local: end_from_record(record, start, self.endpoint(local), self.node.index, str(self.log_file(local)))
            for local, record in self.records().items()
            if "ended_monotonic" in record
        }

    def endpoint(self, local_rank: int) -> str:
        return f"{self.node.address}:{self.node.started_port + local_rank}"

    def end_without_trace(self, local_rank: int, seconds: float) -> RankEnd:
        """For a rank that is gone although nobody has written down how."""
        rank, log_file = self.node.ranks[local_rank], str(self.log_file(local_rank))
        return RankEnd(rank, self.endpoint(local_rank), self.node.index, None, None, seconds, False, log_file)

    def tail(self, local_rank: int) -> tuple[str, ...]:
        return last_lines(end_of(self.log_file(local_rank)))


def end_of(log: Path) -> str:
    """The end of what a process has printed; empty where there is nothing to read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Follower:
    """Copies a growing file to the terminal, byte for byte, so that progress bars work."""

    def __init__(self, path: Path, sink: BinaryIO | None = None) -> None:
        self._path = path
        self._sink = sink or sys.stdout.buffer
        self._file: BinaryIO | None = None
        self._last = b"\n"

    def pump(self) -> None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return
        while chunk := self._file.read(1 << 16):
            self._show(chunk)
            self._last = chunk

    def close(self) -> None:
        """Copy the rest and end the line, so that what comes after does not stick to a progress bar."""
        self.pump()
        self._show(b"" if self._last.endswith(b"\n") else b"\n")
        if self._file is not None:
            self._file.close()

    def _show(self, chunk: bytes) -> None:
        try:
            self._sink.write(chunk)
            self._sink.flush()
        except BrokenPipeError:
            # "| head" has seen enough: the job goes on, and Python must not fail on this pipe when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._sink.fileno())


class NoFollower:
    """For nodes whose ranks are not shown on the terminal."""

    def pump(self) -> None: ...

    def close(self) -> None: ...
