"""This node's ranks in one attempt: their processes, logs and end records in the log folder."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train import timeouts
from fleet_train.files import hold, holder, open_new, publish
from fleet_train.launch.node import Node
from fleet_train.launch.processes import Guard, Process, end_of, kill_descendants, stop, why_not_started
from fleet_train.launch.report import WorkerResult, last_lines
from fleet_train.launch.terminal import without_startup_lines
from fleet_train.log import logger

# Of this process: requested folder -> assigned folder, and its lock.
_taken: dict[Path, tuple[Path, BinaryIO | None]] = {}


def take_log_dir(wanted: Path) -> Path:
    """The folder for this launcher's logs, in all attempts: ``wanted``, or one next to it if another job uses it.

    Creates it. Raises OSError if it is not writable.
    """
    if wanted in _taken:
        return _taken[wanted][0]
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = hold(folder)
        except BlockingIOError:
            continue
        if number > 1:
            logger.warning(
                f"{wanted} is in use by another job ({holder(wanted)}); the logs of this one go to {folder} (--log_dir)"
            )
        _taken[wanted] = folder, held
        break
    return _taken[wanted][0]


def log_name(local_rank: int) -> str:
    return f"workerlog.{local_rank}"


def record_name(local_rank: int) -> str:
    return f"workerend.{local_rank}.json"


class RankProcess(Process):
    """One rank. ``write`` gets the record of its start, and of its end."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: Any,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self._write = write
        self._writing = threading.Lock()
        super().__init__(command, environ, output)

    def write_began(self) -> None:
        with self._writing:
            if not self.has_ended:
                self._write({"pid": self.pid, "began_monotonic": self.began_at})

    def await_record(self, seconds: float) -> None:
        self._waiter.join(seconds)

    def _await_end(self) -> None:
        """No process of a failed rank stays; those of a rank that succeeded may (a server, on purpose)."""
        status, at = self._waited()
        if status and not self.asked_to_stop:
            time.sleep(timeouts.SIGNAL_RACE_SECONDS)
        if status or self.asked_to_stop:
            self.kill_group()
        self._set_ended(status, at)
        record = {
            "pid": self.pid,
            "began_monotonic": self.began_at,
            "ended_monotonic": at,
            "wall_seconds": round(at - self.began_at, 3),
            "exit_code": status if status >= 0 else None,
            "signal": -status if status < 0 else None,
            "asked_to_stop": self.asked_to_stop or None,
        }
        with self._writing:
            self._write(record)


class Ranks:
    """The logs and end records are in ``log_dir``; the first problem with writing them is reported.

    ``verbose``: last lines include Paddle's start-up lines.
    """

    def __init__(self, node: Node, log_dir: Path, attempt: int = 0, verbose: bool = False) -> None:
        self.node = node
        self.log_dir = log_dir
        self._attempt = attempt
        self._verbose = verbose
        self._started: list[RankProcess] = []
        self._guard: Guard | None = None
        self._reported = threading.Lock()

    def prepare(self) -> None:
        """Create the folder; remove an earlier job's files, keep the logs of this job's earlier attempts."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for local in range(self.node.processes):
            (self.log_dir / record_name(local)).unlink(missing_ok=True)
            log = self.log_file(local)
            if self._attempt == 0:
                for old in [log, *self.log_dir.glob(f"{log.name}.attempt*")]:
                    old.unlink(missing_ok=True)
            elif log.exists():
                log.replace(log.with_name(f"{log.name}.attempt{self._attempt - 1}"))

    def log_file(self, local_rank: int) -> Path:
        return self.log_dir / log_name(local_rank)

    def start(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> None:
        """Start them all, each with its environment. Raises ClusterError if the kernel refuses that."""
        try:
            self._guard = Guard()
            for local, environ in enumerate(environs):
                with self._open_log(local) as log:
                    rank = RankProcess(command, environ, log, self._writer(local))
                self._started.append(rank)
                self._guard.add(rank.pid)
                rank.write_began()
        except OSError as error:
            raise why_not_started(error, command, environs[0]) from error

    def _open_log(self, local: int) -> BinaryIO:
        try:
            log: BinaryIO = open_new(self.log_file(local))
            return log
        except OSError as error:
            self._report_once(f"{self.log_file(local)} cannot be written: {error.strerror}")
            return open(os.devnull, "wb")

    def _writer(self, local: int) -> Callable[[dict[str, Any]], None]:
        path = self.log_dir / record_name(local)
        of_rank = {"rank": self.node.ranks[local], "local_rank": local, "endpoint": self.endpoint(local)}

        def write(record: dict[str, Any]) -> None:
            try:
                publish(path, json.dumps(of_rank | record).encode(), f"{path.name}.tmp")
            except OSError as error:
                self._report_once(f"{path} cannot be written: {error.strerror}")

        return write

    def _report_once(self, trouble: str) -> None:
        if self._reported.acquire(blocking=False):
            logger.warning(f"{trouble}; the job continues, logs are incomplete")

    def running(self) -> int:
        return sum(not rank.has_ended for rank in self._started)

    def ask_to_stop(self) -> None:
        """SIGTERM to those that have not had it, without a bound on how long they take to end."""
        for rank in self._started:
            if not rank.asked_to_stop:
                rank.ask_to_stop()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL: all have ended afterwards, and every process that they have started."""
        stop(self._started)
        kill_descendants()

    def ends(self, start: float) -> dict[int, WorkerResult]:
        """Local rank -> its end, for those that have ended; ``start`` is on the monotonic clock."""
        return {local: self._end(local, rank, start) for local, rank in enumerate(self._started) if rank.has_ended}

    def _end(self, local: int, rank: RankProcess, start: float) -> WorkerResult:
        assert rank.status is not None
        assert rank.ended_at is not None
        return WorkerResult(
            rank=self.node.ranks[local],
            endpoint=self.endpoint(local),
            node_index=self.node.index,
            exit_code=rank.status if rank.status >= 0 else None,
            signal_number=-rank.status if rank.status < 0 else None,
            seconds=round(rank.ended_at - start, 3),
            asked_to_stop=bool(rank.asked_to_stop),
            log_file=str(self.log_file(local)),
        )

    def endpoint(self, local_rank: int) -> str:
        return f"{self.node.address}:{self.node.started_port + local_rank}"

    def tail(self, local_rank: int) -> tuple[str, ...]:
        end = end_of(self.log_file(local_rank))
        return last_lines(end if self._verbose else without_startup_lines(end))

    def close(self) -> None:
        """No rank runs afterwards. Processes that a rank left running, and which succeeded, continue."""
        if self.running():
            self.stop()
        deadline = time.monotonic() + timeouts.END_RECORD_SECONDS
        for rank in self._started:
            rank.await_record(max(0.0, deadline - time.monotonic()))
            rank.wait(0.0)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
