"""A moving average of the weights, kept in the program: checkpoints contain it, and a resumed run continues it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_train import fleet
from fleet_train.errors import ConversionError

Pairs = list[tuple[Any, Any]]


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after every update, for all parameters that are trained.

    It starts at zero and is read divided by 1 - decay**updates, so that early averages are unbiased. Updates
    that are skipped, and micro-batches without one, do not count. With LocalSGD each rank averages its own weights; the
    mean of these averages, which is read, is the average of the mean weights. Source: Polyak and Juditsky 1992; the
    correction is that of Kingma and Ba 2015.
    """

    def __init__(self, decay: float) -> None:
        if not 0 < decay < 1:
            raise ConversionError(f"decay={decay} of a weight average: it must be above 0 and below 1")
        self.decay = decay
        self._names: dict[str, str] = {}
        self._updates = ""

    def follow(self, update: Callable[[Pairs], Any], pairs: Pairs) -> Any:
        """For `DistributedOptimizer.around_update`."""
        operators = update(pairs)
        for parameter, gradient in pairs:
            if gradient is None:
                continue
            average = _persistable(f"{parameter.name}@average", parameter.dtype, parameter.shape)
            paddle.assign(average * self.decay + parameter * (1.0 - self.decay), average)
            self._names[parameter.name] = average.name
        updates = _persistable("weight_average_updates", paddle.int64, [1])
        paddle.assign(updates + 1, updates)
        self._updates = updates.name
        return operators

    def weights(self) -> dict[str, NDArray[Any]]:
        """The averaged weights by parameter, equal on every rank. All ranks call it."""
        averages = self._of_this_rank()
        if fleet.profile().use_local_sgd and fleet.worker_num() > 1:
            return {
                name: fleet.all_reduce(each, op="sum") / each.dtype.type(fleet.worker_num())
                for name, each in averages.items()
            }
        return averages

    def _of_this_rank(self) -> dict[str, NDArray[Any]]:
        updates = int(_read(self._updates).item())
        if updates == 0:
            return {parameter: _read(parameter) for parameter in self._names}
        correction = 1.0 - self.decay**updates
        averages = {parameter: _read(name) for parameter, name in self._names.items()}
        return {name: (each / correction).astype(each.dtype) for name, each in averages.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the program's parameters are the averaged weights; afterwards they are restored."""
        averaged = self.weights()
        trained = {name: _read(name) for name in averaged}
        _write(averaged)
        try:
            yield
        finally:
            _write(trained)


def _persistable(name: str, dtype: Any, shape: Any) -> Any:
    zero = paddle.nn.initializer.Constant(0.0)
    return paddle.pir.core.create_persistable_value(dtype, list(shape), name, initializer=zero)


def _read(name: str) -> NDArray[Any]:
    return np.array(paddle.static.global_scope().find_var(name).get_tensor())


def _write(arrays: dict[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        paddle.static.global_scope().find_var(name).get_tensor().set(array, fleet.place())
