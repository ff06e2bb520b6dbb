"""Copies batches to the device while the previous step runs."""

from __future__ import annotations

from functools import cache
from typing import Any

from fleet_train.data.core.datasets import Arrays
from fleet_train.data.loaders.threads import Finish


def device_copy(place: Any) -> Finish | None:
    """For a loader's `finish`: arrays become tensors on `place` in the prefetch thread; None on CPU (nothing to copy).

    place: `fleet.place()`. The executor takes tensors on its device without a copy; with the prefetcher's queue a batch
    is copied while the previous step runs.
    """
    return None if device_index(place) is None else tensor_copy(place)


def device_index(place: Any) -> int | None:
    """The GPU's number; None for a CPU or without a place."""
    return None if place is None or type(place).__name__ == "CPUPlace" else int(place.get_device_id())


def tensor_copy(place: Any) -> Finish:
    """The copy itself, even for a CPU."""

    def copy(arrays: Arrays) -> Any:
        tensors = {name: new_feed_tensor() for name in arrays}
        for name, array in arrays.items():
            tensors[name].set(array, place)
        return tensors

    return copy


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
