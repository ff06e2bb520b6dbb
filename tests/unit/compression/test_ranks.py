"""Compressions on ranks played in turn against references, Gloo's sums in 16 bits, and long training on 4 ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from sklearn.datasets import load_digits

from fleet_train.cluster import Cluster
from fleet_train.collectives.methods.dense import BucketMethod, FlatAllreduce
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.plan import Bucket, TensorSpec, build_plan
from fleet_train.plan.simulate import Local, Momentum, SimulatedJob
from fleet_train.plan.simulate_methods import DgcSimulation, PowerSgdSimulation, ring_sum_16_bit, to_bfloat16
from fleet_train.profile import Profile
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


def test_dgc_says_that_nothing_follows_where_nothing_is_selected() -> None:
    _, sent = step(dgc(DgcSettings(min_elements=1000), True), gradients(0))
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


@HOST
@METHODS
def test_a_method_with_restored_state_continues_with_the_same_bits(make: Make, reads_values: bool) -> None:
    every = make(reads_values)
    for number in range(3):
        step(every, gradients(number))
    states = [one.state() for one in every]
    assert [state["step"].tolist() for state in states] == [[3]] * RANKS
    again = make(reads_values)
    step(again, gradients(9))
    for one, state in zip(again, states, strict=True):
        one.load_state(state)
    for number in range(3, 6):
        found, expected = step(again, gradients(number))[0], step(every, gradients(number))[0]
        for mine, theirs in zip(found, expected, strict=True):
            equal(mine, theirs)


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


ULP = 2.0**-7  # from 1 to the next bfloat16


def test_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, 1 + ULP / 2, 1 + ULP, 1 + 1.5 * ULP, 1 + 0.51 * ULP, -1 - ULP / 2], "float32")
    expected = np.array([1.0, 1.0, 1 + ULP, 1 + 2 * ULP, 1 + ULP, -1.0], "float32")
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_sum_of_three_depends_on_the_chunk() -> None:
    # Chunks of 2 elements: the first adds ranks 2, 1, 0; the second 0, 2, 1; the third 1, 0, 2.
    ranks = [np.full(6, 1.0, "float32"), np.full(6, ULP / 2, "float32"), np.full(6, ULP / 2, "float32")]
    np.testing.assert_array_equal(ring_sum_16_bit(ranks, to_bfloat16), [1 + ULP, 1 + ULP, 1.0, 1.0, 1.0, 1.0])


WORLD, SAMPLES_PER_RANK, EPOCHS, RATE = 4, 16, 40, 0.05
LAYERS = {"w0": (64, 64), "b0": (64,), "w1": (64, 10), "b1": (10,)}
GRADIENTS = [TensorSpec(name, shape, "float32") for name, shape in LAYERS.items()]
SEEDS = (0, 1)
ACCURACY_TOLERANCE = 0.005
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "powersgd rank 1": {"compression": "powersgd", "powersgd_min_compression": 1.0},
    "powersgd rank 4": {"compression": "powersgd", "powersgd_min_compression": 1.0, "powersgd_rank": 4},
    "dgc": {"compression": "dgc", "dgc_sparsity": 0.984375, "dgc_rampup_steps": 60, "dgc_min_elements": 100},
}
Values = Mapping[str, np.ndarray]


def backward(weights: Values, features: np.ndarray, labels: np.ndarray) -> Local:
    hidden = np.maximum(features @ weights["w0"] + weights["b0"], 0)
    scores = hidden @ weights["w1"] + weights["b1"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = (scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[labels]) / len(labels)
    inner = (error @ weights["w1"].T) * (hidden > 0)
    found = {"w0": features.T @ inner, "b0": inner.sum(axis=0), "w1": hidden.T @ error, "b1": error.sum(axis=0)}
    return Local({name: value.astype("float32") for name, value in found.items()})


def accuracy(settings: dict[str, Any], seed: int) -> float:
    random = np.random.default_rng(seed)
    digits: Any = load_digits()
    order = random.permutation(len(digits.target))
    features, labels = digits.data[order] / 16.0, digits.target[order]
    tested, trained = slice(0, 500), np.arange(500, len(labels))
    start = {
        name: (random.standard_normal(shape) * np.sqrt(2 / shape[0]) * (len(shape) > 1)).astype("float32")
        for name, shape in LAYERS.items()
    }
    profile = Profile(**settings)
    job = SimulatedJob(build_plan(GRADIENTS, Cluster.imagined(WORLD, 1), profile), profile, start, Momentum, RATE)
    joint = WORLD * SAMPLES_PER_RANK
    for _ in range(EPOCHS):
        random.shuffle(trained)
        for first in range(0, len(trained) - joint + 1, joint):
            batch = trained[first : first + joint].reshape(WORLD, SAMPLES_PER_RANK)
            job.step(lambda rank, weights, batch=batch: backward(weights, features[batch[rank]], labels[batch[rank]]))
    w = job.ranks[0]
    scores = np.maximum(features[tested] @ w["w0"] + w["b0"], 0) @ w["w1"] + w["b1"]
    return float((scores.argmax(axis=1) == labels[tested]).mean())


@pytest.fixture(scope="module")
def accuracy_of_whole_gradients() -> float:
    return float(np.mean([accuracy({}, seed) for seed in SEEDS]))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_reaches_the_accuracy_of_whole_gradients(name: str, accuracy_of_whole_gradients: float) -> None:
    reached = np.mean([accuracy(COMPRESSIONS[name], seed) for seed in SEEDS])
    assert accuracy_of_whole_gradients > 0.95
    assert reached > accuracy_of_whole_gradients - ACCURACY_TOLERANCE


def test_rounds_to_nearest_and_ties_to_even_as_paddle_does() -> None:
    values = np.array([1.0, 1 + ULP / 2, 1 + ULP, 1 + 1.5 * ULP, 1 + 0.51 * ULP, -1 - ULP / 2], "float32")
    expected = np.array([1.0, 1.0, 1 + ULP, 1 + 2 * ULP, 1 + ULP, -1.0], "float32")
    np.testing.assert_array_equal(to_bfloat16(values), expected)
    special = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4028235e38], "float32")
    np.testing.assert_array_equal(to_bfloat16(special), [0.0, -0.0, math.inf, -math.inf, math.nan, math.inf])
    random = np.random.default_rng(0).standard_normal(10_000).astype("float32")
    random *= np.float32(10.0) ** np.arange(-20, 20).repeat(250)
    theirs = paddle.to_tensor(random).cast("bfloat16").cast("float32").numpy()
    np.testing.assert_array_equal(to_bfloat16(random), theirs)
