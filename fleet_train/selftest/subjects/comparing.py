"""Comparison of named arrays. No Paddle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def relative_difference(ours: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest difference of a value, relative to the largest value of its array."""
    assert ours.keys() == expected.keys()
    return max(float(np.abs(ours[n] - expected[n]).max() / max(np.abs(expected[n]).max(), 1e-6)) for n in ours)


def digest(arrays: Mapping[str, Any]) -> str:
    """A digest of named arrays: equal digests mean bit-equal values, whatever the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(np.asarray(arrays[name]))
        sha.update(f"{name}{value.dtype}{value.shape}".encode() + value.tobytes())
    return sha.hexdigest()
