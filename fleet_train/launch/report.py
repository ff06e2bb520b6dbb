"""How ranks ended, which of them was the root cause, and the failure report, a failed job's last output. Pure.

The ranks' reports to the store (``FailureReport``) say more than the order in which processes end: a rank that has
raised may take long to exit, and one that others report as missing may never exit by itself, or has ended with 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fleet_train.cluster.flight.stands import Stand, merged, spans
from fleet_train.cluster.store.reports import FailureReport
from fleet_train.errors import Preempted, WorkerFailed
from fleet_train.launch.node import Node
from fleet_train.log import columns

_SHELL_SIGNAL_BASE = 128


@dataclass(frozen=True)
class WorkerResult:
    """The end of one rank. ``seconds`` count from the time at which all launchers had joined, on every node."""

    rank: int
    endpoint: str
    node_index: int
    exit_code: int | None  # None: a signal ended it, or it has not ended
    signal_number: int | None
    seconds: float
    asked_to_stop: bool
    log_file: str
    last_lines: tuple[str, ...] = ()
    report: FailureReport | None = None
    """The report about this rank's failure in the store, by itself or by a rank that missed it."""
    has_ended: bool = True
    """False if only its report is known: it still runs, or its node is silent."""
    stand: Stand | None = None
    """Where it stood before it was stopped."""

    @property
    def failed(self) -> bool:
        """Also with exit code 0: if others still needed it, or if it reported a failure itself."""
        return self.report is not None or not (self.succeeded or self.preempted)

    @property
    def failed_seconds(self) -> float:
        """When it failed, which may be long before its process has ended."""
        return self.seconds if self.report is None else min(self.seconds, self.report.seconds)

    @property
    def _says_enough(self) -> bool:
        """Whether the end of its process alone shows a failure."""
        return self.has_ended and not (self.asked_to_stop or self.succeeded or self.preempted)

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def preempted(self) -> bool:
        """It was asked to stop, has saved its state, and stopped."""
        return self.exit_code == Preempted.exit_code

    @property
    def secondary(self) -> bool:
        """It ended because something else had failed: it was stopped, or reported that another rank was lost."""
        return (
            self.report is None
            and not self.succeeded
            and not self.preempted
            and (self.asked_to_stop or self.exit_code == WorkerFailed.exit_code)
        )

    @property
    def gave_up_waiting(self) -> bool:
        """Gloo ended its process (SIGABRT) in a collective, as it does now and then where another rank hangs."""
        return self.signal_number == signal.SIGABRT and self.stand is not None and self.stand.waits

    @property
    def is_kept(self) -> bool:
        """It was stopped, slept in the kernel, or kept Python's lock: what other ranks wait for."""
        return self.stand is not None and bool(self.stand.state) and not (self.stand.waits or self.stand.has_ended)

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would show: 128 + signal.

        A failure that its own exit does not show (it had to be stopped, or ended with 0) has the report's exit code.
        """
        if self.report is not None and not self._says_enough:
            return self.report.exit_code
        if self.exit_code is not None:
            return self.exit_code
        return _SHELL_SIGNAL_BASE + (self.signal_number or signal.SIGKILL)

    def how(self) -> str:
        """``exit code 3``, ``killed by SIGKILL``, ``exit code 1 (ValueError)``, ``... , then stopped by SIGTERM``."""
        if self.report is None and self.is_kept and self.stand is not None:
            return f"{self.stand.state}, then {self._end()}"
        if self.report is None or (self.report.kind == "lost" and self._says_enough):
            return self._end()
        if not self.has_ended:
            return self.report.what
        if self.asked_to_stop:
            return f"{self.report.what}, then {self._end()}"
        ending = self._end() if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{ending} ({self.report.what})"

    def _end(self) -> str:
        if self.signal_number is not None:
            return f"{'stopped' if self.asked_to_stop else 'killed'} by {signal_name(self.signal_number)}"
        if self.exit_code == WorkerFailed.exit_code:
            return f"exit code {self.exit_code} (another rank was lost)"
        if self.preempted:
            return f"exit code {self.exit_code} (stopped gracefully)"
        return "finished" if self.succeeded else f"exit code {self.exit_code}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WorkerResult:
        report = None if data["report"] is None else FailureReport.from_json(data["report"])
        stand = None if data["stand"] is None else Stand.from_json(data["stand"])
        return cls(**{**data, "last_lines": tuple(data["last_lines"]), "report": report, "stand": stand})


def signal_name(number: int) -> str:
    """``SIGTERM``; ``signal 34`` if Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def choose_root_cause(ends: Iterable[WorkerResult]) -> WorkerResult | None:
    """The rank that failed first by itself; None if all succeeded or stopped gracefully.

    Secondary failures are considered only if there is no other failure, ranks that we stopped ourselves last. A rank
    that Gloo has ended while it waited is not to blame where another one is kept from going on.
    """
    failed = sorted(
        (end for end in ends if end.failed),
        key=lambda end: (end.asked_to_stop and end.report is None, end.secondary, end.failed_seconds, end.rank),
    )
    kept = [end for end in failed if end.is_kept]
    return kept[0] if kept and failed[0].gave_up_waiting else failed[0] if failed else None


