"""The options of a selftest, the same on every rank; the results of its checks, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fleet_train.errors import ClusterError

GROUPS = {
    "devices": "one device per rank, backend, versions",
    "collectives": "every collective and dtype against exact integers",
    "profiles": "every profile trained and compared with the simulator",
    "faults": "a rank that skips a collective, is stopped, is killed",
}
"""The values of ``--only`` and ``--skip``, in the order of execution."""
TOGETHER = "together"
"""The job of all checks that one process per rank can run in sequence."""
MEMORY_OF = "memory of "
"""Before a stream: a job of the ladder."""
TOGETHER_GROUPS = tuple(group for group in GROUPS if group != "faults")
DEFAULT_FOLDER = Path("runs/selftest")


@dataclass(frozen=True)
class SelftestOptions:
    """``groups``: the checks to run. Times in seconds."""

    groups: tuple[str, ...] = tuple(GROUPS)
    ladder: bool = False
    """Instead of the groups: the steps of `fleet_train.selftest.ladder`."""
    steps: int = 50
    fault_timeout_seconds: int = 4
    """How long a rank may keep the others waiting, in the checks of faults (collective_timeout_seconds)."""
    join_timeout_seconds: float = 120.0

    @property
    def is_quick(self) -> bool:
        return self.steps != SelftestOptions.steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"groups": list(self.groups)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SelftestOptions:
        return cls(**data | {"groups": tuple(data["groups"])})


_QUICK = {"steps": 20}


def chosen(only: Sequence[str], skip: Sequence[str], quick: bool = False, ladder: bool = False) -> SelftestOptions:
    """The options of the flags. Raises ClusterError if nothing is left to do."""
    return SelftestOptions(chosen_groups(GROUPS, only, skip, "check; the checks"), ladder, **(_QUICK if quick else {}))


def chosen_groups(groups: Iterable[str], only: Sequence[str], skip: Sequence[str], what: str) -> tuple[str, ...]:
    """Those that ``--only`` and ``--skip`` select. Raises ClusterError if none is left."""
    left = tuple(group for group in groups if (not only or group in only) and group not in skip)
    if not left:
        raise ClusterError(f"--only and --skip leave nothing to {what} are {', '.join(groups)}")
    return left


OK, SKIP, FAIL = "ok", "skip", "FAIL"


@dataclass(frozen=True)
class Result:
    """One line of the report. ``group``: the name for ``--only`` and ``--skip``."""

    group: str
    name: str
    status: str
    words: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{self.status:<5} {self.name}: {self.words}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        return cls(**data)


def failed(results: Iterable[Result]) -> list[str]:
    """The names of the failed checks, each once, in their order."""
    return list(dict.fromkeys(result.name for result in results if result.status == FAIL))


def verdict(results: Iterable[Result], seconds: float) -> str:
    """The last line of the report."""
    results = list(results)
    numbers = {status: sum(result.status == status for result in results) for status in (OK, SKIP)}
    counted = ", ".join(f"{number} {status}" for status, number in numbers.items() if number)
    wrong = failed(results)
    if wrong:
        return f"FAILED: {', '.join(wrong)}{'; ' if counted else ''}{counted}, in {seconds:.0f} s"
    word = "PASSED" if exit_code(results) == 0 else "NOTHING was checked"
    return f"{word}: {counted or 'no check'}, in {seconds:.0f} s"


def exit_code(results: Iterable[Result]) -> int:
    """0: none failed, and not all were left out."""
    results = list(results)
    return 0 if any(result.status == OK for result in results) and not failed(results) else 1
