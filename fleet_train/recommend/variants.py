"""Variants of a profile: the few knobs that trade accuracy for bytes, with other values than in the shipped profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from fleet_train.profile import Profile

_LONGER = (1, 2, 4)
_COARSER = {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}
"""Other dtypes for averaging parameters or outer differences. int4 is streaming_diloco's, with its requirements."""


def variants(profile: Profile) -> Iterator[dict[str, Any]]:
    """Settings that change how often and how exactly replicas are averaged, the mildest first; none if gradients are
    exchanged in every step: each of their compressions has its own profile.
    """
    if not profile.use_local_sgd:
        return
    dtypes = (profile.local_sgd_dtype, *_COARSER.get(profile.local_sgd_dtype, ()))
    longer = _LONGER if profile.local_sgd_schedule == "constant" else (1,)
    turned = [(factor, dtype) for factor, dtype in product(longer, dtypes)][1:]
    for factor, dtype in sorted(turned, key=lambda one: one[0] * (1 + dtypes.index(one[1]))):
        changes: dict[str, Any] = {"local_sgd_steps": factor * profile.local_sgd_steps} if factor > 1 else {}
        if dtype != profile.local_sgd_dtype:
            changes["local_sgd_dtype"] = dtype
        yield changes


def in_words(changes: Mapping[str, Any]) -> str:
    """The suffix of a candidate's name after that of the profile."""
    return " ".join(f"{knob}={value}" for knob, value in changes.items())
