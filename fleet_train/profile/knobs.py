"""The description of one knob, and its declaration in the schema."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from fleet_train.errors import ConversionError

Entry = TypeVar("Entry")
Fate = Literal["carried out", "mapped", "refused"]
FATES: tuple[Fate, ...] = ("carried out", "mapped", "refused")

Auto = Literal["auto"]
"""The value of a knob whose number is chosen once the gradients and the link are known."""
AUTO: Auto = "auto"

_DGC = (
    "DGC is not here any more: use compression: int4 (profile int4_compression), or the profile streaming_diloco, with "
    "any optimizer"
)
_DGC_KNOBS = "sparsity rampup_begin_step rampup_steps local_grad_clip_norm momentum_factor_masking min_elements"
GONE = {
    "dgc": _DGC,
    **{f"dgc_{name}": _DGC for name in _DGC_KNOBS.split()},
    "graph": "operators of the program do not sum gradients any more: use own, or leave it out",
    "compression_declines": "what a profile asks for is sent, whatever a link was measured to be: try profiles with "
    "fleet_train recommend, or set compression: none",
}
"""Names of knobs, values and profiles that were here before: what to use instead."""

MOST_SHOWN = 100
MOST_BITS = 300
NEEDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a section of NAME: value lines",
    list: "a list of texts",
}


def shown(value: object) -> str:
    """A value as it would be written in a profile: ``true``, ``16``, ``'text'``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value == AUTO:
        return AUTO
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(cut(value) if isinstance(value, str) else value)


def cut(text: str) -> str:
    """The beginning of a text that is too long for a message."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def hidden(variables: Iterable[str]) -> dict[str, str]:
    """Environment variables as they may be shown: ``{"NCCL_DEBUG": "(set)"}``."""
    return dict.fromkeys(variables, "(set)")


@dataclass(frozen=True)
class Problem:
    """One problem of one setting; ``key`` is ``environment.NAME`` for a line of that section."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True)
class OnlyWith:
    """Values of another knob that a knob needs to have an effect.

    ``default_fits``: the default describes what happens anyway, so it may be combined with any value. ``either``:
    another knob whose values also suffice.
    """

    knob: str
    values: tuple[str, ...]
    default_fits: bool = False
    either: tuple[str, tuple[str, ...]] | None = None

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """The sufficient values, by knob."""
        return {self.knob: self.values, **dict([self.either] if self.either else [])}


@dataclass(frozen=True)
class Knob:
    """One row of the knob table.

    ``fate`` is what happens to a value that differs from ``default``; ``reason`` says how it is carried out, what it is
    mapped to, or why it is refused and what to use instead. ``needs`` names the boolean knob without which this one has
    no effect, ``only_with`` the values of a knob with choices. ``becomes`` names the knob that an old ``FLAGS_*``
    spelling is read as, ``today`` says what is different from what it was. ``words``: texts that it takes as well as
    numbers. ``entries``: the kind of a list's entries. ``refused``: (value, reason) of what others allow here and this
    does not.
    """

    name: str
    fate: Fate
    default: Any
    unit: str
    meaning: str
    reason: str
    kind: type = int
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    needs: str = ""
    becomes: str = ""
    today: str = ""
    choices: tuple[str, ...] = ()
    only_with: OnlyWith | None = None
    refused: tuple[tuple[Any, str], ...] = ()
    words: tuple[str, ...] = ()
    entries: type = str

    @property
    def auto(self) -> bool:
        """Whether its number may be left open."""
        return AUTO in self.words

    @property
    def allowed(self) -> str:
        """The rule for values in words: ``a whole number, 1 to 16``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = NEEDS[self.kind]
        if self.entries is float:
            words = "a number, or " * isinstance(self.default, float) + "a list of numbers, one for each rank"
        if self.above is not None:
            words += f", more than {shown(self.above)}" + (f" and up to {shown(self.maximum)}" if self.maximum else "")
        elif self.minimum is not None:
            upper = f"to {shown(self.maximum)}" if self.maximum else "or more"
            words += f", {shown(self.minimum)} {upper}"
        return ", or ".join([", ".join([words, *self.words[:-1]]), *self.words[-1:]])


def knob(
    default: Any = None,
    *,
    meaning: str,
    reason: str,
    fate: Fate = "carried out",
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    needs: str = "",
    only_with: OnlyWith | None = None,
    refused: Mapping[Any, str] | None = None,
    factory: Any = None,
) -> Any:
    """Declare a profile field together with its row of the knob table; this is the only place to write either."""
    extra: dict[str, Any] = {"fate": fate, "unit": unit, "reason": reason}
    if needs:
        extra["needs"] = needs
    if only_with:
        extra["only_with"] = {name: value for name, value in asdict(only_with).items() if value is not None}
    if refused:
        extra["refused"] = dict(refused)
    start: dict[str, Any] = {"default_factory": factory} if factory else {"default": default}
    return Field(**start, ge=ge, gt=gt, le=le, description=meaning, json_schema_extra=extra)


def knob_of(name: str, field: FieldInfo) -> Knob:
    """Read the table row back from a declared field."""
    extra: Any = field.json_schema_extra
    bounds = {
        mark: getattr(rule, mark) for rule in field.metadata for mark in ("ge", "gt", "le") if hasattr(rule, mark)
    }
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    parts = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    numbers = parts[0]
    kind = str if choices else (get_origin(numbers) or numbers)
    return Knob(
        name=name,
        fate=extra["fate"],
        default=field.get_default(call_default_factory=True),
        unit=extra["unit"],
        meaning=field.description or "",
        reason=extra["reason"],
        kind=cast(type, kind),
        minimum=bounds.get("ge"),
        above=bounds.get("gt"),
        maximum=bounds.get("le"),
        needs=extra.get("needs", ""),
        choices=choices,
        only_with=OnlyWith(**extra["only_with"]) if "only_with" in extra else None,
        refused=tuple(extra.get("refused", {}).items()),
        words=tuple(word for part in parts[1:] for word in get_args(part)),
        entries=next(iter(get_args(numbers)), str) if kind is list else str,
    )


def entry_of(knob: str, value: str, table: Mapping[str, Entry], what: str) -> Entry:
    """The entry of a knob's value in ``table``. Raises ConversionError if there is none; there is no fallback."""
    refuse_unknown(knob, value, table, what)
    return table[value]


def refuse_unknown(knob: str, value: str, known: Collection[str], what: str) -> None:
    """Raise ConversionError for a knob's value that is not among those that have ``what``."""
    if value not in known:
        raise ConversionError(f"{knob}: {value} has no {what} and cannot be carried out; use one of {', '.join(known)}")