def with_reports(ends: Iterable[WorkerResult], reports: Iterable[FailureReport], node: Node) -> list[WorkerResult]:
    """The results with the report about each rank, its own one first; and reported ranks that have no result."""
    results = {end.rank: end for end in ends}
    report_of: dict[int, FailureReport] = {}
    for report in reports:
        earlier = report_of.setdefault(report.rank, report)
        if report.is_own and not earlier.is_own:
            report_of[report.rank] = report.at(min(earlier.seconds, report.seconds))
    for rank, report in report_of.items():
        if 0 <= rank < node.world_size:
            results[rank] = replace(results.get(rank) or _not_ended(rank, report, node), report=report)
    return [results[rank] for rank in sorted(results)]


def _not_ended(rank: int, report: FailureReport, node: Node) -> WorkerResult:
    index = node.node_of(rank)
    return WorkerResult(rank, node.endpoint_of(rank), index, None, None, report.seconds, False, "", has_ended=False)


def last_lines(text: str, count: int = 15, width: int = 240) -> tuple[str, ...]:
    """The last non-empty lines; of a progress bar only its last state, of a very long line its beginning."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    shown = [line for line in lines if line]
    return tuple(line if len(line) <= width else line[: width - 3] + "..." for line in shown[-count:])


_ROWS_FOR_FOLLOWERS = 8
_MOST_STACK_LINES = 30


def failure_report(ends: Iterable[WorkerResult], silent_nodes: Sequence[str] = ()) -> str:
    """The root cause's last log lines, then a table: the root cause first, then the secondary failures.

    ``silent_nodes`` are nodes that have not reported how their ranks ended.
    """
    every = sorted(ends, key=lambda end: (end.seconds, end.rank))
    root_cause = choose_root_cause(every)
    if root_cause is None:
        return "the job has failed, but no rank of the nodes that reported has"
    parts = [
        _last_lines(root_cause),
        *_stack(root_cause, every),
        _table(root_cause, [end for end in every if end is not root_cause]),
    ]
    if silent_nodes:
        parts.append(f"not heard from: {', '.join(silent_nodes)}")
    return "\n".join(parts)


def headline(root_cause: WorkerResult) -> str:
    """One line for other nodes and for ranks that wait in the store."""
    rank, seconds = f"rank {root_cause.rank} ({root_cause.endpoint})", root_cause.failed_seconds
    return f"{rank} failed first: {root_cause.how()} after {seconds:.1f} s"


def _last_lines(root_cause: WorkerResult) -> str:
    host = root_cause.endpoint.rpartition(":")[0]
    traceback = root_cause.report.traceback if root_cause.report else ()
    if traceback and traceback[-1] not in root_cause.last_lines:  # much was printed since, or the log is unavailable
        lines = "\n".join(f"  | {line}" for line in traceback)
        return f"rank {root_cause.rank} reported ({host}:{root_cause.log_file}):\n{lines}"
    if not root_cause.last_lines:
        return f"rank {root_cause.rank} wrote nothing to its log ({host}:{root_cause.log_file})"
    lines = "\n".join(f"  | {line}" for line in root_cause.last_lines)
    return f"last lines of rank {root_cause.rank} ({host}:{root_cause.log_file}):\n{lines}"


def _stack(root_cause: WorkerResult, ends: Iterable[WorkerResult]) -> list[str]:
    """Where a rank stood that had to be stopped or waited for others, and where those waited meanwhile."""
    if root_cause.stand is None or not (root_cause.asked_to_stop or root_cause.stand.waits or root_cause.is_kept):
        return []
    stands = [end.stand for end in ends if end.stand is not None and (end is root_cause or end.stand.waits)]
    _, *stack = root_cause.stand.lines()
    return ["\n".join([merged(stands), *(f"  | {line}" for line in stack[:_MOST_STACK_LINES])])]


def _table(root_cause: WorkerResult, others: list[WorkerResult]) -> str:
    rows = [("", "rank", "host:port", "how it ended", "after", "log file"), _row("failed first", root_cause)]
    followers = [end for end in others if not end.succeeded or end.failed]
    rows += [_row("secondary", end) for end in followers[:_ROWS_FOR_FOLLOWERS]]
    lines = columns(rows)
    lines += _rest("secondary", followers[_ROWS_FOR_FOLLOWERS:])
    lines += _rest("finished", [end for end in others if end.succeeded and not end.failed])
    return "\n".join(lines)


def _row(role: str, end: WorkerResult) -> tuple[str, ...]:
    return (role, str(end.rank), end.endpoint, end.how(), f"{end.failed_seconds:.1f} s", end.log_file)


def _rest(role: str, ends: list[WorkerResult]) -> list[str]:
    if not ends:
        return []
    return [f"{role}: {'rank' if len(ends) == 1 else 'ranks'} {spans(sorted(end.rank for end in ends))}"]


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
