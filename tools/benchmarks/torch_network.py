"""The tasks' networks in PyTorch, with the weights that Paddle's start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tools.benchmarks import resnet
from tools.benchmarks.networks import start_weights
from tools.benchmarks.resnet import Convolution
from tools.benchmarks.task import CLASSES, MLP, Task, Weights


def network(task: Task) -> Any:
    """With the start weights in it; its ``ordered()`` are its tensors in their order."""
    made = Network(task) if task.network == MLP else ResNet()
    with torch.no_grad():
        for tensor, value in zip(made.ordered(), start_weights(task), strict=True):
            tensor.copy_(torch.from_numpy(_turned(value)))
    return made


def weights_of(tensors: Sequence[Any]) -> Weights:
    """Copies, as ``start_weights`` has them."""
    return [np.array(_turned(tensor.detach().numpy())) for tensor in tensors]


def _turned(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """A matrix of a linear layer is [outputs, inputs] here."""
    return value.T if value.ndim == 2 else value


class Network(torch.nn.Module):  # type: ignore[misc]
    """Fully connected."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        sizes = zip(task.sizes, task.sizes[1:], strict=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(inputs, outputs) for inputs, outputs in sizes)

    def forward(self, hidden: Any) -> Any:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            out = layer(hidden) if index == last else torch.relu(layer(hidden))
            hidden = hidden + out if self._task.is_skipped(index) else out
        return hidden

    def ordered(self) -> list[Any]:
        return list(self.parameters())


class _Normed(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, convolution: Convolution) -> None:
        super().__init__()
        shape = (convolution.inputs, convolution.outputs, convolution.size, convolution.stride, convolution.padding)
        self.convolution = torch.nn.Conv2d(*shape, bias=False)
        self.norm = torch.nn.BatchNorm2d(convolution.outputs, eps=resnet.EPSILON)

    def forward(self, images: Any) -> Any:
        return self.norm(self.convolution(images))

    def ordered(self) -> Iterator[Any]:
        yield self.convolution.weight
        yield from (self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var)


class _Block(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, block: tuple[int, int, int]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(_Normed(each) for each in resnet.of_block(*block))

    def forward(self, images: Any) -> Any:
        first, second, *shortcut = self.parts
        out = second(functional.relu(first(images)))
        return functional.relu(out + (shortcut[0](images) if shortcut else images))


class ResNet(torch.nn.Module):  # type: ignore[misc]
    """ResNet-18 as ``resnet.py`` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _Normed(resnet.stem())
        self.blocks = torch.nn.ModuleList(_Block(each) for each in resnet.BLOCKS)
        self.classifier = torch.nn.Linear(resnet.BLOCKS[-1][1], CLASSES)

    def forward(self, images: Any) -> Any:
        hidden = functional.relu(self.stem(images))
        for block in self.blocks:
            hidden = block(hidden)
        return self.classifier(hidden.mean(dim=(2, 3)))

    def ordered(self) -> list[Any]:
        units = [self.stem, *(part for block in self.blocks for part in block.parts)]
        return [*(tensor for unit in units for tensor in unit.ordered()), self.classifier.weight, self.classifier.bias]
