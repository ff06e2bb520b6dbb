"""From a dataset and a sampler to prefetched feeds. Another loader (worker processes, DALI) offers the same methods."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fleet_train.data.augment import Augmentation, keep
from fleet_train.data.datasets import Arrays, Dataset
from fleet_train.data.prefetch import Prefetcher
from fleet_train.data.sampler import ShardedBatchSampler


class BatchLoader:
    """One rank's batches of a dataset: `len(loader)` steps per epoch, `loader.epoch(n)` opens epoch n."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: ShardedBatchSampler,
        augment: Augmentation = keep,
        prefetch_depth: int = 2,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._augment = augment
        self._prefetch_depth = prefetch_depth

    def __len__(self) -> int:
        return len(self.sampler)

    def epoch(self, epoch: int, first_step: int = 0) -> Prefetcher[Arrays]:
        """Batches of that epoch from `first_step` on, read in a thread; close it (or use `with`)."""
        self.sampler.set_epoch(epoch)
        return Prefetcher(self._read(first_step), self._prefetch_depth)

    def _read(self, first_step: int) -> Iterator[Arrays]:
        sampler = self.sampler
        for step in range(first_step, len(sampler)):
            # A stream per rank and step: a resumed epoch goes on with the augmentations that it would have had.
            generator = np.random.default_rng([sampler.seed, sampler.rank, sampler.epoch, step])
            yield self._augment(self.dataset.arrays(sampler.batch(step)), generator)
