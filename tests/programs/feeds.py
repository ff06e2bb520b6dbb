"""The programs' feeds: named inputs and their values, the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]


@dataclass(frozen=True)
class Input:
    """One input: its shape behind the batch, its dtype, and how its numbers are drawn."""

    shape: tuple[int, ...]
    dtype: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]


def floats(*shape: int, dtype: str = "float32") -> Input:
    return Input(shape, dtype, lambda random, full: random.standard_normal(full))


def classes(number: int) -> Input:
    return Input((1,), "int64", lambda random, full: random.integers(0, number, full))


def tokens(vocabulary: int, length: int) -> Input:
    return Input((length,), "int64", lambda random, full: random.integers(0, vocabulary, full))


def batch_of(inputs: Mapping[str, Input], samples: int, *key: int | str) -> Batch:
    """``samples`` of each input, decided by ``key`` and the input's name."""
    return {
        name: one.draw(_generator(*key, name), (samples, *one.shape)).astype(one.dtype) for name, one in inputs.items()
    }


def _generator(*key: int | str) -> np.random.Generator:
    return np.random.default_rng([part if isinstance(part, int) else zlib.crc32(part.encode()) for part in key])


def share_of(batch: Batch, part: int, parts: int) -> Batch:
    """One of ``parts`` equal parts of a joint batch."""
    shares = {}
    for name, values in batch.items():
        size, rest = divmod(len(values), parts)
        assert rest == 0, f"a batch of {len(values)} has no {parts} equal parts"
        shares[name] = values[part * size : (part + 1) * size]
    return shares
