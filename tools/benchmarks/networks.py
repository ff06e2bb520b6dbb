"""The networks of the benchmarks' tasks, written once for the layers of Paddle and of PyTorch, with equal start values.

A kit has a framework's layers and draws their start values one after the other: the same seed gives the same network.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.benchmarks.tasks import BYTES, CLICKS, CONTEXT, FIELD_IDS, FIELDS, VOCABULARY, Task

Weights = list[NDArray[np.float32]]
EPSILON = 1e-5
CLASSES = 10
# The language model: its width, heads, and blocks. DeepFM: how wide a row of its table of factors is, and its layers.
WIDTH, HEADS, DEPTH = 96, 3, 2
FACTORS, HIDDEN = 8, (64, 32)
# Inputs, outputs, stride of each block of two convolutions of ResNet-18 (arXiv 1512.03385).
BLOCKS = (
    (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)
)  # fmt: skip


class Convolution(NamedTuple):
    """Followed by a batch norm; ``scale``: what that norm starts with."""

    inputs: int
    outputs: int
    size: int
    stride: int
    scale: float = 1.0

    @property
    def arguments(self) -> tuple[int, ...]:
        """Inputs, outputs, kernel, stride, padding."""
        return self.inputs, self.outputs, self.size, self.stride, self.size // 2


class Kit:
    """``start``: the start values that were drawn, in the order of the network's parameters."""

    def __init__(self, seed: int) -> None:
        self.start = Weights()
        self._random = np.random.default_rng(seed)

    def _drawn(self, *shape: int, spread: float) -> NDArray[np.float32]:
        self.start.append(self._random.standard_normal(shape, dtype=np.float32) * np.float32(spread))
        return self.start[-1]

    def _constant(self, size: int, value: float) -> NDArray[np.float32]:
        self.start.append(np.full(size, value, np.float32))
        return self.start[-1]

    def _of_linear(self, inputs: int, outputs: int, spread: float, has_bias: bool) -> list[NDArray[np.float32]]:
        matrix = self._drawn(inputs, outputs, spread=spread)
        return [matrix, self._constant(outputs, 0)] if has_bias else [matrix]

    def _of_norm(self, size: int, scale: float = 1.0) -> list[NDArray[np.float32]]:
        return [self._constant(size, scale), self._constant(size, 0)]

    def _of_convolution(self, each: Convolution) -> NDArray[np.float32]:
        spread = np.sqrt(2 / (each.outputs * each.size**2))
        return self._drawn(each.outputs, each.inputs, each.size, each.size, spread=float(spread))


