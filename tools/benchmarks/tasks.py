"""The tasks (hyperparameters, batches, start weights, networks for Paddle and PyTorch), and who takes part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import ArrayDataset, digits

OURS, BEFORE, TORCH, ALONE = KINDS = ("ours", "before", "torch", "alone")
DDP, BF16, POWERSGD, POST_LOCAL_SGD = "ddp", "bf16", "powersgd", "post_local_sgd"
# The baseline of all comparisons.
REFERENCE = "torch:ddp"
_FORM = re.compile(
    r"(?:(?P<plain>ddp|bf16)(?:_(?P<bucket>[1-9][0-9]*)mb)?"
    r"|(?P<starting>powersgd|post_local_sgd)_(?P<number>[1-9][0-9]*)(?:_from_(?P<start>[0-9]+))?)"
)


@dataclass(frozen=True)
class Hook:
    """``ddp`` as it comes has buckets of 25 MiB after a first one of 1 MiB; ``number`` is PowerSGD's rank or the
    period of post-local SGD; ``start`` how many plain steps are before it.
    """

    kind: str
    bucket_mb: int | None = None
    number: int = 1
    start: int = 0

    @staticmethod
    def of(variant: str, start: int) -> Hook:
        """The hook of a contestant's variant; ``start`` if it names none. Raises ValueError with what is accepted."""
        found = _FORM.fullmatch(variant)
        if found is None:
            raise ValueError(
                f"torch:{variant}: PyTorch takes part as ddp, ddp_4mb, bf16, bf16_4mb, powersgd_1, post_local_sgd_8, "
                "the last two also with their first step, such as post_local_sgd_8_from_100"
            )
        if found["plain"]:
            return Hook(found["plain"], int(found["bucket"]) if found["bucket"] else None)
        return Hook(found["starting"], None, int(found["number"]), int(found["start"]) if found["start"] else start)

    @property
    def family(self) -> str:
        """The kind, regardless of buckets and start: ``ddp``, ``bf16``, ``powersgd_1``, ``post_local_sgd_8``."""
        return f"{self.kind}_{self.number}" if self.kind in (POWERSGD, POST_LOCAL_SGD) else self.kind

    def rhythm(self) -> dict[str, int]:
        """Warm-up steps, and the period with which steps repeat after them, as for our profiles."""
        return {"settles_after": self.start, "period_steps": self.number if self.kind == POST_LOCAL_SGD else 1}


@dataclass(frozen=True)
class Contestant:
    """``kind`` is the trainer; ``variant`` is a profile for ours and for ``before`` (ours in another checkout), a hook
    for PyTorch, a framework for ``alone``, which computes without communicating."""

    kind: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.variant}"

    @property
    def framework(self) -> str:
        return self.variant if self.kind == ALONE else OURS if self.kind == BEFORE else self.kind

    @property
    def baseline(self) -> str:
        """The compute-only contestant of the same framework."""
        return f"{ALONE}:{self.framework}"

    @property
    def is_tuned(self) -> bool:
        """Whether a profile is a file outside the catalogue, with knobs chosen for the benchmark."""
        return self.kind in (OURS, BEFORE) and self.variant.endswith((".yaml", ".yml"))


def parse(text: str) -> Contestant:
    """Parse ``kind:variant``; raises ValueError with what is accepted."""
    kind, _, variant = text.partition(":")
    if kind not in KINDS or not variant:
        raise ValueError(f"contestant {text!r} is not one of ours, before, torch, alone with a variant: torch:ddp")
    if kind == TORCH:
        Hook.of(variant, 0)
    if kind == ALONE and variant not in (OURS, TORCH):
        raise ValueError(f"contestant {text!r}: alone takes ours or torch")
    return Contestant(kind, variant)


def with_baselines(words: Sequence[str]) -> list[Contestant]:
    """The named contestants in order, without duplicates, after the compute-only runs that they are compared with."""
    chosen = [parse(word) for word in words]
    names = dict.fromkeys([*(each.baseline for each in chosen), *(each.name for each in chosen)])
    return [parse(name) for name in names]


