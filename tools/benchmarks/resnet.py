"""ResNet-18 (arXiv 1512.03385) with the stem for small images, in numpy: its convolutions, start weights, forward pass.

The stem is one 3 x 3 convolution without pooling, as section 4.2 of the paper has it for 32 x 32 images. Its stride is
2: each pixel of the digits is repeated four times in a row, and a step stays short enough for a batch that learns.
Every convolution is followed by a batch norm; together they are five arrays: kernel [outputs, inputs, size, size],
scale, shift, running mean, running variance. The last are the classifier's weight [512, 10] and bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.benchmarks.task import CLASSES, Task, Weights

EPSILON = 1e-5
# Inputs, outputs, stride of each block of two convolutions.
BLOCKS = (
    (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)
)  # fmt: skip
# Rows per product: the shifted images of a larger piece do not fit into the cache.
_CHUNK = 40
_ARRAYS = 5


@dataclass(frozen=True)
class Convolution:
    inputs: int
    outputs: int
    size: int
    stride: int

    @property
    def padding(self) -> int:
        return self.size // 2


def stem() -> Convolution:
    return Convolution(1, BLOCKS[0][0], 3, 2)


def of_block(inputs: int, outputs: int, stride: int) -> list[Convolution]:
    """The two convolutions of a block, and its shortcut's if the shape changes."""
    pair = [Convolution(inputs, outputs, 3, stride), Convolution(outputs, outputs, 3, 1)]
    return pair if inputs == outputs and stride == 1 else [*pair, Convolution(inputs, outputs, 1, stride)]


def convolutions() -> list[Convolution]:
    """All convolutions, in the order of their weights."""
    return [stem(), *(each for block in BLOCKS for each in of_block(*block))]


def start_weights(task: Task) -> Weights:
    """He's start values for the kernels (fan out), a small classifier, and blocks that begin as their shortcut: the
    last norm's scale is 0 (arXiv 1706.02677, section 5.1). The same for a seed.
    """
    generator = np.random.default_rng(task.seed)
    weights: Weights = []
    for each, scale in zip(convolutions(), _start_scales(), strict=True):
        deviation = np.float32(np.sqrt(2 / (each.outputs * each.size**2)))
        shape = (each.outputs, each.inputs, each.size, each.size)
        weights.append(generator.standard_normal(shape, dtype=np.float32) * deviation)
        weights += [np.full(each.outputs, value, np.float32) for value in (scale, 0, 0, 1)]
    features = BLOCKS[-1][1]
    weights.append(generator.standard_normal((features, CLASSES), dtype=np.float32) * np.float32(0.1 * features**-0.5))
    weights.append(np.zeros(CLASSES, np.float32))
    return weights


def _start_scales() -> list[float]:
    return [1.0, *(scale for block in BLOCKS for _, scale in zip(of_block(*block), (1.0, 0.0, 1.0), strict=False))]


def logits(weights: Sequence[NDArray[Any]], images: NDArray[np.float32]) -> NDArray[np.float32]:
    """[samples, 10] of images [samples, 1, height, width], with the running statistics."""
    channels = images.transpose(0, 2, 3, 1)
    parts = [_forward(weights, channels[first : first + _CHUNK]) for first in range(0, len(channels), _CHUNK)]
    return np.concatenate(parts)


def _forward(weights: Sequence[NDArray[Any]], images: NDArray[np.float32]) -> NDArray[np.float32]:
    groups = _groups(weights)
    hidden = np.maximum(_normed(images, stem(), next(groups)), 0)
    for block in BLOCKS:
        own = of_block(*block)
        first, second, *shortcut = [(each, next(groups)) for each in own]
        out = _normed(np.maximum(_normed(hidden, *first), 0), *second)
        hidden = np.maximum(out + (_normed(hidden, *shortcut[0]) if shortcut else hidden), 0)
    classifier: NDArray[np.float32] = hidden.mean(axis=(1, 2)) @ weights[-2] + weights[-1]
    return classifier


def _groups(weights: Sequence[NDArray[Any]]) -> Iterator[Sequence[NDArray[Any]]]:
    for first in range(0, len(weights) - 2, _ARRAYS):
        yield weights[first : first + _ARRAYS]


def _normed(
    images: NDArray[np.float32], convolution: Convolution, arrays: Sequence[NDArray[Any]]
) -> NDArray[np.float32]:
    """A convolution with its batch norm folded in. Images are [samples, height, width, channels]."""
    kernel, scale, shift, mean, variance = (np.asarray(each, np.float32) for each in arrays)
    factor = scale / np.sqrt(variance + np.float32(EPSILON))
    products = kernel.transpose(2, 3, 1, 0) * factor
    shifted: NDArray[np.float32] = _convolved(images, products, convolution) + (shift - mean * factor)
    return shifted


def _convolved(
    images: NDArray[np.float32], products: NDArray[np.float32], convolution: Convolution
) -> NDArray[np.float32]:
    """The sum of the shifted images' products with [size, size, inputs, outputs]: faster than one large matrix."""
    samples, height, width, inputs = images.shape
    padding, stride = convolution.padding, convolution.stride
    padded = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = (height - 1) // stride + 1, (width - 1) // stride + 1
    total = np.zeros((samples * rows * columns, convolution.outputs), np.float32)
    for down in range(convolution.size):
        for right in range(convolution.size):
            shifted = padded[:, down : down + height : stride, right : right + width : stride]
            total += np.ascontiguousarray(shifted).reshape(-1, inputs) @ products[down, right]
    return total.reshape(samples, rows, columns, -1)


def describe(task: Task) -> str:
    size = task.image_pixels
    return f"ResNet-18 with a 3 x 3 stem of stride 2 and batch norm, images of 1 x {size} x {size}"
