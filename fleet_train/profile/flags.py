"""Paddle 1.8's three communication flags, read as the corresponding knobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_train.profile.knobs import Knob, shown
from fleet_train.profile.rules import FALSE_WORDS, TRUE_WORDS, Problem, value_problems
from fleet_train.profile.schema.settings import FLAG_KNOBS, KNOBS


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
    found = value_problems({flag.becomes: value})
    # A knob may take auto as well as numbers; its flag does not.
    return value, found[0].message.replace(KNOBS[flag.becomes].allowed, flag.allowed) if found else ""


def _converted(flag: Knob, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    text = given.strip().lower()
    if flag.kind is bool:
        if text not in TRUE_WORDS | FALSE_WORDS:
            raise ValueError(text)
        return text in TRUE_WORDS
    return int(text) if flag.kind is int else float(text)
