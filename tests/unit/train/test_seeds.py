"""Random streams: fixed, and different for every rank and step."""

from __future__ import annotations

import random

import numpy as np

from fleet_train.train.numerics import seed_process, stream_seed


def test_stream_is_a_fixed_number() -> None:
    assert stream_seed(0, 0, 0) == 7896617691693857887


def test_streams_of_all_ranks_and_steps_differ() -> None:
    seeds = {stream_seed(seed, rank, step) for seed in range(4) for rank in range(4) for step in range(50)}
    assert len(seeds) == 4 * 4 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_process_generators_repeat_per_rank_and_differ_between_ranks() -> None:
    def draw(rank: int) -> tuple[float, float]:
        seed_process(3, rank)
        return random.random(), float(np.random.random())

    assert draw(0) == draw(0)
    assert draw(0)[0] != draw(1)[0]
    assert draw(0)[1] != draw(1)[1]
