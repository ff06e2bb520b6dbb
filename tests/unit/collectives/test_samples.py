"""What ranks are fed: the same samples are noticed in any order, and nobody who reads samples of his own is accused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.engine import HostDevice
from fleet_train.collectives.samples import SamplesCheck, numbers_of

Feed = dict[str, Any]
SAMPLES, BATCH = 400, 16
DATA = np.random.default_rng(1).standard_normal((SAMPLES, 3, 8)).astype("float32")
LABELS = np.arange(SAMPLES).reshape(-1, 1) % 7


def noticed(feeds: Callable[[int, int], Iterator[Feed]], ranks: int = 2, runs: int = 600) -> int | None:
    """Before which run (1, 2, ...) all ranks are said to be fed the same samples; ``feeds(rank, ranks)``."""
    told: dict[str, Any] = {}

    def check_of(rank: int) -> SamplesCheck:
        store = SimpleNamespace(set=told.__setitem__, get=told.get)
        engine = SimpleNamespace(device=HostDevice())
        cluster = SimpleNamespace(rank=rank)
        job: Any = SimpleNamespace(engine=engine, cluster=cluster, store=store, count=lambda _: 0)
        return SamplesCheck(job, 0, 1)

    checks = [check_of(rank) for rank in range(ranks)]
    read = [feeds(rank, ranks) for rank in range(ranks)]
    for run in range(1, runs + 1):
        for check, own in zip(checks, read, strict=True):
            check.fed(next(own))
        if {check.digest(run) for check in checks} == {1}:
            assert "were fed the same samples" in checks[0].found()
            return run
    return None


def batched(indices: Iterator[int], size: int = BATCH, noise: Any = None) -> Iterator[Feed]:
    while chosen := list(islice(indices, size)):
        values = DATA[chosen] if noise is None else DATA[chosen] + noise.standard_normal((size, 1, 8), "float32")
        yield {"x": values, "y": LABELS[chosen]}


def epochs(order: Callable[[int], Any]) -> Iterator[int]:
    return chain.from_iterable(order(epoch) for epoch in count())


def random_of(*seed: int) -> Any:
    return np.random.default_rng(list(seed))


def whole_in_order(_rank: int, _ranks: int) -> Iterator[Feed]:
    return batched(epochs(lambda _: range(SAMPLES)))


def whole_shuffled(rank: int, _ranks: int) -> Iterator[Feed]:
    return batched(epochs(lambda epoch: random_of(epoch, rank).permutation(SAMPLES)))


def whole_as_tensors(rank: int, ranks: int) -> Iterator[Feed]:
    for feed in whole_shuffled(rank, ranks):
        tensors = {name: paddle.base.core.DenseTensor() for name in feed}
        for name, value in feed.items():
            tensors[name].set(value, paddle.CPUPlace())
        yield [tensors]  # type: ignore[misc]


def whole_with_constants(rank: int, ranks: int) -> Iterator[Feed]:
    for step, feed in enumerate(whole_shuffled(rank, ranks)):
        yield feed | {"rate": np.full(1, 0.1 / (step + 1), "float32"), "mask": np.tril(np.ones((4, 4), "float32"))}


def other_batch_sizes(rank: int, _ranks: int) -> Iterator[Feed]:
    return batched(epochs(lambda epoch: random_of(epoch, rank).permutation(SAMPLES)), BATCH + rank)


def sampler(rank: int, ranks: int) -> Iterator[Feed]:
    """A DistributedBatchSampler whose epochs are shuffled."""
    return batched(epochs(lambda epoch: random_of(epoch).permutation(SAMPLES)[rank::ranks]))


def sampler_that_fills_up(rank: int, ranks: int) -> Iterator[Feed]:
    def order(epoch: int) -> Any:
        indices = random_of(epoch).permutation(SAMPLES - 5)
        return np.concatenate([indices, indices[: -len(indices) % ranks]])[rank::ranks]

    return batched(epochs(order), 7)


def shards(rank: int, ranks: int) -> Iterator[Feed]:
    part = SAMPLES // ranks
    return batched(epochs(lambda epoch: rank * part + random_of(epoch, rank).permutation(part)))


def random_numbers(rank: int, _ranks: int) -> Iterator[Feed]:
    random = random_of(rank)
    while True:
        yield {"x": random.standard_normal((BATCH, 5), "float32")}


def draws_with_replacement(rank: int, _ranks: int) -> Iterator[Feed]:
    random = random_of(rank, 3)
    return batched(int(each) for _ in count() for each in random.integers(0, SAMPLES, 64))


def few_kinds(kinds: int) -> Callable[[int, int], Iterator[Feed]]:
    def feeds(rank: int, _ranks: int) -> Iterator[Feed]:
        random = random_of(rank, 9)
        while True:
            yield {"ids": random.integers(0, kinds, (BATCH, 1))}

    return feeds


def constants(_rank: int, _ranks: int) -> Iterator[Feed]:
    for step in count():
        yield {"rate": np.full(1, 0.1 / (step + 1), "float32"), "noise": np.ones((64, 4), "float32")}


def places(_rank: int, _ranks: int) -> Iterator[Feed]:
    while True:
        yield {"positions": np.arange(128), "mask": np.tril(np.ones((128, 128), "float32"))}


def crops(rank: int, ranks: int) -> Iterator[Feed]:
    noise = random_of(rank, 4)
    return batched(epochs(lambda epoch: random_of(epoch).permutation(SAMPLES)[rank::ranks]), BATCH, noise)


def with_noise_that_all_share(rank: int, ranks: int) -> Iterator[Feed]:
    """Drawn anew in each step with one seed, and larger than a batch."""
    for step, feed in enumerate(batched(epochs(lambda epoch: random_of(epoch).permutation(SAMPLES)[rank::ranks]), 4)):
        yield feed | {"noise": random_of(step).standard_normal((64, 32), "float32")}


def whole_with_noise(rank: int, ranks: int) -> Iterator[Feed]:
    for step, feed in enumerate(whole_in_order(rank, ranks)):
        yield feed | {"noise": random_of(step).standard_normal((64, 32), "float32")}


def nothing(_rank: int, _ranks: int) -> Iterator[Any]:
    yield None
    yield {}
    yield {"x": np.zeros((0, 4), "float32")}
    yield {"x": np.array([["a"]], object)}
    yield {"x": np.float32(1.0)}
    while True:
        yield []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "feeds",
    [whole_in_order, whole_shuffled, whole_as_tensors, whole_with_constants, whole_with_noise, other_batch_sizes],
)
def test_the_same_samples_are_noticed_in_the_first_epoch(feeds: Any, ranks: int) -> None:
    run = noticed(feeds, ranks)
    assert run is not None
    assert run <= 1.1 * SAMPLES / BATCH + 1


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "feeds",
    [
        sampler,
        sampler_that_fills_up,
        shards,
        random_numbers,
        draws_with_replacement,
        few_kinds(2),
        few_kinds(40),
        few_kinds(150),
        few_kinds(1000),
        constants,
        places,
        crops,
        with_noise_that_all_share,
        nothing,
    ],
)
def test_samples_of_ones_own_are_no_accusation(feeds: Any, ranks: int) -> None:
    assert noticed(feeds, ranks) is None


def test_a_sample_has_one_number_whatever_its_batch_and_place() -> None:
    feed = {"x": DATA[:40].astype("float16"), "y": LABELS[:40] > 3, "z": np.arange(40, dtype="float64")}
    numbers = numbers_of(feed)[""]
    order = random_of(2).permutation(40)[:13]
    again = numbers_of({name: value[order] for name, value in feed.items()} | {"rate": np.zeros(1)})[""]
    assert len(set(numbers.tolist())) == 40
    assert np.array_equal(numbers[order], again)
