"""The settings of a stock ``paddle.distributed.fleet.DistributedStrategy``: every field that differs from a new one.

Reads its protobuf by the message's descriptor, so that no field of any Paddle version is missed. Paddle itself is not
imported: the given object has the classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile.fleet_fields import STOCK_FIELDS
from fleet_train.profile.knobs import Knob, Problem, shown
from fleet_train.profile.rules import FALSE_WORDS, TRUE_WORDS, value_problems
from fleet_train.profile.schema import FLAG_KNOBS, KNOBS

MISSING = object()


def asked_of_stock(stock: Any) -> dict[str, Any]:
    """What a stock strategy asks for, ``{"localsgd_configs.k_steps": 4, ...}``: fields that differ, and knobs that were
    set to Fleet's own default."""
    message = getattr(stock, "strategy", None)
    if not hasattr(message, "DESCRIPTOR"):
        given = type(stock).__module__ + "." + type(stock).__name__
        allowed = "None, fleet_train.DistributedStrategy, or paddle.distributed.fleet.DistributedStrategy"
        raise ProfileError(f"strategy: given a {given}; allowed: {allowed}")
    fresh = _fresh(type(stock))
    asked = dict(differing(message, fresh.strategy)) | dict(_written_defaults(message, fresh.strategy))
    asked |= dict(_sections_in_use(message))
    for name, value in _plain_attributes(stock).items():
        if value != _plain_attributes(fresh).get(name, MISSING):
            asked[name] = value
    return asked


def differing(message: Any, fresh: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaf fields of a protobuf message that differ from another one of the same type, with their dotted paths."""
    for field in message.DESCRIPTOR.fields:
        mine, default, path = getattr(message, field.name), getattr(fresh, field.name), prefix + field.name
        if _is_repeated(field):
            if list(mine) != list(default):
                yield path, [str(item).strip() if field.message_type else item for item in mine]
        elif field.message_type is None:
            if mine != default:
                yield path, mine
        elif message.HasField(field.name) or fresh.HasField(field.name):
            yield from differing(mine, default, f"{path}.")


def _written_defaults(message: Any, fresh: Any) -> Iterator[tuple[str, Any]]:
    """Knobs set to Fleet's own default: fuse_grad_size_in_MB = 32 means 32, which is not our default."""
    for name, knob in KNOBS.items():
        if name not in message.DESCRIPTOR.fields_by_name or knob.fate == "refused":
            continue
        if message.HasField(name) and not fresh.HasField(name):
            yield name, getattr(message, name)


def _sections_in_use(message: Any) -> Iterator[tuple[str, Any]]:
    """Knobs in the section of a switch that is on (``localsgd``: ``localsgd_configs``), including Fleet's own defaults:
    with LocalSGD on, an untouched k_steps means 1, which is not our default.
    """
    for path, field in STOCK_FIELDS.items():
        section, _, leaf = path.partition(".")
        if field.knob and leaf and getattr(message, section.removesuffix("_configs"), False) is True:
            known = getattr(message, section).DESCRIPTOR.fields_by_name
            if leaf in known:
                value = getattr(getattr(message, section), leaf)
                yield path, list(value) if _is_repeated(known[leaf]) else value


def _is_repeated(field: Any) -> bool:
    """Protobuf 7 has ``is_repeated``, older ones ``label`` (3 = repeated)."""
    repeated = getattr(field, "is_repeated", None)
    return field.label == 3 if repeated is None else bool(repeated() if callable(repeated) else repeated)


def _plain_attributes(stock: Any) -> Mapping[str, Any]:
    """Fields without a property become plain attributes of the stock object, outside its protobuf."""
    return {name: value for name, value in vars(stock).items() if name != "strategy" and not name.startswith("_D")}


def _fresh(stock_type: Any) -> Any:
    """A new strategy to compare with; suppresses the log line that Paddle prints for each one."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        return stock_type()
    finally:
        logging.disable(before)


# Paddle 1.8's three communication flags, read as the corresponding knobs.


def fold_flags(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Move the three flags from the top level and from ``environment`` to their knobs.

    Returns the settings without the flags, knob -> key of the flag it came from, and the problems: a value that cannot
    be read, or a knob that contradicts its flag.
    """
    folded = dict(settings)
    came_from: dict[str, str] = {}
    problems: list[Problem] = []
    environment = settings.get("environment")
    section = dict(environment) if isinstance(environment, Mapping) else {}
    for flag in FLAG_KNOBS.values():
        for place, key in ((folded, flag.name), (section, f"environment.{flag.name}")):
            if flag.name not in place:
                continue
            value, problem = read_flag(flag, place.pop(flag.name))
            if problem:
                problems.append(Problem(key, problem))
            elif flag.becomes in folded and folded[flag.becomes] != value:
                given = f"means {flag.becomes}: {shown(value)}, but {flag.becomes} is {shown(folded[flag.becomes])}"
                problems.append(Problem(key, f"{given}; keep one of the two"))
            else:
                folded.setdefault(flag.becomes, value)
                came_from.setdefault(flag.becomes, key)
    if isinstance(environment, Mapping) and section != environment:
        folded["environment"] = section
    return folded, came_from, problems


def read_flag(flag: Knob, given: Any) -> tuple[Any, str]:
    """The knob's value for a flag's text, and the problem with it (empty if there is none).

    An invalid text is not shown: it may come from an environment.
    """
    try:
        value = _converted(flag, given)
    except ValueError:
        return None, f"given an invalid text; allowed: {flag.allowed}"
    problems = value_problems({flag.becomes: value})
    # A knob may take auto as well as numbers; its flag does not.
    return value, problems[0].message.replace(KNOBS[flag.becomes].allowed, flag.allowed) if problems else ""


def _converted(flag: Knob, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    text = given.strip().lower()
    if flag.kind is bool:
        if text not in TRUE_WORDS | FALSE_WORDS:
            raise ValueError(text)
        return text in TRUE_WORDS
    return int(text) if flag.kind is int else float(text)