Weights = list[NDArray[np.float32]]
MLP, RESNET18 = "mlp", "resnet18"
CLASSES, PIXELS, EPSILON = 10, 8, 1e-5
# Inputs, outputs, stride of each block of two convolutions of ResNet-18 (arXiv 1512.03385).
BLOCKS = (
    (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One training job on scikit-learn's digits, with SGD, momentum and a constant learning rate.

    ``mlp``: ``hidden_layers`` of ``width`` on 64 features. ``resnet18``: images of [1, 32, 32], each pixel repeated;
    its stem is one 3 x 3 convolution of stride 2 without pooling: a step is short enough for a batch that learns.
    """

    name: str = MLP
    hidden_layers: int = 8
    width: int = 640
    learning_rate: float = 0.01
    momentum: float = 0.9
    global_batch_size: int = 128
    steps: int = 200
    warmup_steps: int = 16  # steps that are trained but not measured
    evaluate_every: int = 8
    target: float = 0.95  # test accuracy that is reached within the steps
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        """Sizes of the layers of an ``mlp``, including inputs and outputs."""
        return [PIXELS * PIXELS, *[self.width] * self.hidden_layers, CLASSES]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return (1, 32, 32) if self.name == RESNET18 else (PIXELS * PIXELS,)


# ResNet-18's batch is meant to let computing on one core take about as long as its gradients take at 1 Gb/s (0.36 s).
TASKS = {
    MLP: Task(),
    RESNET18: Task(RESNET18, learning_rate=0.03, global_batch_size=32, warmup_steps=8, evaluate_every=20, target=0.85),
}


class Batches:
    """Batches of the training part: every epoch has its own order, determined by the seed."""

    def __init__(self, task: Task, rank: int, world_size: int) -> None:
        size = task.global_batch_size
        if size % world_size:
            raise ValueError(f"global_batch_size={size} is not a multiple of {world_size} ranks")
        self._features, self._labels = _samples(task, cast(ArrayDataset, digits().train))
        self._task = task
        self._share = slice(rank * size // world_size, (rank + 1) * size // world_size)

    def at(self, step: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """This rank's samples [batch, *sample_shape] and labels [batch] of a step."""
        size = self._task.global_batch_size
        epoch, batch = divmod(step, len(self._labels) // size)
        order = np.random.default_rng((self._task.seed, epoch)).permutation(len(self._labels))
        chosen = order[batch * size : (batch + 1) * size][self._share]
        return self._features[chosen], self._labels[chosen]


def _samples(task: Task, part: ArrayDataset) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    features = part.features.reshape(-1, 1, PIXELS, PIXELS).astype(np.float32)
    if task.name == RESNET18:
        return features.repeat(4, axis=2).repeat(4, axis=3), part.labels
    return features.reshape(-1, PIXELS * PIXELS), part.labels


class Convolution(NamedTuple):
    """Followed by a batch norm; ``scale``: what that norm starts with."""

    inputs: int
    outputs: int
    size: int
    stride: int
    scale: float = 1.0


def convolutions() -> list[list[Convolution]]:
    """The stem's, and those of each block: two, and the shortcut's if the shape changes."""
    found = [[Convolution(1, BLOCKS[0][0], 3, 2)]]
    for inputs, outputs, stride in BLOCKS:
        # Blocks begin as their shortcut (arXiv 1706.02677, section 5.1).
        pair = [Convolution(inputs, outputs, 3, stride), Convolution(outputs, outputs, 3, 1, scale=0.0)]
        found.append(pair if stride == 1 else [*pair, Convolution(inputs, outputs, 1, stride)])
    return found


def start_weights(task: Task) -> Weights:
    """He's start values, the same for a seed, in the order of the networks' tensors. Of a convolution five: kernel,
    scale, shift, running mean, running variance; of a linear layer [inputs, outputs] and a bias."""
    generator, weights = np.random.default_rng(task.seed), Weights()
    if task.name == RESNET18:
        for each in (each for block in convolutions() for each in block):
            deviation = np.float32(np.sqrt(2 / (each.outputs * each.size**2)))
            shape = (each.outputs, each.inputs, each.size, each.size)
            weights.append(generator.standard_normal(shape, dtype=np.float32) * deviation)
            weights += [np.full(each.outputs, value, np.float32) for value in (each.scale, 0, 0, 1)]
        layers = [(BLOCKS[-1][1], CLASSES, 0.1 * BLOCKS[-1][1] ** -0.5)]
    else:
        pairs = list(pairwise(task.sizes))
        layers = [(one, other, np.sqrt(2 / one) * (0.5 if other == CLASSES else 1.0)) for one, other in pairs]
    for inputs, outputs, spread in layers:
        weights.append(generator.standard_normal((inputs, outputs), dtype=np.float32) * np.float32(spread))
        weights.append(np.zeros(outputs, np.float32))
    return weights


def describe(task: Task) -> str:
    weights = start_weights(task)
    values, tensors = sum(each.size for each in weights), len(weights)
    layers = f"64 -> {task.hidden_layers} ReLU layers of {task.width} -> {CLASSES}"
    resnet = "ResNet-18 with a 3 x 3 stem of stride 2, images of 1 x 32 x 32"
    return f"{layers if task.name == MLP else resnet}: {values:,} values in {tensors} tensors"


class PaddleKit:
    """Layers of Paddle that take start values one after the other, in static and in dynamic mode. They come through
    initializers, so that whatever a strategy keeps of the start state is right too; in static mode the startup program
    is fed with them (``start_feed``)."""

    def __init__(self, task: Task) -> None:
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

        self.nn, self.base, self.relu = paddle.nn, paddle.nn.Layer, paddle.nn.functional.relu
        self.pool = paddle.nn.AdaptiveAvgPool2D(1)
        places = enumerate(start_weights(task))
        self._start: Iterator[Any] = (paddle.ParamAttr(initializer=Given(*each)) for each in places)

    def linear(self, inputs: int, outputs: int) -> Any:
        return self.nn.Linear(inputs, outputs, next(self._start), next(self._start))

    def normed(self, each: Convolution) -> list[Any]:
        kernel, scale, shift, _, _ = (next(self._start) for _ in range(5))  # running statistics start at 0 and 1
        shape = (each.inputs, each.outputs, each.size, each.stride, each.size // 2)
        convolution = self.nn.Conv2D(*shape, weight_attr=kernel, bias_attr=False)
        return [convolution, self.nn.BatchNorm2D(each.outputs, epsilon=EPSILON, weight_attr=scale, bias_attr=shift)]


class TorchKit:
    """Layers of PyTorch. A network gets its start weights through ``torch_tensors``."""

    def __init__(self) -> None:
        import torch

        self.nn, self.base, self.relu, self.pool = torch.nn, torch.nn.Module, torch.relu, torch.nn.AdaptiveAvgPool2d(1)
        self.linear = torch.nn.Linear

    def normed(self, each: Convolution) -> list[Any]:
        shape = (each.inputs, each.outputs, each.size, each.stride, each.size // 2)
        return [self.nn.Conv2d(*shape, bias=False), self.nn.BatchNorm2d(each.outputs, eps=EPSILON)]


def build(task: Task, kit: Any) -> Any:
    """The task's network of a kit's layers; its tensors are in the order of ``start_weights``."""
    if task.name == MLP:
        layers = [layer for sizes in pairwise(task.sizes) for layer in (kit.linear(*sizes), kit.nn.ReLU())]
        return kit.nn.Sequential(*layers[:-1])

    class Block(kit.base):  # type: ignore[misc]
        def __init__(self, first: Convolution, second: Convolution, *shortcut: Convolution) -> None:
            super().__init__()
            self.path = kit.nn.Sequential(*kit.normed(first), kit.nn.ReLU(), *kit.normed(second))
            self.shortcut = kit.nn.Sequential(*kit.normed(*shortcut)) if shortcut else kit.nn.Identity()

        def forward(self, images: Any) -> Any:
            return kit.relu(self.path(images) + self.shortcut(images))

    (stem,), *blocks = convolutions()
    layers = [*kit.normed(stem), kit.nn.ReLU(), *(Block(*each) for each in blocks), kit.pool, kit.nn.Flatten()]
    return kit.nn.Sequential(*layers, kit.linear(BLOCKS[-1][1], CLASSES))


def start_feed(task: Task, startup_program: Any) -> dict[str, NDArray[np.float32]]:
    """What to feed a startup program with that has one network of ``PaddleKit`` in it."""
    asked = [op.attrs()["name"] for op in startup_program.global_block().ops if op.name() == "pd_op.data"]
    given = {f"start_{place}": value for place, value in enumerate(start_weights(task))}
    return {name: given[name] for name in asked}


def torch_tensors(network: Any) -> list[Any]:
    """Of a PyTorch network in the order of ``start_weights``; linear layers' matrices transposed, as views."""
    named = network.state_dict().items()
    tensors = [tensor.detach() for name, tensor in named if not name.endswith("num_batches_tracked")]
    return [tensor.T if tensor.ndim == 2 else tensor for tensor in tensors]


def judged(task: Task, weights: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Accuracy and cross entropy on the 359 test images, by the same program for every contestant: Paddle's, eager."""
    import paddle

    paddle.disable_static()
    samples, labels = _samples(task, cast(ArrayDataset, digits().test))
    network = build(task, PaddleKit(task))
    for parameter, value in zip(network.parameters(), weights, strict=True):
        parameter.set_value(np.asarray(value, np.float32))
    network.eval()
    logits = network(paddle.to_tensor(samples)).numpy()
    accuracy = float((logits.argmax(axis=1) == labels).mean())
    above = logits - logits.max(axis=1, keepdims=True)
    logarithms = above[np.arange(len(labels)), labels] - np.log(np.exp(above).sum(axis=1))
    return accuracy, float(-logarithms.mean())
