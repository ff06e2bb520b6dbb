"""All ranks of one spawn: started together, monitored until they have ended, and always stopped.

`results` converts how they ended to their results, or to one error that names the rank that failed first.
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed, Preempted, RankFailed
from fleet_train.files import open_new, write_all
from fleet_train.launch.node import Node
from fleet_train.launch.processes import Process, stop
from fleet_train.launch.report import WorkerResult, choose_root_cause, last_lines, with_reports
from fleet_train.spawning import shipping
from fleet_train.spawning.environment import SpawnStore

_MODULE = "fleet_train.spawning.rank_main"
_PIECE_BYTES = 1 << 16
_TAIL_CHARACTERS = 1 << 16


class Ranks:
    """``forward`` shows rank 0's output; called on the waiting thread, so that a notebook's cell gets it."""

    def __init__(self, store: SpawnStore, forward: Callable[[str], None]) -> None:
        self._ranks: list[RankProcess] = []
        self._store = store
        self._forward = forward
        self._began = time.monotonic()
        self._failing_since: float | None = None
        self._reports: list[FailureReport] = []
        self._look_at_store = 0.0
        self._selector = selectors.DefaultSelector()

    def add(self, rank: RankProcess) -> None:
        """A rank that was just started; from now on `end` stops it."""
        self._ranks.append(rank)
        self._selector.register(rank.output, selectors.EVENT_READ, rank)

    def wait(self) -> None:
        """Wait until all have ended, or one has failed and the others had time to report."""
        while not self._is_over():
            self._turn()

    def _is_over(self) -> bool:
        now = time.monotonic()
        if all(rank.is_over for rank in self._ranks):
            return True
        if self._failing_since is not None:
            return now > self._failing_since + (
                timeouts.SPAWN_FOLLOWERS_SECONDS if self._knows_root_cause() else timeouts.SPAWN_ROOT_CAUSE_SECONDS
            )
        return all(
            rank.result is not None and now > rank.heard_at + timeouts.SPAWN_EXIT_SECONDS for rank in self._ranks
        )

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeouts.WATCH_TICK_SECONDS):
            self._read_output(key.data)
        for rank in self._ranks:
            self._look(rank)
        if time.monotonic() > self._look_at_store:
            self._look_at_store = time.monotonic() + timeouts.ASK_STORE_SECONDS
            self._reports = self._store.reports()
        if self._failing_since is None and (self._reports or any(map(_has_failed, self._ranks))):
            self._failing_since = time.monotonic()

    def _look(self, rank: RankProcess) -> None:
        if rank.is_over:
            return
        has_ended = rank.has_ended
        rank.read_answer()
        if has_ended:
            rank.is_over = True
            if rank.result is not None:
                self._store.report_ended(rank.index)

    def _read_output(self, rank: RankProcess) -> None:
        text, goes_on = rank.read_output()
        if rank.index == 0 and text and not rank.asked_to_stop:  # Paddle prints a lot on SIGTERM
            self._forward(text)
        if not goes_on:
            self._selector.unregister(rank.output)

    def _knows_root_cause(self) -> bool:
        """Whether a rank has failed by itself and has reported it, or was ended by a signal."""
        reports = [*self._reports, *(report for rank in self._ranks for report in rank.reports)]
        return any(report.is_own for report in reports) or any(
            rank.is_over and rank.failure is None and rank.result is None for rank in self._ranks
        )

    def end(self) -> list[RankOutcome]:
        """Stop all running ranks: SIGTERM, then SIGKILL after 3 s, or at once on Ctrl-C. Returns how each ended."""
        with interrupts_held() as interrupted:
            try:
                stop(self._ranks, lambda: self._goes_on(interrupted))
                self._reports = self._store.reports()
            finally:
                outcomes = [self._collect(rank) for rank in self._ranks]
                self._selector.close()
            return outcomes

    def _goes_on(self, interrupted: Callable[[], bool]) -> bool:
        self._turn()
        return not interrupted()

    def _collect(self, rank: RankProcess) -> RankOutcome:
        if rank.result is None or not rank.has_ended:
            rank.kill_group()
        status = rank.wait()
        rank.read_answer()
        while (output := rank.read_output())[0]:
            if rank.index == 0 and not rank.asked_to_stop:
                self._forward(output[0])
        rank.close()
        assert status is not None
        assert rank.ended_at is not None
        if rank.was_done:
            status = 0
        failure = rank.failure or {}
        if rank.asked_to_stop and "exit_code" in failure:  # it was exiting with that, slower than we waited
            status = int(failure["exit_code"])
        if failure.get("kind") == "failed" and status == 0:
            status = 1
        end = WorkerResult(
            rank=rank.index,
            endpoint="",
            node_index=0,
            exit_code=status if status >= 0 else None,
            signal_number=-status if status < 0 else None,
            seconds=rank.ended_at - self._began,
            asked_to_stop=bool(rank.asked_to_stop),
            log_file="",
            last_lines=last_lines(rank.tail, _TAIL_LINES),
        )
        reports = tuple(report.at(rank.heard_at - self._began) for report in rank.reports)
        texts = {name: str(failure.get(name, "")) for name in ("kind", "message", "traceback")}
        return RankOutcome(end, rank.result, reports, **texts)

    @property
    def reports(self) -> list[FailureReport]:
        """The ranks' reports in the store."""
        return self._reports


def _has_failed(rank: RankProcess) -> bool:
    if rank.failure is not None:
        return bool(rank.failure["kind"] != "preempted")
    return rank.is_over and rank.result is None


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


class RankProcess(Process):
    """It reads ``greeting``, a file of `shipping`, and writes its answer (result or failure) into another one."""

    def __init__(self, index: int, environ: Mapping[str, str], greeting: int, log: Path | None) -> None:
        self.index = index
        self.result: bytes | None = None
        self.failure: dict[str, Any] | None = None
        """Its report about its failure."""
        self.heard_at = 0.0
        """When it reported how its call ended; on the monotonic clock, as are all times here."""
        self.is_over = False
        """Its end was noticed, and its answer was read."""
        self.was_done = False
        """Its call had returned when it was stopped: how its process ended does not count."""
        self.tail = ""
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

    def read_answer(self) -> None:
        """Its result or its failure, once it has told it."""
        if not self.heard_at and (answer := shipping.read(self._answer)) is not None:
            self.heard_at = time.monotonic()
            header, body = answer
            if header["kind"] == "result":
                self.result = body
            else:
                self.failure = header

    @property
    def reports(self) -> list[FailureReport]:
        """Its own report about its failure."""
        return [FailureReport.from_json(report) for report in (self.failure or {}).get("reports", ())]

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        super().ask_to_stop(number)
        if self.result is not None:
            self.asked_to_stop, self.was_done = 0, True

    def close(self) -> None:
        self._open.close()


_MOST_FOLLOWERS = 8
_TAIL_LINES = 15


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
    silent = [_silent_end(outcome) for outcome in outcomes if _ended_without_a_word(outcome)]
    by_time = sorted([*in_store, *own, *silent], key=lambda report: report.seconds)
    end = choose_root_cause(with_reports(ends, by_time, node))
    return None if end is None else (end, outcomes[end.rank])


def _ended_without_a_word(outcome: RankOutcome) -> bool:
    return outcome.end.succeeded and outcome.result is None and not outcome.kind and not outcome.end.asked_to_stop


def _silent_end(outcome: RankOutcome) -> FailureReport:
    what = "its process ended with exit code 0 before its function had returned"
    rank = outcome.end.rank
    return FailureReport(rank, rank, "exited", what, f"rank {rank}: {what}", 1, (), outcome.end.seconds)


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
