"""The benchmarks' tasks: data that every machine has, batches, targets, and how trained parameters are judged.

*bytes* is a small language model over the sources of Python's standard library, *clicks* DeepFM on generated clicks
with a planted truth. Both have so little data that a rank which sees its own part only learns less, however long it
trains. *resnet18* on scikit-learn's digits is there for its step times; it is not judged.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import ArrayDataset, digits

BYTES, CLICKS, RESNET18 = "bytes", "clicks", "resnet18"
# Bytes that the language model sees before the one it predicts, and how many there are.
CONTEXT, VOCABULARY = 64, 256
FIELDS, FIELD_IDS = 12, 2000
# The first bytes of a source, of how many; a file in 16 is for validation.
_OF_A_FILE, _TRAINING_BYTES, _VALIDATION_WINDOWS = 8192, 98304, 256
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
_ZIPF, _TRUTH_SEED, _TEST_SEED, _TEST_CLICKS = 0.95, 7, 13, 40_000
_STEPS_OF_CLICKS = 300
_EVALUATIONS_OF_A_PERIOD = 8
Inputs = NDArray[Any]
Specs = tuple[tuple[list[int | None], str], tuple[list[int | None], str]]


class Score(NamedTuple):
    """How a task is judged; ``sign``: 1 if more is better; ``targets``: from the easiest to the hardest."""

    name: str
    sign: int
    targets: Sequence[float]
    digits: int


@dataclass(frozen=True)
class Task:
    """One training job with a constant learning rate: Adam, or Momentum where ``momentum`` is given.

    ``score``: None where parameters are not judged. ``bucket``: DDP's second bucket size. ``compared_at``: the step at
    which contestants are compared where it is not the last.
    """

    name: str
    learning_rate: float
    global_batch_size: int
    steps: int
    warmup_steps: int  # steps that are trained but not measured
    evaluate_every: int
    bucket: str
    targets: Sequence[float] = ()
    momentum: float | None = None
    compared_at: int | None = None
    seed: int = 0

    @property
    def score(self) -> Score | None:
        """What trained parameters are judged by."""
        if not self.targets:
            return None
        kinds = {BYTES: ("bits per byte", -1, 3), CLICKS: ("AUC", 1, 4)}
        name, sign, digits_shown = kinds[self.name]
        return Score(name, sign, self.targets, digits_shown)

    def evaluated_at(self, period: int = 1) -> list[int]:
        """Steps after which parameters are kept to be judged: every so many, the last one, and up to eight of the last
        ``period`` before the comparison, in which replicas of local steps are apart and together."""
        if self.score is None:
            return []
        compared = self.compared_at or self.steps
        last = np.linspace(compared - period, compared, min(period, _EVALUATIONS_OF_A_PERIOD) + 1)[1:]
        steps = {*range(self.evaluate_every, self.steps, self.evaluate_every), *last.astype(int).tolist(), self.steps}
        return sorted(step for step in steps if step > 0)

    @property
    def specs(self) -> Specs:
        """Shapes and dtypes of inputs and labels; None: the batch."""
        if self.name == BYTES:
            return ([None, CONTEXT], "int64"), ([None, CONTEXT], "int64")
        if self.name == CLICKS:
            return ([None, FIELDS], "int64"), ([None, 1], "float32")
        return ([None, 1, 32, 32], "float32"), ([None], "int64")

    def loss(self, functional: Any, logits: Any, labels: Any) -> Any:
        """With ``paddle.nn.functional`` or ``torch.nn.functional``."""
        if self.name == CLICKS:
            return functional.binary_cross_entropy_with_logits(logits, labels)
        if self.name == BYTES:
            return functional.cross_entropy(logits.reshape([-1, VOCABULARY]), labels.reshape([-1]))
        return functional.cross_entropy(logits, labels)


# The wire takes two to four times the computing, for `bytes` at 100 Mb/s, for `clicks` at 1 Gb/s; for ResNet-18 at
# 1 Gb/s both are of one size. Sizes, rates and targets were chosen with one process that computes the joint batch, or
# each rank's own, before any strategy was measured: ranks that send nothing are not to reach a target, however long.
TASKS = {
    BYTES: Task(BYTES, 1e-3, 48, 400, 16, 25, "256kb", targets=(3.65, 3.55, 3.45)),
    CLICKS: Task(CLICKS, 1e-2, 512, 600, 16, 30, "256kb", targets=(0.76, 0.78, 0.79)),
    RESNET18: Task(RESNET18, 0.03, 32, 90, 8, 90, "4mb", momentum=0.9),
}


class Batches:
    """The batches of one rank, which has its own part of the training data, determined by the seed."""

    def __init__(self, task: Task, rank: int, world_size: int) -> None:
        if task.global_batch_size % world_size:
            raise ValueError(f"global_batch_size={task.global_batch_size} is not a multiple of {world_size} ranks")
        self._task, self._rank, self._world_size = task, rank, world_size

    def at(self, step: int) -> tuple[Inputs, Inputs]:
        """This rank's inputs and labels of a step, as the task's ``specs``."""
        size = self._task.global_batch_size // self._world_size
        if self._task.name == RESNET18:
            return self._images(step, size)
        # Who goes on sees the same clicks again.
        place = step % _STEPS_OF_CLICKS if self._task.name == CLICKS else step
        random = np.random.default_rng((self._task.seed, self._rank, place))
        if self._task.name == CLICKS:
            ids, clicks, _ = _clicks(random, size)
            return ids, clicks
        part = np.array_split(sources()[0], self._world_size)[self._rank]
        return _windows(part, random.integers(0, len(part) - CONTEXT, size))

    def _images(self, step: int, size: int) -> tuple[Inputs, Inputs]:
        train = cast(ArrayDataset, digits().train)
        epoch, batch = divmod(step, len(train.labels) // self._task.global_batch_size)
        order = np.random.default_rng((self._task.seed, epoch)).permutation(len(train.labels))
        first = batch * self._task.global_batch_size + self._rank * size
        chosen = order[first : first + size]
        images = train.features.reshape(-1, 1, 8, 8)[chosen].astype(np.float32)
        return images.repeat(4, axis=2).repeat(4, axis=3), train.labels[chosen]


def _windows(text: Inputs, starts: Inputs) -> tuple[Inputs, Inputs]:
    windows = text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


@functools.cache
def sources() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Bytes for training and for validation: the beginnings of sources of this Python's standard library, in an order
    by the checksum of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    order = sorted((zlib.crc32(name.as_posix().encode()), name) for name in names if not _NOT_SOURCES & {*name.parts})
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for checksum, name in order:
        with (root / name).open("rb") as file:
            parts[checksum % 16 == 0].append(file.read(_OF_A_FILE))
    training, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return training[:_TRAINING_BYTES], validation


@functools.cache
def _truth() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What makes people click: a weight and four factors of every id; how often ids are, and which id is how often."""
    random = np.random.default_rng(_TRUTH_SEED)
    weights = 0.2 * random.standard_normal((FIELDS, FIELD_IDS))
    factors = 0.6 * random.standard_normal((FIELDS, FIELD_IDS, 4))
    shares = np.arange(1, FIELD_IDS + 1) ** -_ZIPF
    ranks = np.stack([random.permutation(FIELD_IDS) for _ in range(FIELDS)])
    return weights, factors, np.cumsum(shares / shares.sum()), ranks


