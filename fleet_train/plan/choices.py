"""A value of a knob that nobody carries out is an error, and never another value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from fleet_train.errors import ConversionError

Entry = TypeVar("Entry")


def entry_of(knob: str, value: str, table: Mapping[str, Entry], what: str) -> Entry:
    """The entry of a knob's value in ``table``. Raises ConversionError where there is none: nothing else is taken."""
    refuse_unknown(knob, value, table, what)
    return table[value]


def refuse_unknown(knob: str, value: str, known: Collection[str], what: str) -> None:
    """Raise ConversionError for a knob's value that is not among those that have ``what``."""
    if value not in known:
        raise ConversionError(
            f"{knob}: {value} has no {what}, so that it cannot be carried out; use one of {', '.join(known)}"
        )
