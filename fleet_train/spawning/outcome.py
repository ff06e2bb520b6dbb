"""Converts how the ranks ended to their results, or to one error that names the rank that failed first."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_train.cluster.failure_report import NO_RANK, FailureReport
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed, Preempted, RankFailed
from fleet_train.launch.report.worker_result import WorkerResult, choose_root_cause, last_lines, with_reports
from fleet_train.launch.spec.node import Node

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
