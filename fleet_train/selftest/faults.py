"""Check 4 in the supervisors: how soon the others end when one rank fails, and whether they name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet_train.cluster.cluster import Cluster
from fleet_train.errors import WorkerFailed
from fleet_train.selftest.options import Options
from fleet_train.selftest.results import FAIL, OK, Result

KINDS = ("skips a collective", "is stopped", "is killed")
GRACE_SECONDS = 10.0
"""In addition to the profile's collective_timeout_seconds: the time for detection, diagnosis and exit."""


@dataclass(frozen=True)
class Ended:
    """One rank's subject after the fault: ``seconds`` from the fault to its end, the end of its output."""

    seconds: float
    exit_code: int
    was_killed: bool
    last_lines: tuple[str, ...]


def judge(cluster: Cluster, kind: str, options: Options, ends: Mapping[int, Ended], seconds: float) -> Result:
    """``cluster``: the subjects', whose last rank failed; ``ends``: those of all others."""
    bound = options.fault_timeout_seconds + GRACE_SECONDS
    root_cause = cluster.describe(cluster.world_size - 1)
    label = f"a rank {kind}"
    slowest = max(end.seconds for end in ends.values())
    figures = {
        "seconds": {str(rank): round(end.seconds, 2) for rank, end in ends.items()},
        "exit_codes": {str(rank): end.exit_code for rank, end in ends.items()},
        "bound_seconds": bound,
    }
    for rank, end in ends.items():
        wrong = _wrong(end, root_cause, bound)
        if wrong:
            words = f"{cluster.describe(rank)} {wrong}; {root_cause} {kind.replace('is ', 'was ')}"
            return Result("faults", label, FAIL, words, seconds, figures)
    words = f"{len(ends)} other rank(s) ended within {slowest:.1f} s ({bound:g} s allowed) and named {root_cause}"
    return Result("faults", label, OK, words, seconds, figures)


def _wrong(end: Ended, root_cause: str, bound: float) -> str:
    said = last_words(end.last_lines)
    if end.was_killed:
        return f"had not ended {end.seconds:.1f} s after the fault and was killed"
    if end.exit_code != WorkerFailed.exit_code:
        return f"ended with {describe_code(end.exit_code)}, expected {WorkerFailed.exit_code}: {said}"
    if root_cause not in said:
        return f"does not name {root_cause}: {said}"
    if end.seconds > bound:
        return f"ended after {end.seconds:.1f} s, {bound:g} s are allowed"
    return ""


def last_words(lines: Sequence[str]) -> str:
    """A rank's message about its end: its last line of ours, or its last one."""
    ours = [line for line in lines if line.startswith("fleet_train:")]
    return (ours or list(lines) or ["it printed nothing"])[-1]


def describe_code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
