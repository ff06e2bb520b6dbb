"""Datasets by name. A dataset turns sample indices into arrays; the sampler assigns indices to ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_train.errors import DataError

Indices = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


class Dataset(Protocol):
    """The interface for loaders and models. An image folder only implements `arrays` differently, by decoding.

    It may also have `fingerprint() -> str`, equal for equal data on every machine, and `class_names`, in the order of
    the labels: a resume compares them with those of the checkpoint.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample without the batch dimension, channels first: (1, 8, 8)."""

    @property
    def num_classes(self) -> int: ...

    def arrays(self, indices: Indices) -> Arrays:
        """Samples in the order of `indices`: `features` float32 [batch, *sample_shape] and `labels` int64 [batch]."""


@dataclass(frozen=True)
class DataIdentity:
    """What a checkpoint remembers of the data that a rank reads, so that a resume notices other data."""

    samples: int
    digest: str = ""
    """A digest of names and labels, or of contents: equal for equal data on every machine. "" = unknown."""
    classes: tuple[str, ...] = ()
    """The classes' names in the order of the labels. () = unknown."""


def identity_of(dataset: Any) -> DataIdentity | None:
    """The identity of anything with `num_samples`, else None; the rest only if the dataset has it (see `Dataset`)."""
    samples, fingerprint = getattr(dataset, "num_samples", None), getattr(dataset, "fingerprint", None)
    if samples is None:
        return None
    names = getattr(dataset, "class_names", None) or ()
    return DataIdentity(int(samples), "" if fingerprint is None else str(fingerprint()), tuple(map(str, names)))


_VALUES_HASHED = 1024


