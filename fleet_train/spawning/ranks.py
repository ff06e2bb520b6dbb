"""All ranks of one spawn: started together, monitored until they have ended, and always stopped."""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from fleet_train import timeouts
from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed, Preempted, RankFailed
from fleet_train.launch.node import Node
from fleet_train.launch.processes import stop
from fleet_train.launch.report import WorkerResult, choose_root_cause, last_lines, with_reports
from fleet_train.spawning.environment import SpawnStore
from fleet_train.spawning.rank_process import RankProcess


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
                self._store.tell_ended(rank.index)

    def _read_output(self, rank: RankProcess) -> None:
        text, goes_on = rank.read_output()
        if rank.index == 0 and text and not rank.asked_to_stop:  # Paddle prints a lot on SIGTERM
            self._forward(text)
        if not goes_on:
            self._selector.unregister(rank.output)

    def _knows_root_cause(self) -> bool:
        """Whether a rank has failed by itself and has reported it, or was ended by a signal."""
        told = [*self._reports, *(report for rank in self._ranks for report in rank.reports)]
        return any(report.is_own for report in told) or any(
            rank.is_over and rank.told is None and rank.result is None for rank in self._ranks
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
        while (found := rank.read_output())[0]:
            if rank.index == 0 and not rank.asked_to_stop:
                self._forward(found[0])
        rank.close()
        assert status is not None
        assert rank.ended_at is not None
        if rank.was_done:
            status = 0
        told = rank.told or {}
        if rank.asked_to_stop and "exit_code" in told:  # it was exiting with that, slower than we waited
            status = int(told["exit_code"])
        return RankOutcome(
            rank=rank.index,
            status=status,
            seconds=rank.ended_at - self._began,
            asked_to_stop=bool(rank.asked_to_stop),
            result=rank.result,
            kind=str(told.get("kind", "")),
            message=str(told.get("message", "")),
            traceback=str(told.get("traceback", "")),
            reports=tuple(report.at(rank.heard_at - self._began) for report in rank.reports),
            tail=rank.tail,
        )

    @property
    def reports(self) -> list[FailureReport]:
        """The ranks' reports in the store."""
        return self._reports


def _has_failed(rank: RankProcess) -> bool:
    if rank.told is not None:
        return bool(rank.told["kind"] != "preempted")
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


# Converts how the ranks ended to their results, or to one error that names the rank that failed first.


_MOST_FOLLOWERS = 8
_TAIL_LINES = 15


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended; ``seconds`` after the start. ``kind`` is the kind of failure that it reported."""

    rank: int
    status: int
    """As in subprocess: negative for a signal."""
    seconds: float
    asked_to_stop: bool
    result: bytes | None
    kind: str
    """``failed``, ``preempted``, ``unguarded``; empty if it reported nothing, or returned."""
    message: str
    traceback: str
    reports: tuple[FailureReport, ...]
    tail: str
    """The end of its output."""


def results(outcomes: Sequence[RankOutcome], told: Sequence[FailureReport], node: Node, log_dir: str) -> list[bytes]:
    """The ranks' return values, in their order.

    ``told``: the reports in the store. Raises RankFailed, LinkFailed if no rank is to blame, Preempted if ranks have
    stopped gracefully because they were asked to, ClusterError for a script that cannot be started this way.
    """
    first = root_cause(outcomes, told, node)
    own = (report for outcome in outcomes for report in outcome.reports)
    of_no_rank = next((report for report in (*told, *own) if report.rank == NO_RANK), None)
    if first is not None and first[0].secondary and of_no_rank is not None:
        raise LinkFailed(of_no_rank.message)
    if first is not None:
        raise _error(first, outcomes, node, log_dir)
    for outcome in outcomes:
        if outcome.kind == "preempted":
            raise Preempted(f"rank {outcome.rank} stopped gracefully: {outcome.message}")
    return [outcome.result or b"" for outcome in outcomes]


def root_cause(
    outcomes: Sequence[RankOutcome], told: Sequence[FailureReport], node: Node
) -> tuple[WorkerResult, RankOutcome] | None:
    """The rank that failed first by itself, by the rules of the launcher; None if there is none."""
    ends = [_as_worker_result(outcome, node) for outcome in outcomes]
    own = [report for outcome in outcomes for report in outcome.reports]
    silent = [_silent_end(outcome) for outcome in outcomes if _ended_without_a_word(outcome)]
    by_time = sorted([*told, *own, *silent], key=lambda report: report.seconds)
    end = choose_root_cause(with_reports(ends, by_time, node))
    return None if end is None else (end, outcomes[end.rank])


def _as_worker_result(outcome: RankOutcome, node: Node) -> WorkerResult:
    status = outcome.status
    if outcome.kind == "failed" and status == 0:
        status = 1
    return WorkerResult(
        rank=outcome.rank,
        endpoint=f"{node.address}:{node.started_port + outcome.rank}",
        node_index=0,
        exit_code=status if status >= 0 else None,
        signal_number=-status if status < 0 else None,
        seconds=outcome.seconds,
        asked_to_stop=outcome.asked_to_stop,
        log_file="",
        last_lines=last_lines(outcome.tail, _TAIL_LINES),
    )


def _ended_without_a_word(outcome: RankOutcome) -> bool:
    return outcome.status == 0 and outcome.result is None and not outcome.kind and not outcome.asked_to_stop


def _silent_end(outcome: RankOutcome) -> FailureReport:
    what = "its process ended with exit code 0 before its function had returned"
    rank = outcome.rank
    return FailureReport(rank, rank, "exited", what, f"rank {rank}: {what}", 1, (), outcome.seconds)


def _error(
    root_cause: tuple[WorkerResult, RankOutcome], outcomes: Sequence[RankOutcome], node: Node, log_dir: str
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
    parts += _followers(end, outcomes, node)
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


def _followers(end: WorkerResult, outcomes: Sequence[RankOutcome], node: Node) -> list[str]:
    others = [one for one in outcomes if one.rank != end.rank and (one.result is None or one.status)]
    lines = []
    for one in others[:_MOST_FOLLOWERS]:
        said = one.message.splitlines()[0] if one.message else _as_worker_result(one, node).how()
        lines.append(f"rank {one.rank} followed: {said}")
    if len(others) > _MOST_FOLLOWERS:
        lines.append(f"and {len(others) - _MOST_FOLLOWERS} more")
    return lines


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
