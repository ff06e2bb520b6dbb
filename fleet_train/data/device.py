"""Copy batches to the device while the step before them runs."""

from __future__ import annotations

from typing import Any

from fleet_train.data.datasets import Arrays
from fleet_train.data.loader import Finish


def device_copy(place: Any) -> Finish | None:
    """For a loader's `finish`: arrays become tensors on `place` in the prefetch thread; None on CPU (nothing to copy).

    place: what `fleet.place()` answers. The executor takes tensors that lie on its device as they are; with the
    prefetcher's queue a batch is copied while the step on the one before it runs.
    """
    return None if type(place).__name__ == "CPUPlace" else tensor_copy(place)


def tensor_copy(place: Any) -> Finish:
    """The copy itself, also for a CPU."""
    import paddle

    class FeedTensor(paddle.base.core.DenseTensor):  # type: ignore[misc]
        """What an executor accepts as a feed beside arrays, with the array's length."""

        def __len__(self) -> int:
            return int(self.shape()[0])

    def copy(arrays: Arrays) -> Any:
        tensors = {}
        for name, array in arrays.items():
            tensors[name] = FeedTensor()
            tensors[name].set(array, place)
        return tensors

    return copy