class PaddleKit(Kit):
    """Start values come through initializers, so that whatever a strategy keeps of the start state is right too; in
    static mode the startup program is fed with them (``start_feed``)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        import paddle

        class Given(paddle.nn.initializer.Initializer):  # type: ignore[misc]
            """Assign would make one Python number of each element: minutes and gigabytes for 11 million."""

            def __init__(self, place: int, value: NDArray[np.float32]) -> None:
                super().__init__()
                self._place, self._value = place, value

            def forward(self, parameter: Any, block: Any = None) -> Any:
                del block
                if paddle.in_dynamic_mode():
                    return parameter.set_value(self._value)
                # What is fed cannot be the parameter itself.
                return paddle.assign(
                    paddle.static.data(f"start_{self._place}", list(self._value.shape), self._value.dtype.name)
                )

        self.nn: Any = paddle.nn
        self.base, self.relu = paddle.nn.Layer, paddle.nn.functional.relu
        self.pool, self.layers = paddle.nn.AdaptiveAvgPool2D(1), paddle.nn.LayerList
        functional = paddle.nn.functional
        attention, self.gelu = functional.scaled_dot_product_attention, partial(functional.gelu, approximate=True)
        self.attention = lambda *stacks: attention(*stacks, is_causal=True)

        def attribute(value: NDArray[np.float32]) -> Any:
            place = next(place for place, each in enumerate(self.start) if each is value)
            return paddle.ParamAttr(initializer=Given(place, value))

        self._attribute = attribute

    def linear(self, inputs: int, outputs: int, spread: float, has_bias: bool = True) -> Any:
        matrix, *bias = map(self._attribute, self._of_linear(inputs, outputs, spread, has_bias))
        return self.nn.Linear(inputs, outputs, matrix, bias[0] if bias else False)

    def embedding(self, rows: int, width: int, spread: float) -> Any:
        return self.nn.Embedding(rows, width, weight_attr=self._attribute(self._drawn(rows, width, spread=spread)))

    def norm(self, size: int) -> Any:
        scale, shift = map(self._attribute, self._of_norm(size))
        return self.nn.LayerNorm(size, epsilon=EPSILON, weight_attr=scale, bias_attr=shift)

    def normed(self, each: Convolution) -> list[Any]:
        kernel = self._attribute(self._of_convolution(each))
        scale, shift = map(self._attribute, self._of_norm(each.outputs, each.scale))
        convolution = self.nn.Conv2D(*each.arguments, weight_attr=kernel, bias_attr=False)
        return [convolution, self.nn.BatchNorm2D(each.outputs, epsilon=EPSILON, weight_attr=scale, bias_attr=shift)]

    def start_feed(self, startup_program: Any) -> dict[str, NDArray[np.float32]]:
        """What to feed a startup program with that has the network in it."""
        asked = [op.attrs()["name"] for op in startup_program.global_block().ops if op.name() == "pd_op.data"]
        given = {f"start_{place}": value for place, value in enumerate(self.start)}
        return {name: given[name] for name in asked}


class TorchKit(Kit):
    """``has_sparse_tables``: whether gradients of embeddings are sparse."""

    def __init__(self, seed: int, has_sparse_tables: bool = False) -> None:
        super().__init__(seed)
        import torch

        self._torch, self.nn, self.base, self.relu = torch, torch.nn, torch.nn.Module, torch.relu
        self._has_sparse_tables = has_sparse_tables
        self.pool, self.layers = torch.nn.AdaptiveAvgPool2d(1), torch.nn.ModuleList
        functional = torch.nn.functional
        attention, self.gelu = functional.scaled_dot_product_attention, partial(functional.gelu, approximate="tanh")
        self.attention = lambda *stacks: attention(
            *(each.transpose(1, 2) for each in stacks), is_causal=True
        ).transpose(1, 2)

    def _with(self, layer: Any, *values: NDArray[np.float32]) -> Any:
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.data.copy_(self._torch.from_numpy(value))
        return layer

    def linear(self, inputs: int, outputs: int, spread: float, has_bias: bool = True) -> Any:
        matrix, *bias = self._of_linear(inputs, outputs, spread, has_bias)
        return self._with(self.nn.Linear(inputs, outputs, bias=has_bias), matrix.T, *bias)

    def embedding(self, rows: int, width: int, spread: float) -> Any:
        table = self.nn.Embedding(rows, width, sparse=self._has_sparse_tables)
        return self._with(table, self._drawn(rows, width, spread=spread))

    def norm(self, size: int) -> Any:
        return self._with(self.nn.LayerNorm(size, EPSILON), *self._of_norm(size))

    def normed(self, each: Convolution) -> list[Any]:
        convolution = self._with(self.nn.Conv2d(*each.arguments, bias=False), self._of_convolution(each))
        norm = self._with(self.nn.BatchNorm2d(each.outputs, eps=EPSILON), *self._of_norm(each.outputs, each.scale))
        return [convolution, norm]


def build(task: Task, kit: Any) -> Any:
    """The task's network of a kit's layers: from a batch's inputs to logits."""
    return {BYTES: _language_model, CLICKS: _deepfm}.get(task.name, _resnet18)(kit)


