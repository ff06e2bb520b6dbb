"""Turns a dataset and a sampler into prefetched feeds. The other loaders (worker processes, DALI) have the same
methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from fleet_train.data.core.datasets import Arrays, DataIdentity, Dataset, Indices, identity_of
from fleet_train.data.core.prefetch import Prefetcher
from fleet_train.data.core.rng import Draws
from fleet_train.data.core.sampler import BatchSampler
from fleet_train.data.images.augment import Augmentation, ImageAugmentation, keep
from fleet_train.data.images.corrupt import CorruptImages

Finish = Callable[[Arrays], Arrays]
"""A last step for each batch in the prefetch thread: the copy to the device."""


class Loader(ABC):
    """One rank's batches as feeds: dicts of arrays, samples first. In a step all ranks have batches of the same
    size."""

    def __init__(self, dataset: Dataset, sampler: BatchSampler) -> None:
        self.dataset = dataset
        self.sampler = sampler

    def __len__(self) -> int:
        """Remaining steps of the epoch opened last; before the first one, of a whole epoch."""
        return len(self.sampler)

    def indices(self, step: int) -> Indices:
        """Dataset indices of this rank's batch at a remaining step."""
        return self.sampler.batch(step)

    def consumed_after(self, steps: int) -> int:
        """`consumed_samples` after this many of the remaining steps."""
        return self.sampler.consumed_after(steps)

    def data_identity(self) -> DataIdentity | None:
        """What a resume compares with the checkpoint; None = unknown. A loader that is no subclass need not have it."""
        return identity_of(self.dataset)

    @abstractmethod
    def epoch(self, epoch: int, consumed_samples: int = 0) -> Prefetcher[Arrays]:
        """The batches of that epoch after `consumed_samples` of the global order; use it in a `with` statement."""

    @property
    def corrupt(self) -> CorruptImages | None:
        """The unreadable images found so far; None for data other than image files."""
        return None

    def close(self) -> None:
        """Release processes and memory; a later epoch starts them again."""
        return


class BatchLoader(Loader):
    """Reads batches in a thread of this process, for data in memory and few images."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: BatchSampler,
        augment: Augmentation = keep,
        prefetch_depth: int = 2,
        *,
        finish: Finish | None = None,
    ) -> None:
        super().__init__(dataset, sampler)
        self._augment = augment
        self._prefetch_depth = prefetch_depth
        self._finish = finish

    def epoch(self, epoch: int, consumed_samples: int = 0) -> Prefetcher[Arrays]:
        self.sampler.set_epoch(epoch, consumed_samples)
        return Prefetcher(self._read(), self._prefetch_depth)

    @property
    def corrupt(self) -> CorruptImages | None:
        return self._augment.corrupt if isinstance(self._augment, ImageAugmentation) else None

    def _read(self) -> Iterator[Arrays]:
        for step in range(len(self)):
            feed = self._augment(self.dataset, Draws(self.sampler.seed, self.sampler.epoch, self.indices(step)))
            yield feed if self._finish is None else self._finish(feed)
