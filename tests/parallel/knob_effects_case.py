"""One case of a knob: settings, what is observed in a run of real ranks, and the expected observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.schema import FLAG_KNOBS
from tests.parallel.knob_effects_seen import Ran

Look = Callable[[Ran], Any]


class ByRank(list[Any]):
    """What is seen differs from rank to rank: one value each."""


@dataclass(frozen=True)
class Case:
    """``beside``: other settings. ``options``: of the run. ``sees``: what each look at it gives, on every rank.
    ``holds``: for how many seconds at most a collective waits until no launch operator is under way.
    """

    knob: str
    value: Any
    sees: dict[Look, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    run: str = "linear"
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    holds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.knob}: {self.value!r}" + (f" beside {self.beside}" if self.beside else "")

    @property
    def variables(self) -> dict[str, str]:
        """What is set in the environment of the process: the old flags."""
        return {self.knob: str(self.value)} if self.knob in FLAG_KNOBS else {}

    @property
    def settings(self) -> dict[str, Any]:
        return self.beside if self.variables else {**self.beside, self.knob: self.value}

    @property
    def is_default(self) -> bool:
        return not self.variables and bool(self.value == KNOBS[self.knob].default)

    def without_the_knob(self) -> dict[str, Any]:
        """The settings with the knob at its default, and without those that are nothing without it."""
        settings = {name: value for name, value in self.beside.items() if not _rests_on(name, self.knob)}
        Profile(**settings)
        return settings


def _rests_on(name: str, knob: str) -> bool:
    row = KNOBS[name]
    above = [row.needs, *(row.only_with.choices if row.only_with else ())]
    return any(one and (one == knob or _rests_on(one, knob)) for one in above)