def _clicks(random: np.random.Generator, size: int) -> tuple[Inputs, Inputs, Inputs]:
    """Ids [size, FIELDS], clicks [size, 1], and their true log odds [size]."""
    weights, factors, cumulative, ranks = _truth()
    drawn = np.minimum(np.searchsorted(cumulative, random.random((size, FIELDS))), FIELD_IDS - 1)
    fields = np.arange(FIELDS)
    own = ranks[fields, drawn]
    vectors = factors[fields, own]
    pairs = 0.5 * ((vectors.sum(axis=1) ** 2).sum(axis=-1) - (vectors**2).sum(axis=(1, 2)))
    odds = weights[fields, own].sum(axis=1) + pairs - 1
    clicked = random.random(size) < 1 / (1 + np.exp(-odds))
    return own + fields * FIELD_IDS, clicked.astype(np.float32)[:, None], odds


def held_out(task: Task) -> tuple[Inputs, Inputs]:
    """Inputs and labels that nobody trains on."""
    if task.name == CLICKS:
        ids, clicks, _ = _clicks(np.random.default_rng(_TEST_SEED), _TEST_CLICKS)
        return ids, clicks
    text = sources()[1]
    starts = np.linspace(0, len(text) - CONTEXT - 1, _VALIDATION_WINDOWS).astype(np.int64)
    return _windows(text, starts)


def digest(task: Task) -> str:
    """Of the data: equal where a task is the same on two machines."""
    arrays = [*Batches(task, 0, 2).at(0), *([] if task.score is None else held_out(task))]
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)).hexdigest()[:16]


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """The area under the ROC curve: how often a click has a higher score than none; equal ones count by their place."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    clicked = labels > 0
    positives = int(clicked.sum())
    above = ranks[clicked].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(scores) - positives)))


def bits_per_byte(logits: NDArray[Any], labels: NDArray[Any]) -> float:
    """The mean cross entropy to the base 2 of logits [..., 256] and labels of as many bytes."""
    logits = logits.astype(np.float64).reshape(-1, VOCABULARY)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), labels.reshape(-1)]
    return float((np.log(np.exp(logits).sum(axis=1)) - chosen).mean() / math.log(2))


class Judge:
    """Judges parameters by one program for every contestant: Paddle's, eager."""

    def __init__(self, task: Task) -> None:
        import paddle

        from tools.benchmarks.networks import PaddleKit, build

        paddle.disable_static()
        self._paddle, self._task = paddle, task
        self._network = build(task, PaddleKit(task.seed))
        self._network.eval()
        self._inputs, self._labels = held_out(task)

    def __call__(self, weights: Sequence[NDArray[Any]]) -> float:
        for parameter, value in zip(self._network.parameters(), weights, strict=True):
            parameter.set_value(np.asarray(value, np.float32))
        with self._paddle.no_grad():
            logits = self._network(self._paddle.to_tensor(self._inputs)).numpy()
        if self._task.name == CLICKS:
            return auc(logits[:, 0], self._labels[:, 0])
        return bits_per_byte(logits, self._labels)
