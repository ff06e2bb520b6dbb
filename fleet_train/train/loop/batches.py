"""The batches of an epoch from a place in it on: a loader of ours seeks, anything else is drawn again up to there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from fleet_train import fleet
from fleet_train.errors import CheckpointError, DataError
from fleet_train.log import log_once
from fleet_train.train.agree import Dealing, agreed_steps
from fleet_train.train.checkpoint.manager import StoredCheckpoint
from fleet_train.train.checkpoint.position import Position, RunData


class Batches(Protocol):
    """Where a loop's batches come from. Of a `Position`, ``batches`` are those of the epoch under way. All ranks call
    it."""

    consumed_samples: int
    """Samples of the epoch that all ranks together have done once the batch drawn last is trained; 0 if unknown."""

    def open(self, at: Position) -> Iterator[Any]:
        """The batches of the epoch after those that are done; what is to be dropped before them has been dropped."""

    def after_epoch(self) -> str | None:
        """An epoch has ended; returns what is to be said about the next one."""

    def record(self, at: Position) -> dict[str, Any]:
        """What a checkpoint keeps of all ranks: entries of `TrainState`."""

    def resume(self, checkpoint: StoredCheckpoint, at: Position) -> list[str]:
        """Continue where a checkpoint was saved; returns what is to be said. Raises DataError or CheckpointError."""


def batches_of(loader: Any) -> Batches:
    """The batches of a loader of ours, or of anything that can be gone through once for each epoch."""
    return SeekingBatches(loader) if hasattr(loader, "consumed_after") else DrawnBatches(loader)


class SeekingBatches:
    """The batches of a `fleet_train.data.Loader`, which continues at any sample with any number of ranks."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._data, self._dealing = loader, RunData(loader), Dealing(loader)
        self.consumed_samples = 0

    def open(self, at: Position) -> Iterator[Any]:
        with self._loader.epoch(at.epoch, at.consumed_samples) as batches:
            for index, batch in enumerate(islice(batches, agreed_steps(len(self._loader)))):
                self.consumed_samples = self._loader.consumed_after(index + 1)
                yield batch

    def after_epoch(self) -> str | None:
        return self._dealing.after_epoch()

    def record(self, at: Position) -> dict[str, Any]:
        return {
            "consumed_samples": at.consumed_samples,
            "data": self._data.record(at, fleet.gather(self._data.done(at))),
        }

    def resume(self, checkpoint: StoredCheckpoint, at: Position) -> list[str]:
        self._dealing.deal()
        return self._data.resume(checkpoint, at, accepts_changes=False)


class DrawnBatches:
    """The batches of a ``paddle.io.DataLoader``, a list, or a function that returns an iterator.

    To continue within an epoch, the batches that are done are drawn again and dropped. The caller restores the random
    states before: what draws from them, in this process or in workers that Paddle seeds from them, gives the same
    batches again. An object with ``set_epoch`` (``DistributedBatchSampler``) is told the epoch.
    """

    def __init__(self, loader: Any) -> None:
        if not callable(loader) and hasattr(loader, "__next__"):
            raise DataError(
                f"loader= is a {type(loader).__name__}, which can be gone through once only; give the function that "
                "returns it, which is called for each epoch"
            )
        self._loader = loader
        self.consumed_samples = 0

    def open(self, at: Position) -> Iterator[Any]:
        for each in (self._loader, getattr(self._loader, "batch_sampler", None)):
            if (set_epoch := getattr(each, "set_epoch", None)) is not None:
                set_epoch(at.epoch)
        batches = iter(self._loader() if callable(self._loader) else self._loader)
        began = time.monotonic()
        dropped = sum(1 for _ in islice(batches, at.batches))
        if dropped < at.batches:
            raise DataError(
                f"{at.batches} batches of epoch {at.epoch + 1} are done, and the loader has only {dropped} in it: its "
                "data has changed since the checkpoint was saved"
            )
        if dropped:
            seconds = time.monotonic() - began
            text = f"drew and dropped the first {dropped} batches of epoch {at.epoch + 1} in {seconds:.1f} s"
            log_once([f"{text}, to go on after them; a loader of fleet_train.data seeks"], fleet.worker_index())
        most = self._agreed_length()
        return islice(batches, None if most is None else max(0, most - dropped))

    def _agreed_length(self) -> int | None:
        """The batches that every rank has in an epoch; None if that is not known before its end."""
        own = None
        with suppress(TypeError):
            own = len(self._loader)
        lengths = fleet.gather(own)
        known = [int(each) for each in lengths if each is not None]
        if len(known) < len(lengths):
            return None
        if min(known) < max(known):
            text = f"the ranks have {', '.join(map(str, known))} batches in an epoch; each trains {min(known)} of them"
            log_once([text], fleet.worker_index())
        return min(known)

    def after_epoch(self) -> str | None:
        return None

    def record(self, at: Position) -> dict[str, Any]:
        del at  # the batches that are done say it
        return {}

    def resume(self, checkpoint: StoredCheckpoint, at: Position) -> list[str]:
        if at.batches and checkpoint.state.world_size != fleet.worker_num():
            raise CheckpointError(
                f"{checkpoint.folder} is in the middle of an epoch of {checkpoint.state.world_size} ranks, now there "
                f"are {fleet.worker_num()}, and which samples of this loader are done is not known: resume on "
                f"{checkpoint.state.world_size} ranks, or from the end of an epoch; a loader of fleet_train.data "
                "continues with any number"
            )
        return []
