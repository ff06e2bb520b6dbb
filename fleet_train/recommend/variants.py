"""A profile's few knobs that trade accuracy for bytes, turned: what is priced beside the profile as it is shipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from fleet_train.profile import Profile

_LONGER = (1, 2, 4)
_COARSER = {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}
"""What parameters or outer differences may be averaged in instead. int4 is streaming_diloco's, with what it takes."""


def variants(profile: Profile) -> Iterator[dict[str, Any]]:
    """Settings that change how often and how exactly replicas are averaged, the mildest first; none where gradients
    are exchanged in every step: of their compressions each has a profile of its own.
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
    """As a candidate's name has it, behind that of the profile."""
    return " ".join(f"{knob}={value}" for knob, value in changes.items())
