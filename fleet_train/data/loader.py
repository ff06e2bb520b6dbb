"""Turns a dataset and a sampler into prefetched feeds. The other loaders (worker processes, DALI) have the same
methods.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fleet_train.data.datasets import Arrays, DataIdentity, Dataset, Draws, Indices, identity_of
from fleet_train.data.decode import IMAGE_AUGMENTATIONS
from fleet_train.data.images import CorruptImages, ImageFolder
from fleet_train.data.sampler import BatchSampler
from fleet_train.errors import DataError

_PREFETCH_PUT_SECONDS = 0.05
"""How often a prefetch thread whose queue is full looks whether its consumer has gone."""

# Prepare the next items in a thread while the current one is being used.


Item = TypeVar("Item")


class _End:
    """The last item in the queue: the source is exhausted, or failed with `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetcher(Generic[Item]):
    """Iterate over `source` with up to `depth` items ready in advance; order and exceptions are preserved.

    Use it in a `with` statement, or call `close`: a loop that stops early must not leave a thread behind.
    `close` sets `closing`, which a source that may wait for long should check.
    """

    def __init__(self, source: Iterable[Item], depth: int = 2, closing: threading.Event | None = None) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}; at least 1 item must be prefetched")
        self._queue: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._closing = closing or threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._fill, args=(source,), name="fleet_train-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; prepared items are dropped. May be called twice."""
        self._finished = True
        self._closing.set()
        self._thread.join()
        with self._queue.mutex:
            self._queue.queue.clear()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, source: Iterable[Item]) -> None:
        try:
            self._copy(source)
            self._put(_End())
        except BaseException as error:
            self._put(_End(error))

    def _copy(self, source: Iterable[Item]) -> None:
        for item in source:
            if not self._put(item):
                break
            del item  # the consumer has the last reference: memory is freed when the consumer is done
        if isinstance(source, Generator):
            source.close()  # now, on the thread on which it ran

    def _put(self, item: Item | _End) -> bool:
        """Put an item into the queue; False if the consumer has gone: a plain put() would wait forever."""
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=_PREFETCH_PUT_SECONDS)
                return True
            except queue.Full:
                continue
        return False


def device_index(place: Any) -> int | None:
    """The GPU's number; None for a CPU or without a place."""
    return None if place is None or type(place).__name__ == "CPUPlace" else int(place.get_device_id())


def new_feed_tensor() -> Any:
    """An empty tensor of the type that an executor accepts as a feed as well as arrays; once filled it has a length."""
    return _feed_tensor_class()()


@cache
def _feed_tensor_class() -> Any:
    import paddle

    class FeedTensor(paddle.base.core.DenseTensor):  # type: ignore[misc]
        def __len__(self) -> int:
            return int(self.shape()[0])

    return FeedTensor


# Augmentations by name: they read a batch of a dataset and change it with the samples' random numbers.


Augmentation = Callable[[Dataset, Draws], Arrays]
"""Reads the samples `draws.indices` of the dataset and augments them. Never used for evaluation."""


def keep(dataset: Dataset, draws: Draws) -> Arrays:
    """The unchanged samples."""
    return dataset.arrays(draws.indices)


def shift(dataset: Dataset, draws: Draws) -> Arrays:
    """Every image shifted by up to one pixel in each direction, padded with zeros: [batch, channels, height, width]."""
    if len(dataset.sample_shape) != 3:
        raise DataError(
            f"--augment shift needs images [channels, height, width], this data has {list(dataset.sample_shape)}; "
            "use --augment none"
        )
    arrays = dataset.arrays(draws.indices)
    images = arrays["features"]
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    down, right = (draws.uniform(2) * 3).astype(np.int64).T
    return {**arrays, "features": np.ascontiguousarray(windows[np.arange(count), :, down, right])}


class ImageAugmentation:
    """Images decoded with one of IMAGE_AUGMENTATIONS; records unreadable ones."""

    def __init__(self, name: str, images: ImageFolder) -> None:
        self._name = name
        self._images = images
        self.corrupt = images.corrupt_images()

    def __call__(self, dataset: Dataset, draws: Draws) -> Arrays:
        del dataset  # the folder of the constructor
        return self._images.augmented(draws, self._name, self.corrupt)


AUGMENTATIONS = ("auto", "none", "shift", *(name for name in IMAGE_AUGMENTATIONS if name != "none"))


def augmentation(name: str, dataset: Dataset) -> Augmentation:
    """The named augmentation for that dataset; `auto` is crop_flip for image folders and none for other data."""
    if name not in AUGMENTATIONS:
        raise DataError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    if isinstance(dataset, ImageFolder):
        return ImageAugmentation(image_augmentation_name(name), dataset)
    if name in IMAGE_AUGMENTATIONS[1:]:
        raise DataError(f"--augment {name} needs images in files (--data_dir); {dataset.name} is none")
    return shift if name == "shift" else keep


def image_augmentation_name(name: str) -> str:
    """The augmentation for `name` and an image folder: one of IMAGE_AUGMENTATIONS."""
    if name == "auto":
        return "crop_flip"
    if name not in IMAGE_AUGMENTATIONS:
        raise DataError(f"--augment {name} is for data in memory; images take {', '.join(IMAGE_AUGMENTATIONS)}")
    return name


class Loader(ABC):
    """One rank's batches as feeds: dicts of arrays, samples first. In a step all ranks have batches of the same
    size."""

    def __init__(self, dataset: Dataset, sampler: BatchSampler) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.corrupt: CorruptImages | None = None
        """The unreadable images found so far; None for data other than image files."""

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
    ) -> None:
        super().__init__(dataset, sampler)
        self._augment = augment
        self.corrupt = augment.corrupt if isinstance(augment, ImageAugmentation) else None
        self._prefetch_depth = prefetch_depth

    def epoch(self, epoch: int, consumed_samples: int = 0) -> Prefetcher[Arrays]:
        self.sampler.set_epoch(epoch, consumed_samples)
        return Prefetcher(self._read(), self._prefetch_depth)

    def _read(self) -> Iterator[Arrays]:
        for step in range(len(self)):
            yield self._augment(self.dataset, Draws(self.sampler.seed, self.sampler.epoch, self.indices(step)))
