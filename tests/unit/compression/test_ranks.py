"""DGC and PowerSGD on ranks played in turn, against their references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.methods.dense import BucketMethod, FlatAllreduce
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.plan import Bucket, TensorSpec
from fleet_train.plan.simulate_methods import DgcSimulation, PowerSgdSimulation
from fleet_train.profile.methods.dgc import DgcSettings
from fleet_train.profile.methods.powersgd import PowerSgdSettings
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


def dgc(settings: DgcSettings, reads_values: bool) -> list[DgcMethod]:
    allreduce = FlatAllreduce(GROUP)
    return [DgcMethod(BUCKET, GROUP, allreduce, RANKS, settings, reads_values) for _ in range(RANKS)]


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


RAMP = {"rampup_begin_step": 2, "rampup_step": 2, "sparsity": (0.5, 0.9), "min_elements": 20, "momentum": 0.7}
DGC = {
    "ramp": DgcSettings(**RAMP),  # type: ignore[arg-type]
    "nesterov": DgcSettings(**RAMP, use_nesterov=True),  # type: ignore[arg-type]
    "clipped": DgcSettings(**RAMP, local_grad_clip_norm=5.0),  # type: ignore[arg-type]
    "unmasked": DgcSettings(**RAMP, momentum_factor_masking=False),  # type: ignore[arg-type]
    "everything": DgcSettings(sparsity=(0.8,), min_elements=0),
}
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
@pytest.mark.parametrize("settings", DGC.values(), ids=DGC)
def test_dgc_gives_the_updates_of_its_reference(settings: DgcSettings, reads_values: bool) -> None:
    every, reference = dgc(settings, reads_values), DgcSimulation(BUCKET, RANKS, settings)
    for number in range(6):
        local = gradients(number)
        found, _ = step(every, local)
        for updates in found:
            assert [update.shape for update in updates] == list(SHAPES)
            equal(updates, found[0])
        close(found[0], reference.step(local))


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


def test_dgc_sends_the_small_ones_first_and_then_values_with_their_places() -> None:
    every = dgc(DgcSettings(sparsity=(0.9,), min_elements=20, rampup_begin_step=1), True)
    _, sent = step(every, gradients(0))
    assert [(one.kind, one.elements, one.more) for one in sent] == [("all_reduce", 164, False)]
    _, sent = step(every, gradients(1))
    assert [(one.kind, one.dtype, one.elements, one.more) for one in sent] == [
        ("all_reduce", "float32", 5, True),
        ("all_gather", "int32", 2 * (4 + 6 + 4), False),
    ]
    _, sent = step(dgc(DgcSettings(min_elements=1000), True), gradients(0))  # nothing is selected, so nothing follows
    assert [(one.elements, one.more) for one in sent] == [(164, False)]


def test_powersgd_sends_left_factors_with_the_whole_ones_and_then_right_factors() -> None:
    _, sent = step(powersgd(POWER["rank 1"], True), gradients(0))
    assert [(one.elements, one.more) for one in sent] == [(8 + 9 + 6 + 5, True), (6 + 7 + 8, False)]


Make = Callable[[bool], list[Any]]
MAKERS: dict[str, Make] = {
    "dgc": lambda reads_values: dgc(DGC["ramp"], reads_values),
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


@HOST
def test_overflow_of_what_goes_whole_leaves_the_velocity_of_before(reads_values: bool) -> None:
    every = dgc(DgcSettings(momentum=0.7, rampup_begin_step=10), reads_values)
    ones = [[np.ones(shape, "float32") for shape in SHAPES] for _ in range(RANKS)]
    spoiled = [[one.copy() for one in mine] for mine in ones]
    spoiled[2][1][0] = math.nan
    assert not np.isfinite(step(every, spoiled)[0][0][1]).all()
    np.testing.assert_array_equal(step(every, ones)[0][0][1], 1.0)
    np.testing.assert_array_equal(np.isnan(step(every, spoiled)[0][0][1]), [True, False, False, False, False])
    np.testing.assert_allclose(step(every, ones)[0][0][1], 1.7, rtol=1e-6)
    assert {round(one.state()["w1.velocity"].max().item(), 5) for one in every} == {1.7}
