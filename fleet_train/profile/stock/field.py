"""A row of ``stock_fields`` about one field of Fleet's strategy objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleet_train.profile.knobs import Fate, shown
from fleet_train.profile.schema.settings import KNOBS


@dataclass(frozen=True)
class StockField:
    """How a field's values are handled.

    ``silent`` values ask for what happens anyway; ``mapped`` ones do as well, but rank 0 prints the sentence
    ``mapping``; a ``switch`` stands for settings of several knobs; any other value goes to ``knob``, or is refused with
    ``refusal``. ``reading`` turns Fleet's value into the knob's, and ``note`` says so. ``needs`` names the field that
    must be on.
    """

    path: str
    silent: tuple[Any, ...] = ()
    mapped: tuple[Any, ...] = ()
    mapping: str = ""
    refusal: str = ""
    knob: str = ""
    switch: Switch | None = None
    reading: Callable[[Any], Any] | None = None
    note: str = ""
    needs: str = ""

    @property
    def fate(self) -> Fate:
        if self.knob == self.path:
            return KNOBS[self.knob].fate
        return "mapped" if self.knob or self.mapping or self.switch else "refused"


@dataclass(frozen=True)
class Switch:
    """The value of a field that stands for settings of other knobs; ``note`` is a note to the user.

    ``yields``: the settings apply only unless another field or knob sets them, in any order.
    """

    value: Any
    settings: tuple[tuple[str, Any], ...]
    note: str = ""
    yields: bool = False

    @property
    def words(self) -> str:
        settings = " and ".join(f"{name}: {shown(value)}" for name, value in self.settings)
        return f"read as {settings}{', unless another field says otherwise' if self.yields else ''}{self.note}"
