"""The log folder of a launcher: where its ranks write, and how their end is recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train.cluster.flight.stands import Stand
from fleet_train.cluster.flight.witness import Seen, flight_name, stacks_name, write_files
from fleet_train.files import hold, holder, open_new, publish, read_regular
from fleet_train.launch.node import Node
from fleet_train.launch.processes import end_of
from fleet_train.launch.report import last_lines
from fleet_train.launch.supervise import RankProcess
from fleet_train.launch.terminal import without_startup_lines
from fleet_train.log import logger


def log_name(local_rank: int) -> str:
    return f"workerlog.{local_rank}"


def record_name(local_rank: int) -> str:
    return f"workerend.{local_rank}.json"


# Paddle's handler of signals: its C++ frames are those of whatever thread the signal met.
_STOPPED_BLOCK = re.compile(
    r"\n*-{20,}\nC\+\+ Traceback \(most recent call last\):\n-{20,}\n.*?\[SignalInfo: [^\n]*\]\n?", re.DOTALL
)


SpareOf = Callable[[int, Mapping[str, str], BinaryIO], subprocess.Popen[bytes] | None]
"""(local rank, environment, log) -> the spare process that has become this rank, or None."""


class LogFolder:
    """The logs and end records of one attempt; the first problem with writing them is reported.

    ``verbose``: last lines include Paddle's start-up lines. ``script``: what the ranks run, if it is a file.
    """

    def __init__(
        self, node: Node, folder: Path, attempt: int = 0, verbose: bool = False, script: Path | None = None
    ) -> None:
        self._node = node
        self._folder = folder
        self._attempt = attempt
        self._verbose = verbose
        self._script = script
        self._reported = threading.Lock()

    def prepare(self) -> None:
        """Create the folder; remove an earlier job's files, keep the logs of this job's earlier attempts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._attempt == 0:
            for old in self._folder.glob("trace.*.bin"):
                old.unlink(missing_ok=True)
        for local in range(self._node.processes):
            (self._folder / record_name(local)).unlink(missing_ok=True)
            rank = self._node.ranks[local]
            for log in (self.file(local), self._folder / stacks_name(rank), self._folder / flight_name(rank)):
                if self._attempt == 0:
                    for old in [log, *self._folder.glob(f"{log.name}.attempt*")]:
                        old.unlink(missing_ok=True)
                elif log.exists():
                    log.replace(log.with_name(f"{log.name}.attempt{self._attempt - 1}"))

    def file(self, local_rank: int) -> Path:
        return self._folder / log_name(local_rank)

    def start_rank(
        self, local: int, command: Sequence[str], environ: Mapping[str, str], spare_of: SpareOf = lambda *_: None
    ) -> RankProcess:
        """Start the process of a rank that writes into its log, or let its spare become it. Raises OSError if the
        kernel refuses that."""
        with self._open(local) as log:
            spare = spare_of(local, environ, log)
            return RankProcess(command, environ, log, str(self.file(local)), self._writer(local), spare)

    def _open(self, local: int) -> BinaryIO:
        try:
            log: BinaryIO = open_new(self.file(local))
            return log
        except OSError as error:
            self._report_once(f"{self.file(local)} cannot be written: {error.strerror}")
            return open(os.devnull, "wb")

    def _writer(self, local: int) -> Callable[[dict[str, Any]], None]:
        path, rank = self._folder / record_name(local), self._node.ranks[local]
        of_rank = {"rank": rank, "local_rank": local, "endpoint": self._node.endpoint_of(rank)}

        def write(record: dict[str, Any]) -> None:
            try:
                publish(path, json.dumps(of_rank | record).encode(), f"{path.name}.tmp")
            except OSError as error:
                self._report_once(f"{path} cannot be written: {error.strerror}")

        return write

    def _report_once(self, trouble: str) -> None:
        if self._reported.acquire(blocking=False):
            logger.warning(f"{trouble}; the job continues, logs are incomplete")

    def write_stands(self, stands: Iterable[Stand], seen: Iterable[Seen]) -> None:
        try:
            write_files(self._folder, stands, seen)
        except OSError as error:
            self._report_once(f"{error.filename or self._folder} cannot be written: {error.strerror}")

    def tail(self, local_rank: int, stopped: bool = False) -> tuple[str, ...]:
        """The last lines of a rank's log, and what they mean where that is known; ``stopped``: without what Paddle
        prints when it is ended by a signal."""
        end = end_of(self.file(local_rank))
        end = end if self._verbose else without_startup_lines(end)
        lines = last_lines(_STOPPED_BLOCK.sub("", end) if stopped else end)
        return (*lines, *of_paddles_fleet(end_of(self.file(local_rank), _MOST_BYTES), self._script))


_MOST_BYTES = 1 << 20
"""Of a log, and of a script. Paddle's error prints the whole program behind its traceback."""
_IN_PADDLES_FLEET = re.compile(r'[/\\]paddle[/\\]distributed[/\\]fleet[/\\]fleet\.py", line \d+, in _?minimize')
_IMPORTS_IT = re.compile(
    r"^\s*(from\s+paddle\.distributed\s+import\b.*\bfleet\b|(from|import)\s+paddle\.distributed\.fleet\b).*$"
)


def of_paddles_fleet(log: str, script: Path | None) -> list[str]:
    """Names the line to change where a rank ended in the ``minimize`` of Paddle's own fleet; else nothing."""
    if not _IN_PADDLES_FLEET.search(log):
        return []
    where = ""
    with suppress(OSError):
        lines = read_regular(script, _MOST_BYTES).decode(errors="replace").splitlines() if script else []
        found = [(number, line.strip()) for number, line in enumerate(lines, 1) if _IMPORTS_IT.match(line)]
        where = f" in line {found[0][0]} of {script.name} ({found[0][1]})" if found and script else ""
    return [
        f"fleet_train: ConversionError: paddle.distributed.fleet, Paddle's own, was imported{where}: it does not "
        "convert the static programs of Paddle 3; import this package's there: from fleet_train import fleet"
    ]


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
            logger.warning(f"{wanted} is in use by another job ({holder(wanted)}); the logs of this one go to {folder}")
        _taken[wanted] = folder, held
        break
    return _taken[wanted][0]
