"""How one value of one field of Fleet's strategy objects is handled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_train.profile.knobs import shown
from fleet_train.profile.stock.field import StockField
from fleet_train.profile.stock.fields import STOCK_FIELDS


@dataclass(frozen=True)
class Outcome:
    """The result for a field's value: settings, a sentence for rank 0, a problem, or nothing.

    A ``fallback`` is a setting for a knob that nothing else sets.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    fallback: tuple[tuple[str, Any], ...] = ()
    sentence: str = ""
    problem: str = ""


def settle(path: str, value: Any) -> Outcome:
    """The result for one value of one field. A knob's own rules are checked by the knob."""
    value = _number_of(value)
    row = STOCK_FIELDS.get(path) or STOCK_FIELDS.get(path.partition(".")[0])
    if row is None:
        return Outcome(problem=f"given {shown(value)}: fleet_train does not know this field, so it cannot carry it out")
    if row.path == path and row.switch and _is_one_of(value, (row.switch.value,)):
        sentence = f"{path}: {shown(value)} is mapped: {row.switch.words}"
        if row.switch.yields:
            return Outcome(fallback=row.switch.settings, sentence=sentence)
        return Outcome(row.switch.settings, sentence=sentence)
    if row.knob:
        read = row.reading(value) if row.reading and value is not None else value
        return Outcome() if _is_one_of(read, row.silent) else _to_knob(row, value, read)
    if _is_one_of(value, row.mapped):
        return Outcome(sentence=f"{path}: {shown(value)} is mapped: {row.mapping}")
    # A section's "off" is not the default of its fields: gradient_merge_configs.avg is True when untouched.
    if row.path == path and _is_one_of(value, row.silent):
        return Outcome()
    return Outcome(problem=f"given {shown(value)}: {row.refusal}")


def _number_of(value: Any) -> Any:
    """The number of an enumeration (``BuildStrategy.ReduceStrategy.Reduce``); other values as they are."""
    number = getattr(value, "value", None)
    return number if type(number) is int else value


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Equal and of the same type: 1 is not True here."""
    return any(type(value) is type(one) and value == one for one in known)


def _to_knob(row: StockField, value: Any, read: Any) -> Outcome:
    if row.knob == row.path:
        return Outcome(((row.knob, read),))
    sentence = f"{row.path}: {shown(value)} is mapped: read as {row.knob}{row.note}"
    if row.knob.startswith("environment.") and isinstance(read, int):
        read = str(int(read))
    return Outcome(((row.knob, read),), sentence=sentence)
