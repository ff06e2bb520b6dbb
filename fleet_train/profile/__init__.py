"""The profile, its schema, its strict loader, the catalogue in ``strategies/``. Imports no Paddle."""

from __future__ import annotations

from fleet_train.profile.catalogue import find_profile, load_profile, profile_names
from fleet_train.profile.knobs import Fate, Knob
from fleet_train.profile.profile import Profile, applied_mappings, check_flags
from fleet_train.profile.schema import KNOBS

__all__ = [
    "KNOBS",
    "Fate",
    "Knob",
    "Profile",
    "applied_mappings",
    "check_flags",
    "find_profile",
    "load_profile",
    "profile_names",
]