@dataclass(frozen=True)
class ArrayDataset:
    """A dataset that fits into memory."""

    name: str
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    num_classes: int

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels):
            raise DataError(
                f"{self.name}: {len(self.features)} samples but {len(self.labels)} labels; every sample needs one label"
            )
        # Static programs check dtypes exactly: float64 features would fail at the first step, far from the cause.
        if self.features.dtype != np.float32 or self.labels.dtype != np.int64:
            raise DataError(
                f"{self.name}: features are {self.features.dtype} and labels {self.labels.dtype}; "
                "pass float32 and int64 (array.astype)"
            )
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.num_classes:
            raise DataError(
                f"{self.name}: labels run from {self.labels.min()} to {self.labels.max()}; "
                f"num_classes={self.num_classes} allows 0 to {self.num_classes - 1}"
            )

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.features.shape[1:])

    def arrays(self, indices: Indices) -> Arrays:
        return {"features": self.features[indices], "labels": self.labels[indices]}

    def fingerprint(self) -> str:
        """A digest of the shape, all labels, and at most 1024 features, evenly spaced and coarsely rounded: generated
        or normalised ones may differ in their last bits between machines."""
        digest = hashlib.sha256(f"{self.features.shape} {self.num_classes}".encode())
        digest.update(self.labels.tobytes())
        step = -(-self.features.size // _VALUES_HASHED) or 1
        some = np.nan_to_num(self.features.reshape(-1)[::step].astype(np.float64))
        # Limits lie away from usual values: powers of two, fractions of 16 or 255, zero.
        largest = np.frexp(1.37 * np.abs(some).max(initial=0.0))[1]
        digest.update(np.floor(np.ldexp(some, 4 - largest) + 0.3).astype(np.int8).tobytes())
        return digest.hexdigest()[:16]


class Splits(NamedTuple):
    """Training samples and held-out samples."""

    train: Dataset
    test: Dataset


def digits(test_share: float = 0.2) -> Splits:
    """scikit-learn's 1797 handwritten digits: [1, 8, 8] in 0..1, ten classes, one fixed stratified split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"--data digits needs scikit-learn, which cannot be imported ({error}); "
            "run: python -m pip install scikit-learn, or use --data synthetic"
        ) from error
    raw = load_digits()
    features = (np.asarray(raw.images, dtype=np.float32) / np.float32(16.0))[:, None, :, :]
    labels = np.asarray(raw.target, dtype=np.int64)
    train, test = _stratified_split(labels, test_share)
    return Splits(
        ArrayDataset("digits/train", features[train], labels[train], num_classes=10),
        ArrayDataset("digits/test", features[test], labels[test], num_classes=10),
    )


def synthetic(
    num_samples: int = 2048, sample_shape: tuple[int, ...] = (1, 8, 8), num_classes: int = 10, seed: int = 0
) -> Splits:
    """Deterministic data for measuring and tests: a random prototype per class plus noise, so that it can be learnt."""
    generator = np.random.default_rng(seed)
    prototypes = generator.standard_normal((num_classes, *sample_shape), dtype=np.float32)

    def part(name: str, count: int) -> ArrayDataset:
        labels = generator.integers(0, num_classes, count, dtype=np.int64)
        noise = generator.standard_normal((count, *sample_shape), dtype=np.float32)
        return ArrayDataset(f"synthetic/{name}", prototypes[labels] + noise, labels, num_classes)

    return Splits(part("train", num_samples), part("test", max(1, num_samples // 4)))


@dataclass(frozen=True)
class SyntheticImages:
    """Noise of any shape and number, for measuring: samples use a few images in memory in turn."""

    name: str
    num_samples: int
    sample_shape: tuple[int, ...]
    num_classes: int
    pool: NDArray[np.float32]

    def arrays(self, indices: Indices) -> Arrays:
        return {"features": self.pool[indices % len(self.pool)], "labels": indices * 7919 % self.num_classes}

    def fingerprint(self) -> str:
        """A digest of the data, whose name says everything."""
        return self.name


_SHAPED = "synthetic:"
_POOL_SIZE = 32


def shaped_synthetic(name: str) -> Splits:
    """`synthetic:<channels>x<height>x<width>x<classes>[x<samples>]`; 10240 training samples by default."""
    parts = name.removeprefix(_SHAPED).split("x")
    if len(parts) not in (4, 5) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise DataError(
            f"--data {name}: give {_SHAPED}<channels>x<height>x<width>x<classes>[x<samples>], such as "
            f"{_SHAPED}3x224x224x1000"
        )
    channels, height, width, classes, samples = (*map(int, parts), 10240)[:5]
    shape = (channels, height, width)
    pool = np.random.default_rng(0).standard_normal((_POOL_SIZE, *shape), dtype=np.float32)
    return Splits(
        SyntheticImages(f"{name}/train", samples, shape, classes, pool),
        SyntheticImages(f"{name}/test", max(1, samples // 10), shape, classes, pool),
    )


DATASETS: dict[str, Callable[[], Splits]] = {"digits": digits, "synthetic": synthetic}


def load_splits(name: str) -> Splits:
    """The named dataset's training and test part, `synthetic:3x224x224x1000` among them; DataError otherwise."""
    if name.startswith(_SHAPED):
        return shaped_synthetic(name)
    if name not in DATASETS:
        known = [*sorted(DATASETS), f"{_SHAPED}<channels>x<height>x<width>x<classes>"]
        raise DataError(f"unknown data {name!r}; known: {', '.join(known)}")
    return DATASETS[name]()


def _stratified_split(labels: Indices, test_share: float) -> tuple[Indices, Indices]:
    """Sorted train and test indices; the same share of each class goes to the test part.

    It does not use scikit-learn's splitter: the split must stay the same when scikit-learn is updated.
    """
    generator = np.random.default_rng(0)
    test: list[Indices] = []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(len(members) * test_share)])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels), dtype=np.int64), chosen), chosen


# Random numbers per sample: functions of (seed, epoch, dataset index) only.
#
# A sample's augmentation does not depend on the rank that reads it, the worker process that decodes it, the step, or
# a resume. Plain integer hashing, so it is also the same with another version of numpy.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)


@dataclass(frozen=True)
class Draws:
    """The random numbers of some samples in one epoch."""

    seed: int
    epoch: int
    indices: NDArray[np.int64]
    """Dataset indices, [batch]."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """`count` numbers in [0, 1) per sample: [batch, count]. Asking twice gives the same numbers."""
        with np.errstate(over="ignore"):
            run = _mix(_mix(np.array([self.seed], dtype=np.uint64)) + np.uint64(self.epoch))
            samples = _mix(run + self.indices.astype(np.uint64) * _GOLDEN)
            counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
            bits = _mix(samples[:, None] + counters[None, :])
        numbers: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return numbers


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of splitmix64 (Steele, Lea, Flood 2014): every input bit changes half of the output's."""
    state: NDArray[np.uint64] = words + _GOLDEN
    for shift, factor in _ROUNDS:
        state = (state ^ (state >> shift)) * factor
    return state
