"""Tells the host, before a run's first bucket, whether a run with gradient merge ends with an update."""

from __future__ import annotations

from typing import Any

from fleet_train.collectives.engines.device import HostCopy
from fleet_train.collectives.engines.engine import Engine
from fleet_train.errors import ConversionError


class Boundaries:
    """Reads the program's own count where the host may read it; otherwise counts itself and compares one run later.

    The program counts in a variable that is saved with its state. At the start and after state was loaded, the count is
    unknown: the host then reads the variable until the next update.
    """

    def __init__(self, accumulate_steps: int, engine: Engine) -> None:
        self._size = accumulate_steps
        self._engine = engine
        self._runs: int | None = None
        """Micro-batches since the last update; None if unknown."""
        self._said: tuple[bool, HostCopy] | None = None
        """The answer given for the last run, and what the program counted in it."""

    def forget(self) -> None:
        """Called when other state is loaded."""
        self._runs, self._said = None, None

    def ends_update(self, boundary: Any) -> bool:
        """Whether this run ends with an update; ``boundary``: bool [1], as counted by the program."""
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
                "classified wrongly; load state with fleet.load_persistables or another call of fleet"
            )