def _language_model(kit: Any) -> Any:
    """A transformer with norms before attention and layers (arXiv 1706.03762, 2002.04745), with biases, on stacks
    [batch, CONTEXT, WIDTH]: bytes [batch, CONTEXT] to logits [batch, CONTEXT, 256] of the bytes that follow them."""

    class Block(kit.base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.qkv = kit.norm(WIDTH), kit.linear(WIDTH, 3 * WIDTH, 0.02)
            self.out = kit.linear(WIDTH, WIDTH, 0.02)
            self.second, self.up = kit.norm(WIDTH), kit.linear(WIDTH, 4 * WIDTH, 0.02)
            self.down = kit.linear(4 * WIDTH, WIDTH, 0.02)

        def forward(self, hidden: Any) -> Any:
            stacked = self.qkv(self.first(hidden)).reshape([-1, CONTEXT, 3, HEADS, WIDTH // HEADS])
            mixed = kit.attention(stacked[:, :, 0], stacked[:, :, 1], stacked[:, :, 2])
            hidden = hidden + self.out(mixed.reshape([-1, CONTEXT, WIDTH]))
            return hidden + self.down(kit.gelu(self.up(self.second(hidden))))

    class LanguageModel(kit.base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bytes, self.places = kit.embedding(VOCABULARY, WIDTH, 0.02), kit.embedding(CONTEXT, WIDTH, 0.02)
            self.blocks = kit.layers([Block() for _ in range(DEPTH)])
            self.norm, self.out = kit.norm(WIDTH), kit.linear(WIDTH, VOCABULARY, 0.02)

        def forward(self, inputs: Any) -> Any:
            hidden = self.bytes(inputs) + self.places.weight
            for block in self.blocks:
                hidden = block(hidden)
            return self.out(self.norm(hidden))

    return LanguageModel()


def _deepfm(kit: Any) -> Any:
    """DeepFM (arXiv 1703.04247): ids [batch, FIELDS] of one table for all fields to logits [batch, 1]."""

    class DeepFM(kit.base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = kit.embedding(FIELDS * FIELD_IDS, 1, 0.0)
            self.factors = kit.embedding(FIELDS * FIELD_IDS, FACTORS, 0.05)
            sizes = pairwise((FIELDS * FACTORS, *HIDDEN, 1))
            self.deep = kit.layers([kit.linear(*pair, (1 / pair[0]) ** 0.5) for pair in sizes])

        def forward(self, inputs: Any) -> Any:
            factors = self.factors(inputs)
            pairs = factors.sum(1).square() - factors.square().sum(1)
            *between, last = self.deep
            hidden = factors.flatten(1)
            for layer in between:
                hidden = kit.relu(layer(hidden))
            return self.linear(inputs).sum(1) + 0.5 * pairs.sum(1).unsqueeze(1) + last(hidden)

    return DeepFM()


def _resnet18(kit: Any) -> Any:
    """ResNet-18 for images [batch, 1, 32, 32]: its stem is one 3 x 3 convolution of stride 2 without pooling."""

    class Block(kit.base):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            # Blocks begin as their shortcut (arXiv 1706.02677, section 5.1).
            first, second = Convolution(inputs, outputs, 3, stride), Convolution(outputs, outputs, 3, 1, scale=0.0)
            self.path = kit.nn.Sequential(*kit.normed(first), kit.nn.ReLU(), *kit.normed(second))
            shortcut = kit.normed(Convolution(inputs, outputs, 1, stride)) if stride > 1 else []
            self.shortcut = kit.nn.Sequential(*shortcut) if shortcut else kit.nn.Identity()

        def forward(self, images: Any) -> Any:
            return kit.relu(self.path(images) + self.shortcut(images))

    layers = [*kit.normed(Convolution(1, BLOCKS[0][0], 3, 2)), kit.nn.ReLU(), *(Block(*each) for each in BLOCKS)]
    width = BLOCKS[-1][1]
    return kit.nn.Sequential(*layers, kit.pool, kit.nn.Flatten(), kit.linear(width, CLASSES, 0.1 * width**-0.5))


def torch_tensors(network: Any) -> Weights:
    """Parameters and running statistics of a PyTorch network in Paddle's order and shapes, as views."""
    found = []
    for module in network.modules():
        is_linear = hasattr(module, "in_features")
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name != "num_batches_tracked":
                own = tensor.detach()
                found.append((own.T if is_linear and own.ndim == 2 else own).numpy())
    return found


def described(task: Task) -> str:
    """How many values and tensors a task's network has, and its batch."""
    import paddle

    paddle.disable_static()
    kit = PaddleKit(0)
    build(task, kit)
    return (
        f"{sum(each.size for each in kit.start):,} values in {len(kit.start)} tensors; batch {task.global_batch_size}"
    )
