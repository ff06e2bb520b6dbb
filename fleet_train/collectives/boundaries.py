"""Which runs of a program with gradient merge end with an update: known on the host before the run's first bucket."""

from __future__ import annotations

from typing import Any

from fleet_train.collectives.engines.device import HostCopy
from fleet_train.collectives.engines.engine import Engine
from fleet_train.errors import ConversionError


class Boundaries:
    """Reads the program's own count where the host may; counts along, and compares a run later, where it may not.

    The program counts in a variable that is saved with its state. Where the count stands is not known at first, and
    after state was loaded: up to the next update the host then reads along.
    """

    def __init__(self, accumulate_steps: int, engine: Engine) -> None:
        self._size = accumulate_steps
        self._engine = engine
        self._runs: int | None = None
        """Micro-batches since the last update; None: not known."""
        self._said: tuple[bool, HostCopy] | None = None
        """What was said of the last run, and what the program has counted in it."""

    def forget(self) -> None:
        """Other state is loaded."""
        self._runs, self._said = None, None

    def ends_update(self, boundary: Any) -> bool:
        """Whether this run ends with an update; ``boundary``: bool [1], as the program has counted."""
        if self._engine.reads_values:
            return bool(boundary.item())
        self._compare()
        copy = self._engine.device.to_host(boundary)
        if self._runs is None:
            ends = bool(copy.read().item())
        else:
            ends = self._runs + 1 >= self._size
            self._said = ends, copy
        self._runs = 0 if ends else None if self._runs is None else self._runs + 1
        return ends

    def _compare(self) -> None:
        said, self._said = self._said, None
        if said is not None and bool(said[1].read().item()) != said[0]:
            raise ConversionError(
                "gradient merge: the program's count of micro-batches changed between two steps, so the last step was "
                "misjudged; load state with fleet.load_persistables or another call of fleet"
            )
