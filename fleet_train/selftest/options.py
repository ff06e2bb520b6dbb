"""The options of a selftest; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_train.errors import ClusterError

GROUPS = {
    "devices": "one device per rank, backend, versions",
    "collectives": "every collective and dtype against exact integers",
    "profiles": "every profile trained and compared with the simulator",
    "overlap": "how much of the communication overlaps with computing",
    "faults": "a rank that skips a collective, is stopped, is killed",
}
"""The values of ``--only`` and ``--skip``, in the order of execution."""
TOGETHER = "together"
"""The job of all checks that one process per rank can run in sequence."""
TOGETHER_GROUPS = tuple(group for group in GROUPS if group != "faults")
DEFAULT_FOLDER = Path("runs/selftest")


@dataclass(frozen=True)
class Options:
    """``groups``: the checks to run. Times in seconds."""

    groups: tuple[str, ...] = tuple(GROUPS)
    steps: int = 50
    rounds: int = 9
    fault_timeout_seconds: int = 4
    """How long a rank may keep the others waiting, in the checks of faults (collective_timeout_seconds)."""
    join_timeout_seconds: float = 120.0

    @property
    def is_quick(self) -> bool:
        return self.steps != Options.steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"groups": list(self.groups)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        return cls(**data | {"groups": tuple(data["groups"])})


_QUICK = {"steps": 20, "rounds": 3}


def chosen(only: Sequence[str], skip: Sequence[str], quick: bool = False) -> Options:
    """The options of the flags. Raises ClusterError if nothing is left to do."""
    left = tuple(group for group in GROUPS if (not only or group in only) and group not in skip)
    if not left:
        raise ClusterError(f"--only and --skip leave nothing to check; the checks are {', '.join(GROUPS)}")
    return Options(left, **(_QUICK if quick else {}))
