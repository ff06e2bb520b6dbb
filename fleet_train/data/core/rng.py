"""Random numbers per sample: functions of (seed, epoch, dataset index) only.

A sample's augmentation does not depend on the rank that reads it, the worker process that decodes it, the step, or a
resume. Plain integer hashing, so it is also the same with another version of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)


@dataclass(frozen=True)
class Draws:
    """The random numbers of some samples in one epoch."""

    seed: int
    epoch: int
    indices: NDArray[np.int64]
    """Dataset indices, [batch]."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` numbers in [0, 1) per sample: [batch, count]. Asking twice gives the same numbers."""
        with np.errstate(over="ignore"):
            run = _mix(_mix(np.array([self.seed], dtype=np.uint64)) + np.uint64(self.epoch))
            samples = _mix(run + self.indices.astype(np.uint64) * _GOLDEN)
            counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
            bits = _mix(samples[:, None] + counters[None, :])
        numbers: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return numbers


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of splitmix64 (Steele, Lea, Flood 2014): every input bit changes half of the output's."""
    state: NDArray[np.uint64] = words + _GOLDEN
    for shift, factor in _ROUNDS:
        state = (state ^ (state >> shift)) * factor
    return state
