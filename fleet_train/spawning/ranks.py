"""The ranks of one spawn, as processes of the launcher's supervisor, which read and write messages of `shipping`.

`outcomes` are how they ended; `results` converts these to their results, or to one error that names the rank that
failed first.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed, Preempted, RankFailed
from fleet_train.files import open_new, write_all
from fleet_train.launch.node import Node
from fleet_train.launch.report import WorkerResult, choose_root_cause, last_lines, with_reports
from fleet_train.launch.workers import RankProcess, Ranks
from fleet_train.spawning import shipping

_MODULE = "fleet_train.spawning.rank_main"
_PIECE_BYTES = 1 << 16
_TAIL_CHARACTERS = 1 << 16
_TAIL_LINES = 15
_MOST_FOLLOWERS = 8


class SpawnedRank(RankProcess):
    """It reads ``greeting``, a file of `shipping`, and writes its answer (result or failure) into another one."""

    def __init__(self, index: int, environ: Mapping[str, str], greeting: int, log: Path | None) -> None:
        self.index = index
        self.result: bytes | None = None
        self.failure: dict[str, Any] = {}
        """Its report about its failure; empty without one."""
        self.tail = ""
        self._answered_at = 0.0
        self._was_done = False
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        with contextlib.ExitStack() as kept:
            self._log = None if log is None else kept.enter_context(open_new(log))
            self._answer = shipping.create()
            kept.callback(os.close, self._answer)
            descriptors = (greeting, self._answer)
            command = [sys.executable, "-u", "-m", _MODULE, *map(str, descriptors), str(os.getpid())]
            super().__init__(command, environ, subprocess.PIPE, pass_fds=descriptors, ties_itself=True)
            assert self.stdout is not None
            self.output = kept.enter_context(self.stdout)
            self._open = kept.pop_all()
        os.set_blocking(self.output.fileno(), False)

    def read_output(self) -> tuple[str, bool]:
        """(its output since the last call, whether there may be more)."""
        try:
            piece = os.read(self.output.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return "", True
        except OSError:
            piece = b""
        if piece and self._log is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to end the job
                write_all(self._log, piece)
        text = self._text.decode(piece, final=not piece)
        self.tail = (self.tail + text)[-_TAIL_CHARACTERS:]
        return text, bool(piece)

    def end(self) -> tuple[int, float] | None:
        """Known from its answer, if that is a failure, or if its threads go on for long afterwards; else its exit."""
        ended = super().end()
        self._read_answer()
        code = int(self.failure.get("exit_code", 0))
        if ended is None:
            over_at = self._answered_at + (0.0 if self._has_failed else timeouts.SPAWN_EXIT_SECONDS)
            return (code, self._answered_at) if self._answered_at and time.monotonic() > over_at else None
        status, at = ended
        if self._was_done:  # how its process ended does not count
            status = 0
        elif self.failure and (self.asked_to_stop or (self._has_failed and status == 0)):
            status = code  # it was exiting with that, slower than we waited
        return status, at

    @property
    def _has_failed(self) -> bool:
        return bool(self.failure) and self.failure["kind"] != "preempted"

    def _read_answer(self) -> None:
        if not self._answered_at and (answer := shipping.read(self._answer)) is not None:
            self._answered_at = time.monotonic()
            header, body = answer
            if header["kind"] == "result":
                self.result = body
            else:
                self.failure = header

    def reports(self, start: float) -> list[FailureReport]:
        """Those of its answer; one by us, if it ended well, but without an answer."""
        ended = super().end()
        if ended is not None and ended[0] == 0 and not self._answered_at and not self.asked_to_stop:
            return [silent_end(self.index, ended[1] - start)]
        at = self._answered_at - start
        return [FailureReport.from_json(report).at(at) for report in self.failure.get("reports", ())]

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        super().ask_to_stop(number)
        if self.result is not None:
            self.asked_to_stop, self._was_done = 0, True

    def close(self) -> None:
        self._open.close()


class Output:
    """What the ranks print, read by the thread that waits, so that a notebook's cell gets what ``show`` writes."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._selector = selectors.DefaultSelector()

    def add(self, rank: SpawnedRank) -> None:
        self._selector.register(rank.output, selectors.EVENT_READ, rank)

    def read(self, seconds: float) -> bool:
        """Wait for output, at most this long; show that of rank 0. Returns whether there was any."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            text, goes_on = key.data.read_output()
            if key.data.index == 0 and text and not key.data.asked_to_stop:  # Paddle prints a lot on SIGTERM
                self._show(text)
            if not goes_on:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def close(self) -> None:
        self._selector.close()


def end(ranks: Ranks[SpawnedRank], output: Output, start: float) -> list[RankOutcome]:
    """Stop all running ranks: SIGTERM, then SIGKILL after 3 s, or at once on Ctrl-C. Returns how each ended."""
    with interrupts_held() as interrupted:

        def goes_on() -> bool:
            output.read(timeouts.WATCH_TICK_SECONDS)
            return not interrupted()

        try:
            ranks.stop(goes_on)
        finally:
            ends = ranks.ends(start)
            for rank in ranks.started:
                if rank.result is None:  # although it may have ended with 0
                    rank.kill_group()
            while output.read(0.0):
                pass
            outcomes = [_outcome(ranks.started[local], end, start) for local, end in ends.items()]
            ranks.close()
            for rank in ranks.started:
                rank.close()
            output.close()
        return outcomes


def _outcome(rank: SpawnedRank, end: WorkerResult, start: float) -> RankOutcome:
    texts = {name: str(rank.failure.get(name, "")) for name in ("kind", "message", "traceback")}
    end = replace(end, last_lines=last_lines(rank.tail, _TAIL_LINES))
    return RankOutcome(end, rank.result, tuple(rank.reports(start)), **texts)


def silent_end(rank: int, seconds: float) -> FailureReport:
    """The report about a rank whose process ended with 0 before its function had returned."""
    what = "its process ended with exit code 0 before its function had returned"
    return FailureReport(rank, rank, "exited", what, f"rank {rank}: {what}", 1, (), seconds)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Within the block a Ctrl-C is only recorded (the given function tells); it is raised at the block's end."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # no other thread is interrupted
        return

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if noted:
        raise KeyboardInterrupt


def show(text: str) -> None:
    """Write to the Python-level stdout, which in a notebook is the cell's output and not a file descriptor."""
    stream = sys.stdout
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        pass  # the reader is gone; the job continues


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended, seconds after the start, and what it reported about that."""

    end: WorkerResult
    result: bytes | None = None
    reports: tuple[FailureReport, ...] = ()
    kind: str = ""
    """``failed``, ``preempted``, ``unguarded``; empty if it reported nothing, or returned."""
    message: str = ""
    traceback: str = ""


def results(
    outcomes: Sequence[RankOutcome], in_store: Sequence[FailureReport], node: Node, log_dir: str
) -> list[bytes]:
    """The ranks' return values, in their order.

    ``in_store``: reports. Raises RankFailed, LinkFailed if no rank is to blame, Preempted if ranks have stopped
    gracefully because they were asked to, ClusterError for a script that cannot be started this way.
    """
    first = root_cause(outcomes, in_store, node)
    own = (report for outcome in outcomes for report in outcome.reports)
    of_no_rank = next((report for report in (*in_store, *own) if report.rank == NO_RANK), None)
    if first is not None and first[0].secondary and of_no_rank is not None:
        raise LinkFailed(of_no_rank.message)
    if first is not None:
        raise _error(first, outcomes, log_dir)
    for outcome in outcomes:
        if outcome.kind == "preempted":
            raise Preempted(f"rank {outcome.end.rank} stopped gracefully: {outcome.message}")
    return [outcome.result or b"" for outcome in outcomes]


def root_cause(
    outcomes: Sequence[RankOutcome], in_store: Sequence[FailureReport], node: Node
) -> tuple[WorkerResult, RankOutcome] | None:
    """The rank that failed first by itself, by the rules of the launcher; None if there is none."""
    ends = [outcome.end for outcome in outcomes]
    own = [report for outcome in outcomes for report in outcome.reports]
    by_time = sorted([*in_store, *own], key=lambda report: report.seconds)
    end = choose_root_cause(with_reports(ends, by_time, node))
    return None if end is None else (end, outcomes[end.rank])


def _error(
    root_cause: tuple[WorkerResult, RankOutcome], outcomes: Sequence[RankOutcome], log_dir: str
) -> FleetTrainError:
    end, outcome = root_cause
    if outcome.kind == "unguarded":
        return ClusterError(outcome.message)
    parts = [f"rank {end.rank} of {len(outcomes)} failed first: {_how(end, outcome)}, after {end.failed_seconds:.1f} s"]
    if outcome.traceback:
        parts.append(f"its traceback:\n{_indented(outcome.traceback)}")
    elif not outcome.kind and end.report is not None and end.report.traceback:
        parts.append(f"its traceback ends with:\n{_indented(chr(10).join(end.report.traceback))}")
    if end.last_lines and not outcome.traceback:
        parts.append(f"the last lines of its output:\n{_indented(chr(10).join(end.last_lines))}")
    parts += _followers(end, outcomes)
    if log_dir:
        parts.append(f"the ranks' complete output is in {log_dir}")
    return RankFailed("\n".join(parts), end.rank, end.exit_code, end.signal_number, outcome.traceback)


def _how(end: WorkerResult, outcome: RankOutcome) -> str:
    if outcome.message:
        return outcome.message.splitlines()[0]
    hint = ""
    if end.signal_number == signal.SIGKILL and not end.asked_to_stop:
        hint = " (the kernel does this when memory runs out: see dmesg)"
    return f"{end.how()}{hint}"


def _followers(end: WorkerResult, outcomes: Sequence[RankOutcome]) -> list[str]:
    others = [
        outcome
        for outcome in outcomes
        if outcome.end.rank != end.rank and (outcome.result is None or not outcome.end.succeeded)
    ]
    lines = []
    for outcome in others[:_MOST_FOLLOWERS]:
        how = outcome.message.splitlines()[0] if outcome.message else outcome.end.how()
        lines.append(f"rank {outcome.end.rank} followed: {how}")
    if len(others) > _MOST_FOLLOWERS:
        lines.append(f"and {len(others) - _MOST_FOLLOWERS} more")
    return lines


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
