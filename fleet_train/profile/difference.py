"""The first difference between two ranks' profiles, in words; values of variables are never shown, they may be
secrets."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fleet_train.profile.knobs import shown
from fleet_train.profile.profile import Profile
from fleet_train.profile.schema.settings import DESCRIPTIVE


def comparable(profile: Profile) -> dict[str, dict[str, Any]]:
    """What ranks send one another: knobs with their values, variables with digests of their values. JSON."""
    knobs = {name: value for name, value in profile if name not in DESCRIPTIVE and name != "environment"}
    digests = {name: _digest(name, value) for name, value in profile.environment.items()}
    return {"knobs": knobs, "environment": digests}


def _digest(name: str, value: str) -> str:
    """Different for each variable, so that two variables with the same value do not reveal it."""
    return hashlib.sha256(json.dumps([name, value]).encode()).hexdigest()


def first_differing_knob(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> str | None:
    """The first difference of two results of `comparable`; None if they are equal."""
    for name, value in ours["knobs"].items():
        other = theirs["knobs"].get(name)
        if value != other:
            return f"{name} is {shown(value)} here, {shown(other)} there"
    for name in sorted(ours["environment"].keys() | theirs["environment"].keys()):
        here, there = ours["environment"].get(name), theirs["environment"].get(name)
        if here != there:
            where = "another value there" if here and there else f"no value {'there' if here else 'here'}"
            return f"environment.{name} has {where} (values are not shown)"
    return None
