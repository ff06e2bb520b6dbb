"""The tasks' networks in Paddle, for static and dynamic mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

from tools.benchmarks import resnet
from tools.benchmarks.networks import start_weights
from tools.benchmarks.resnet import Convolution
from tools.benchmarks.task import CLASSES, MLP, Task

_FED = "start_"


def network(task: Task) -> Any:
    """Its ``parameters()`` are in the order of ``start_weights``. Start values come through initializers, so that
    whatever a strategy keeps of the start state is right too; in static mode the startup program is fed with them
    (``start_feed``).
    """
    return Network(task) if task.network == MLP else ResNet(task)


def start_feed(task: Task, startup_program: Any) -> dict[str, NDArray[np.float32]]:
    """What to feed a startup program with that has one network of ``network(task)`` in it."""
    asked = [op.attrs()["name"] for op in startup_program.global_block().ops if op.name() == "pd_op.data"]
    given = {f"{_FED}{place}": value for place, value in enumerate(start_weights(task))}
    return {name: given[name] for name in asked}


class _Given(nn.initializer.Initializer):  # type: ignore[misc]
    """A value by its place in the start weights. Assign makes one Python number of each element, and an attribute of
    the program of all of them: minutes and gigabytes for 11 million.
    """

    def __init__(self, place: int, value: NDArray[np.float32]) -> None:
        super().__init__()
        self._name = f"{_FED}{place}"
        self._value = value

    def forward(self, parameter: Any, block: Any = None) -> Any:
        del block
        if paddle.in_dynamic_mode():
            parameter.set_value(self._value)
            return None
        # What is fed cannot be the parameter itself.
        return paddle.assign(paddle.static.data(self._name, list(self._value.shape), "float32"))


class Network(nn.Layer):  # type: ignore[misc]
    """Fully connected."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        start = _start(task)
        sizes = zip(task.sizes, task.sizes[1:], strict=False)
        self.layers = nn.LayerList(
            nn.Linear(inputs, outputs, _starting_at(next(start)), _starting_at(next(start)))
            for inputs, outputs in sizes
        )

    def forward(self, hidden: Any) -> Any:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            out = layer(hidden) if index == last else nn.functional.relu(layer(hidden))
            hidden = hidden + out if self._task.is_skipped(index) else out
        return hidden


class _Normed(nn.Layer):  # type: ignore[misc]
    """A convolution and its batch norm, which adds the running statistics to the parameters."""

    def __init__(self, convolution: Convolution, start: Iterator[_Given]) -> None:
        super().__init__()
        shape = (convolution.inputs, convolution.outputs, convolution.size, convolution.stride, convolution.padding)
        self.convolution = nn.Conv2D(*shape, weight_attr=_starting_at(next(start)), bias_attr=False)
        # Running statistics start at 0 and 1, which is what start_weights has for them.
        scale, shift, _, _ = (next(start) for _ in range(4))
        self.norm = nn.BatchNorm2D(
            convolution.outputs, epsilon=resnet.EPSILON, weight_attr=_starting_at(scale), bias_attr=_starting_at(shift)
        )

    def forward(self, images: Any) -> Any:
        return self.norm(self.convolution(images))


class _Block(nn.Layer):  # type: ignore[misc]
    def __init__(self, block: tuple[int, int, int], start: Iterator[_Given]) -> None:
        super().__init__()
        self.parts = nn.LayerList(_Normed(each, start) for each in resnet.of_block(*block))

    def forward(self, images: Any) -> Any:
        first, second, *shortcut = self.parts
        out = second(nn.functional.relu(first(images)))
        return nn.functional.relu(out + (shortcut[0](images) if shortcut else images))


class ResNet(nn.Layer):  # type: ignore[misc]
    """ResNet-18 as ``resnet.py`` has it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        start = _start(task)
        self.stem = _Normed(resnet.stem(), start)
        self.blocks = nn.LayerList(_Block(each, start) for each in resnet.BLOCKS)
        weight, bias = (_starting_at(value) for value in start)
        self.classifier = nn.Linear(resnet.BLOCKS[-1][1], CLASSES, weight, bias)

    def forward(self, images: Any) -> Any:
        hidden = nn.functional.relu(self.stem(images))
        for block in self.blocks:
            hidden = block(hidden)
        return self.classifier(hidden.mean(axis=[2, 3]))


def _start(task: Task) -> Iterator[_Given]:
    return (_Given(place, value) for place, value in enumerate(start_weights(task)))


def _starting_at(given: _Given) -> Any:
    return paddle.ParamAttr(initializer=given)
