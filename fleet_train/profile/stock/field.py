"""What a row of ``stock_fields`` says of one field of Fleet's strategy objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleet_train.profile.knobs import Fate, shown
from fleet_train.profile.schema.settings import KNOBS


@dataclass(frozen=True)
class StockField:
    """What becomes of a field's values.

    ``silent`` ones ask for what happens anyway, ``mapped`` ones too but are worth the sentence ``mapping``, a
    ``switch`` stands for settings of several knobs; any other value goes to ``knob``, or is refused with ``refusal``.
    ``reading`` turns Fleet's value into the knob's, and ``note`` says so. ``needs`` names the field that must be on.
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
    """The value of a field that stands for settings of other knobs; ``note`` is what the user should know of it.

    ``yields``: the settings are only what holds until another field or knob says otherwise, whichever comes first.
    """

    value: Any
    settings: tuple[tuple[str, Any], ...]
    note: str = ""
    yields: bool = False

    @property
    def words(self) -> str:
        settings = " and ".join(f"{name}: {shown(value)}" for name, value in self.settings)
        return f"read as {settings}{', unless another field says otherwise' if self.yields else ''}{self.note}"
