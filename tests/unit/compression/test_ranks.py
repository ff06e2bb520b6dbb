"""PowerSGD on ranks played in turn, against its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.methods.dense import BucketMethod, FlatAllreduce
from fleet_train.compression.powersgd.description import PowerSgdSettings
from fleet_train.compression.powersgd.ranks import PowerSgdMethod
from fleet_train.compression.powersgd.reference import PowerSgdSimulation
from fleet_train.plan import Bucket, TensorSpec
from tests.unit.collectives.played import CollectiveSpec, Group, in_turn

RANKS = 3
SHAPES = ((8, 6), (5,), (9, 7), (6, 8))
BUCKET = Bucket(0, tuple(TensorSpec(f"w{i}", shape, "float32") for i, shape in enumerate(SHAPES)), 0)
GROUP = Group(0, range(RANKS))
HOST = pytest.mark.parametrize("reads_values", [True, False], ids=["host", "device"])
Brought = list[list[np.ndarray]]


def gradients(seed: int) -> Brought:
    random = np.random.default_rng(seed)
    return [[random.standard_normal(shape).astype("float32") for shape in SHAPES] for _ in range(RANKS)]


def powersgd(settings: PowerSgdSettings, reads_values: bool) -> list[PowerSgdMethod]:
    return [PowerSgdMethod(BUCKET, FlatAllreduce(GROUP), RANKS, settings, reads_values) for _ in range(RANKS)]


def step(every: Sequence[BucketMethod], local: Brought) -> tuple[list[list[np.ndarray]], list[CollectiveSpec]]:
    tensors = [[paddle.to_tensor(one) for one in mine] for mine in local]
    found, sent = in_turn([one.average(mine) for one, mine in zip(every, tensors, strict=True)])
    for mine, before in zip(tensors, local, strict=True):
        for tensor, one in zip(mine, before, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), one)
    return [[np.array(update.numpy()) for update in updates] for updates in found], sent


def equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_array_equal(found, expected)


def close(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(found, np.asarray(expected).reshape(found.shape), rtol=2e-4, atol=2e-5)


POWER = {
    "rank 1": PowerSgdSettings(min_compression=0.0),
    "rank 2": PowerSgdSettings(rank=2, min_compression=0.0),
    "started later": PowerSgdSettings(min_compression=0.0, start_step=2),
    "cold": PowerSgdSettings(min_compression=0.0, warm_start=False),
    "forgetful": PowerSgdSettings(min_compression=0.0, error_feedback=False),
    "some": PowerSgdSettings(min_compression=3.6),
    "none": PowerSgdSettings(min_compression=100.0),
}


@HOST
@pytest.mark.parametrize("settings", POWER.values(), ids=POWER)
def test_powersgd_gives_the_averages_of_its_reference(settings: PowerSgdSettings, reads_values: bool) -> None:
    every, reference = powersgd(settings, reads_values), PowerSgdSimulation(BUCKET, RANKS, settings)
    for number in range(4):
        local = gradients(number)
        found, _ = step(every, local)
        for averages in found:
            assert [average.shape for average in averages] == list(SHAPES)
            equal(averages, found[0])
        close(found[0], reference.step(local))


def test_powersgd_sends_left_factors_with_the_whole_ones_and_then_right_factors() -> None:
    _, sent = step(powersgd(POWER["rank 1"], True), gradients(0))
    assert [(one.elements, one.more) for one in sent] == [(8 + 9 + 6 + 5, True), (6 + 7 + 8, False)]


Make = Callable[[bool], list[Any]]
MAKERS: dict[str, Make] = {
    "powersgd": lambda reads_values: powersgd(POWER["rank 2"], reads_values),
    "powersgd, started later": lambda reads_values: powersgd(POWER["started later"], reads_values),
}
METHODS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@METHODS
def test_state_without_anything_begins_again(make: Make) -> None:
    every, new = make(True), make(True)
    for number in range(3):
        step(every, gradients(number))
    for one in every:
        one.load_state({})
    assert [sorted(one.state()) for one in every] == [["step"]] * RANKS
    for number in range(4):
        equal(step(every, gradients(number))[0][0], step(new, gradients(number))[0][0])


def test_factors_of_another_rank_are_dropped_and_errors_kept() -> None:
    every, other = powersgd(POWER["rank 1"], True), powersgd(POWER["rank 2"], True)
    step(every, gradients(0))
    other[0].load_state(every[0].state())
    state = other[0].state()
    assert sorted(state) == ["step", "w0.error", "w2.error", "w3.error"]
    np.testing.assert_array_equal(state["w2.error"].numpy(), every[0].state()["w2.error"].numpy())


@HOST
@METHODS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_overflow_on_one_rank_reaches_all_and_stays_with_none(make: Make, bad: float, reads_values: bool) -> None:
    every = make(reads_values)
    for number in range(4):
        step(every, gradients(number))
    spoiled = gradients(4)
    spoiled[1][2][3, 4] = bad
    for updates in step(every, spoiled)[0]:
        assert not np.isfinite(updates[2]).all()
        assert np.isfinite(updates[1]).all()
    for number in range(5, 9):
        for updates in step(every, gradients(number))[0]:
            assert all(np.isfinite(update).all() for update in updates)
