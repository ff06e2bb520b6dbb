"""What ``profiles`` prints: the catalogue, one profile with the fate of each knob, which strategies go together."""

from __future__ import annotations

import textwrap
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile import KNOBS, Knob, Profile, load_profile, profile_names
from fleet_train.profile.catalogue import catalogue_folder
from fleet_train.profile.compatibility import STRATEGIES, entries, verdict
from fleet_train.profile.knobs import FATES, hidden, shown
from fleet_train.profile.loader import shown_path
from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS

_SHOWN = [name for name in KNOBS if name not in DESCRIPTIVE]
FIRST = ("single_node", "multi_node", "next_step", "int8_compression", "local_sgd", "streaming_diloco")
"""The profiles for nearly all cases, in the order in which one looks at them."""
EXPLAINED = {
    "carried out": "does what it says",
    "mapped": "what it asked for is done differently today",
    "refused": "an error unless it has its default",
}


def catalogue() -> list[dict[str, str]]:
    return [{"name": name, "description": _reason(name)} for name in profile_names()]


def _reason(name: str) -> str:
    """The description of a profile, or why it does not load: one that does not must not hide the others."""
    try:
        return load_profile(name).description
    except ProfileError as error:
        return f"does not load: {error}"


def catalogue_table(width: int, everything: bool) -> str:
    """The first ones, and with ``everything`` the others."""
    rows = sorted(catalogue(), key=lambda row: FIRST.index(row["name"]) if row["name"] in FIRST else len(FIRST))
    column = max(len(row["name"]) for row in rows) + 2
    lines = [_wrapped(row["name"].ljust(column), row["description"], width) for row in rows]
    first, others = lines[: len(FIRST)], lines[len(FIRST) :]
    rest = ["", *others] if everything else ["", f"{len(others)} others: fleet_train profiles --all"]
    hint = "Settings of one: fleet_train profiles NAME"
    return "\n".join([f"Profiles in {shown_path(catalogue_folder())}:", "", *first, *rest, "", hint])


def pairs() -> list[dict[str, Any]]:
    return [
        {"strategies": [first.name, second.name], "allowed": entry.allowed, "words": entry.words}
        for first, second, entry in entries()
    ]


def compatibility_table(width: int) -> str:
    """The table of combinations: a triangle to look at, then each pair in words."""
    titles = max(len(strategy.title) for strategy in STRATEGIES) + 2
    knobs = max(len(strategy.knob) for strategy in STRATEGIES) + 2
    lines = ["Strategies in one profile: + go together, x are refused with the reason.", ""]
    for number, row in enumerate(STRATEGIES, start=1):
        marks = [f"{'+' if verdict(row.name, other.name).allowed else 'x'}  " for other in STRATEGIES[: number - 1]]
        lines.append(f"{number:>3}  {row.title.ljust(titles)}{row.knob.ljust(knobs)}{''.join(marks)}{number}")
    lines.append("")
    for first, second, entry in entries():
        refused = "" if entry.allowed else "refused: "
        lines.append(_wrapped(f"  {first.title}, {second.title}: ", refused + entry.words, width))
    return "\n".join(lines)


def knob_table(profile: Profile, width: int) -> str:
    lines = [_wrapped(f"{profile.name}: ", profile.description, width), f"digest {profile.digest()}"]
    lines += [_wrapped("measured: ", line, width) for line in profile.measured]
    for fate in FATES:
        lines += ["", f"{fate.upper()} ({EXPLAINED[fate]})"]
        for name in _SHOWN:
            if KNOBS[name].fate == fate:
                lines += _knob_lines(profile, KNOBS[name], width)
    return "\n".join(lines)


def _knob_lines(profile: Profile, knob: Knob, width: int) -> list[str]:
    indent = " " * 6
    if knob.becomes:
        head = f"  {knob.name} -> {knob.becomes}"
    elif knob.kind is dict:
        head = f"  {knob.name}: {len(profile.environment) or 'no'} variables"
    else:
        unit = f" {knob.unit}" if knob.unit else ""
        head = f"  {knob.name}: {shown(getattr(profile, knob.name))}{unit}  [{_where(profile, knob)}]"
    variables = [
        f"{indent}{name}: {value}  [{profile.origin(f'environment.{name}')}]"
        for name, value in (hidden(profile.environment).items() if knob.kind is dict else ())
    ]
    return [head, *variables, _wrapped(indent, knob.meaning, width), _wrapped(indent, knob.reason, width)]


def _where(profile: Profile, knob: Knob) -> str:
    if knob.name not in profile.explicit:
        return "default"
    return f"{profile.origin(knob.name)}; default {shown(knob.default)}"


def _wrapped(head: str, text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def details(profile: Profile) -> dict[str, Any]:
    knobs = {
        name: {
            "value": hidden(profile.environment) if name == "environment" else getattr(profile, name),
            "default": KNOBS[name].default,
            "unit": KNOBS[name].unit,
            "fate": KNOBS[name].fate,
            "meaning": KNOBS[name].meaning,
            "reason": KNOBS[name].reason,
            "set_at": profile.origin(name) if name in profile.explicit else None,
        }
        for name in _SHOWN
        if name not in FLAG_KNOBS
    }
    return {
        "name": profile.name,
        "description": profile.description,
        "measured": profile.measured,
        "digest": profile.digest(),
        "knobs": knobs,
        "flags": {name: flag.becomes for name, flag in FLAG_KNOBS.items()},
    }
