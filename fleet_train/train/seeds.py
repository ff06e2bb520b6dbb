"""Random streams that depend on nothing but (seed, rank, step).

Dropout at step N of rank R draws the same mask whether the run came there in one go or was resumed, on this or on
another number of machines: a checkpoint needs no generator state, only the seed and the step.
"""

from __future__ import annotations

import random

import numpy as np


def stream_seed(seed: int, rank: int, step: int) -> int:
    """A 63-bit seed; neighbouring ranks and steps give unrelated ones (which seed + rank would not)."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_process(seed: int, rank: int) -> None:
    """Seed Python's and numpy's global generators, differently on each rank, for code that still uses them."""
    own = stream_seed(seed, rank, 0)
    random.seed(own)
    np.random.seed(own % 2**32)
