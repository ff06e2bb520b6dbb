"""Attempts of a job, how one ended, and whether another one makes sense: data and pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleet_train import timeouts
from fleet_train.errors import MISTAKES, ClusterError, ScheduleMismatch
from fleet_train.launch.report import WorkerResult, headline
from fleet_train.launch.request import FaultPolicy


def what_failed(attempt: Attempt, result: RunResult) -> str:
    """One line for a failed attempt: ``attempt 0: rank 1 (10.0.0.2:6170) failed first: exit code 1 after 3 s``."""
    if result.kind is Kind.FAILED and result.root_cause is not None and not result.without_root_cause:
        return f"attempt {attempt.number}: {headline(result.root_cause)}"
    return f"attempt {attempt.number}: {result.message}"


FAILS_AGAIN = MISTAKES | {ClusterError.exit_code, ScheduleMismatch.exit_code}
# These come from outside: an operator, the kernel out of memory, a batch system.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Attempt:
    """``round`` is the rendezvous round, ``number`` the attempt of the job, both from 0.

    A new launcher knows only the round; the attempt gets the highest number that any launcher knows.
    """

    round: int
    number: int
    nodes: tuple[int, ...]
    """Positions in --cluster_node_ips of the nodes that take part, in the order of ranks."""


class Kind(Enum):
    DONE = "all ranks ended with 0"
    PREEMPTED = "all ranks have saved their state and stopped, as they were asked to"
    RESUMES = "all ranks have saved their state, to continue with nodes that have come back"
    FAILED = "a rank, a launcher or a machine failed"


@dataclass(frozen=True)
class RunResult:
    """The result of one attempt, as this launcher knows it."""

    kind: Kind
    exit_code: int
    message: str = ""
    ends: tuple[WorkerResult, ...] = ()
    """Of all nodes that reported theirs."""
    silent: tuple[str, ...] = ()
    root_cause: WorkerResult | None = None
    final: bool = False
    """The process that ended it does not want another attempt."""
    without_root_cause: bool = False
    """The failure has no root cause in a rank: the message is complete."""
    store_lost: bool = False
    """The leader's launcher, and its store, could not be reached any more."""
    has_trained: bool = False
    """A rank of this node has made a step."""

    @property
    def seconds(self) -> float:
        return max((end.seconds for end in self.ends), default=0.0)


def why_not_again(result: RunResult, earlier: Sequence[RunResult], restarts: int, policy: FaultPolicy) -> str | None:
    """Why there is no further attempt ("": no explanation is needed); None if another attempt makes sense."""
    root_cause = result.root_cause
    if result.final or policy.max_restarts == 0:
        return ""
    is_mistake = root_cause is not None and root_cause.shell_code in FAILS_AGAIN
    # With a silent node, a rank's error may only be a consequence of that node's loss.
    if is_mistake and not result.without_root_cause and not result.silent:
        mistake = "a mistake in flags, profile, data or numbers"
        return f"exit code {result.exit_code} means {mistake}; a restart would fail again"
    if earlier and _same_failure(result, earlier[-1]):
        return "it failed twice in the same way"
    if restarts >= policy.max_restarts:
        return f"all restarts are used up (--max_restarts={policy.max_restarts})"
    return None


def _same_failure(last: RunResult, earlier: RunResult) -> bool:
    mine, before = _signature(last), _signature(earlier)
    return mine is not None and mine == before and last.seconds < timeouts.ATTEMPT_PROGRESS_SECONDS


def _signature(result: RunResult) -> tuple[Any, ...] | None:
    """What two failures of one cause have in common; None for those that came from outside or were secondary."""
    root_cause = result.root_cause
    if result.without_root_cause or root_cause is None or root_cause.secondary:
        return None
    if (
        root_cause.report is not None and root_cause.report.traceback
    ):  # whatever it printed afterwards, and however it ended
        return root_cause.rank, root_cause.shell_code, None, re.sub(r"\d+", "#", root_cause.report.traceback[-1])
    if root_cause.signal_number in _FROM_OUTSIDE:
        return None
    last = root_cause.last_lines[-1] if root_cause.last_lines else ""
    return root_cause.rank, root_cause.exit_code, root_cause.signal_number, re.sub(r"\d+", "#", last)


def pause_seconds(results: Sequence[RunResult]) -> float:
    """How long to wait before a restart, after these attempts: not at all if the last one has trained, else longer
    after each one that has not, so that there is no storm if every attempt fails at once."""
    in_vain = 0
    for result in reversed(results):
        if result.has_trained or result.seconds >= timeouts.ATTEMPT_PROGRESS_SECONDS:
            break
        in_vain += 1
    return min(2.0 ** (in_vain - 1), timeouts.LONGEST_RESTART_PAUSE_SECONDS) if in_vain else 0.0
