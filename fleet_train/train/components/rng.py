"""Random streams that depend only on (seed, rank, step).

Dropout at step N of rank R draws the same mask in an uninterrupted and in a resumed run, on any number of machines: a
checkpoint needs no generator state, only the seed and the step.
"""

from __future__ import annotations

import random

import numpy as np
import paddle

# Paddle's switches for kernels whose results depend on timing. A build without a GPU has none of them: its kernels give
# the same bits in every run anyway.
_DETERMINISTIC = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_embedding_deterministic": 1,
}


def stream_seed(seed: int, rank: int, step: int) -> int:
    """A 63-bit seed; neighbouring ranks and steps give unrelated ones (which seed + rank would not)."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_process(seed: int, rank: int) -> None:
    """Seed Python's and numpy's global generators, differently on each rank, for code that still uses them."""
    own = stream_seed(seed, rank, 0)
    random.seed(own)
    np.random.seed(own % 2**32)


def use_deterministic_kernels() -> list[str]:
    """Set the switches that the installed Paddle has; returns their names."""
    known = paddle.base.core.globals().keys()
    flags = {name: value for name, value in _DETERMINISTIC.items() if name in known}
    if flags:
        paddle.set_flags(flags)
    return sorted(flags)
