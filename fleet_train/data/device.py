"""Copy batches to the device while the step before them runs."""

from __future__ import annotations

from typing import Any

from fleet_train.data.datasets import Arrays
from fleet_train.data.loader import Finish


def device_copy(place: Any) -> Finish | None:
    """For a loader's `finish`: arrays become tensors on `place` in the prefetch thread; None on CPU (nothing to copy).

    place: what `fleet.place()` answers. The executor takes tensors that lie on its device as they are, so that with
    the prefetcher's queue a batch is copied while the step on the one before it runs.
    """
    if place is None or place.__class__.__name__ == "CPUPlace":
        return None
    import paddle

    def copy(arrays: Arrays) -> Any:
        tensors = {}
        for name, array in arrays.items():
            tensors[name] = paddle.base.core.DenseTensor()
            tensors[name].set(array, place)
        return tensors

    return copy
