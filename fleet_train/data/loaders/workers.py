"""Batches of images decoded by worker processes: the same numbers as without them, faster."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fleet_train.data.core.datasets import Arrays, Indices
from fleet_train.data.core.prefetch import Prefetcher
from fleet_train.data.core.sampler import BatchSampler
from fleet_train.data.images.corrupt import CorruptImages
from fleet_train.data.images.folder import ImageFolder
from fleet_train.data.loaders.shared_memory import Slot, SlotPool
from fleet_train.data.loaders.threads import Finish, Loader
from fleet_train.data.loaders.worker_pool import TASK_SECONDS, TASKS_PER_WORKER, Task, WorkerPool

# Small enough to divide a batch evenly, large enough to make the cost of messages negligible.
_IMAGES_PER_TASK = 8


@dataclass
class _Batch:
    """A batch that is being decoded."""

    slot: Slot
    indices: Indices
    """Dataset indices, with replacements for unreadable images."""
    missing: int
    """Rows not decoded yet."""


class WorkerLoader(Loader):
    """One rank's batches of an image folder, decoded by `workers` processes.

    Batches are in shared memory that is reused as soon as the array is released. The workers start with the first epoch
    and stay for the next ones; `close` ends them (so does any end of this process). With `keep_workers=False` they end
    with each epoch, for a loader that is rarely used.
    """

    def __init__(
        self,
        dataset: ImageFolder,
        sampler: BatchSampler,
        augment: str = "crop_flip",
        workers: int = 2,
        prefetch_depth: int = 2,
        *,
        finish: Finish | None = None,
        keep_workers: bool = True,
        task_seconds: float = TASK_SECONDS,
    ) -> None:
        super().__init__(dataset, sampler)
        self.images = dataset
        self.workers = workers
        self._corrupt = dataset.corrupt_images()
        self._augment = augment
        self._prefetch_depth = prefetch_depth
        self._finish = finish
        self._keep_workers = keep_workers
        self._task_seconds = task_seconds
        self._pool: WorkerPool | None = None
        self._slots = SlotPool()
        self._batch_of: dict[int, _Batch] = {}
        self._open: Prefetcher[Arrays] | None = None

    @property
    def corrupt(self) -> CorruptImages:
        return self._corrupt

    def epoch(self, epoch: int, consumed_samples: int = 0) -> Prefetcher[Arrays]:
        """The rest of that epoch after `consumed_samples`; use it in a `with` statement. Closes the previous epoch."""
        if self._open is not None:
            self._open.close()
        self.sampler.set_epoch(epoch, consumed_samples)
        leaving = threading.Event()
        self._open = Prefetcher(self._batches(leaving), self._prefetch_depth, leaving)
        return self._open

    def close(self) -> None:
        """End the current epoch and the workers. A later epoch starts new ones."""
        if self._open is not None:
            self._open.close()
        self._end_workers()

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._slots.close()
            self._pool, self._slots = None, SlotPool()

    def _batches(self, leaving: threading.Event) -> Iterator[Arrays]:
        pool = self._pool = self._pool or self._start()
        usable = False
        try:
            with contextlib.suppress(GeneratorExit):
                yield from self._decoded(pool, leaving)
            usable = pool.drain()
        finally:
            for batch in self._batch_of.values():
                self._slots.give_back(batch.slot)
            self._batch_of.clear()
            if not (usable and self._keep_workers):
                self._end_workers()

    def _decoded(self, pool: WorkerPool, leaving: threading.Event) -> Iterator[Arrays]:
        """The batches in order; enough are begun to keep all workers busy."""
        begun: deque[_Batch] = deque()
        steps, next_step = len(self), 0
        begun_at_once = max(self._prefetch_depth, batches_ahead(self.workers, len(self.indices(0)))) if steps else 0
        while next_step < steps or begun:
            while next_step < steps and len(begun) < begun_at_once:
                begun.append(self._begin(pool, self.indices(next_step)))
                next_step += 1
            while begun[0].missing:
                for task in pool.done():
                    self._take(pool, task)
                if leaving.is_set():
                    return
            yield self._feed(begun.popleft())

    def _start(self) -> WorkerPool:
        settings = self.images.settings.as_json()
        hello = {"settings": settings, "augment": self._augment, "seed": self.sampler.seed}
        return WorkerPool(self.workers, hello, self._task_seconds)

    def _begin(self, pool: WorkerPool, indices: Indices) -> _Batch:
        indices = np.array([self._corrupt.skip(index) for index in indices.tolist()], np.int64)
        slot = self._slots.take(4 * len(indices) * int(np.prod(self.images.sample_shape)))
        batch = self._batch_of[slot.number] = _Batch(slot, indices, len(indices))
        for row in range(0, len(indices), _IMAGES_PER_TASK):
            pool.add(self._task(batch, row, indices[row : row + _IMAGES_PER_TASK].tolist()))
        return batch

    def _task(self, batch: _Batch, row: int, indices: list[int]) -> Task:
        images = [(self.images.path(index), index) for index in indices]
        return Task(batch.slot, row, self.sampler.epoch, images)

    def _take(self, pool: WorkerPool, task: Task) -> None:
        """Count decoded images; queue replacements for unreadable ones."""
        batch = self._batch_of[task.slot.number]
        batch.missing -= len(task.images) - len(task.failed)
        for place, reason in task.failed:
            index = task.images[place][1]
            row = task.row + place
            batch.indices[row] = self._corrupt.replacement(index, self.images.paths[index], reason)
            pool.add(self._task(batch, row, [int(batch.indices[row])]), first=True)

    def _feed(self, batch: _Batch) -> Arrays:
        del self._batch_of[batch.slot.number]
        features = self._slots.lend(batch.slot, (len(batch.indices), *self.images.sample_shape))
        feed: Arrays = {"features": features, "labels": self.images.labels[batch.indices]}
        return feed if self._finish is None else self._finish(feed)


def batches_ahead(workers: int, batch_size: int) -> int:
    """Number of concurrent batches: their tasks keep all workers busy while the first of them is completed."""
    tasks_per_batch = -(-batch_size // _IMAGES_PER_TASK)
    return 1 + -(-workers * TASKS_PER_WORKER // tasks_per_batch)
