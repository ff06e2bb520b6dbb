"""Which rank reads which sample at which step. Pure numpy: equal arguments give equal indices on every machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fleet_train.data.datasets import Indices
from fleet_train.errors import DataError


class ShardedBatchSampler:
    """Batches of sample indices for one rank; every rank gets the same number of batches, each of the same size.

    Step k of all ranks together is a contiguous slice of one global order (rank r takes every world_size-th index of
    it). So the joint batch does not depend on the number of ranks, only on the global batch size.

    Args:
        batch_size: samples per rank and step.
        shuffle: a new order each epoch, from (seed, epoch). Every rank must be given the same seed.
        drop_last: False pads to equal counts by repeating the first samples of the epoch's order and keeps a smaller
            last batch; True repeats nothing and drops what does not fill a whole batch on every rank.
    Source: the semantics of torch's DistributedSampler and Paddle's DistributedBatchSampler, made step-addressable.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        _check(num_samples, batch_size, rank, world_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._order: tuple[int, Indices] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; without it every pass repeats epoch 0's order."""
        self.epoch = epoch

    @property
    def samples_per_rank(self) -> int:
        """Samples that each rank reads per epoch, padding included."""
        if self.drop_last:
            return self.num_samples // self.world_size // self.batch_size * self.batch_size
        return -(-self.num_samples // self.world_size)

    def __len__(self) -> int:
        """Steps per epoch, equal on every rank."""
        return -(-self.samples_per_rank // self.batch_size)

    def batch(self, step: int) -> Indices:
        """This rank's indices at one step of the current epoch: a job can resume in the middle of an epoch."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch with {len(self)} steps")
        mine = self._global_order()[self.rank :: self.world_size]
        return mine[step * self.batch_size : (step + 1) * self.batch_size]

    def __iter__(self) -> Iterator[Indices]:
        return (self.batch(step) for step in range(len(self)))

    def _global_order(self) -> Indices:
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, self._make_order())
        return self._order[1]

    def _make_order(self) -> Indices:
        if self.shuffle:
            # A sequence as seed: seed 0 in epoch 1 must not be seed 1 in epoch 0.
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)
        else:
            order = np.arange(self.num_samples, dtype=np.int64)
        # np.resize repeats from the start, also when there are fewer samples than ranks, and cuts when shorter.
        return np.resize(order, self.samples_per_rank * self.world_size).astype(np.int64, copy=False)


def evaluation_batches(num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[Indices]:
    """This rank's share of an evaluation: over all ranks each sample exactly once, so shards may be uneven or empty."""
    _check(num_samples, batch_size, rank, world_size)
    mine = np.arange(rank, num_samples, world_size, dtype=np.int64)
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


def _check(num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
    if num_samples < 1:
        raise DataError(f"num_samples={num_samples}; there is nothing to read, at least 1 sample is needed")
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size}; samples per rank and step must be at least 1")
    if not 0 <= rank < world_size:
        raise DataError(f"rank={rank} with world_size={world_size}; ranks run from 0 to world_size - 1")
