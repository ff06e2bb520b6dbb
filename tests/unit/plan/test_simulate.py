"""The simulator on its own, on hand-computed numbers; tests/parallel compares it with real ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_train.cluster import Cluster
from fleet_train.errors import ConversionError
from fleet_train.plan import CommPlan, TensorSpec, build_plan
from fleet_train.plan.pricing import traffic
from fleet_train.plan.simulate import Adam, Local, Sgd, SimulatedJob
from fleet_train.plan.simulate_methods import QuantisedSum
from fleet_train.plan.trial import Trial, describe, try_out
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import QuantisedSettings

Values = Mapping[str, np.ndarray]
SHAPES = {"w": (2, 3), "b": (3,)}
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2}


def job_of(
    knobs: dict[str, Any], nodes: int = 2, ranks_per_node: int = 1, optimizer: Any = Sgd, rate: float = 0.5
) -> SimulatedJob:
    gradients = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]
    profile = Profile(**knobs)
    plan = build_plan(gradients, Cluster.imagined(nodes, ranks_per_node), profile)
    start = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return SimulatedJob(plan, profile, start, optimizer, rate)


def ones_times_rank(rank: int, values: Values) -> Local:
    """Rank r's gradient is r everywhere."""
    return Local({name: np.full(value.shape, rank, np.float32) for name, value in values.items()}, loss=float(rank))


def every_value(job: SimulatedJob) -> list[set[float]]:
    """The numbers that each rank holds."""
    return [{float(x) for value in values.values() for x in value.flat} for values in job.ranks]


WAYS: list[dict[str, Any]] = [{}, {"use_hierarchical_allreduce": True}, {"compression": "bf16"}, {"nccl_comm_num": 2}]


@pytest.mark.parametrize("knobs", WAYS)
def test_gradients_are_averaged_and_applied_and_exact_values_stay_exact(knobs: dict[str, Any]) -> None:
    job = job_of(knobs, nodes=2, ranks_per_node=2)
    done = job.step(ones_times_rank)
    assert (done.updated, done.synchronised, done.averaged) == (True, True, False)
    assert every_value(job) == [{-0.75}] * 4  # the mean of 0, 1, 2, 3, times the rate


def test_diloco_looks_ahead_and_slowmo_carries_on() -> None:
    outer = {"outer_lr": 1.0, "outer_momentum": 0.5}
    diloco = job_of(LOCAL | outer | {"outer_optimizer": "diloco"})
    slowmo = job_of(LOCAL | outer | {"outer_optimizer": "slowmo"})
    seen = []
    for _ in range(2):
        for job in (diloco, slowmo):
            job.step(ones_times_rank)
            job.step(ones_times_rank)
        seen.append((every_value(diloco)[0], every_value(slowmo)[0]))
    # The difference of each period is 0.5. DiLoCo: 0.5 + 0.5 * u with u = 0.5, then 0.75; SlowMo: u alone.
    assert seen == [({-0.75}, {-0.5}), ({-1.625}, {-1.25})]


def test_synchronising_takes_in_what_is_under_way() -> None:
    outer = {"outer_optimizer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.5}
    job = job_of(LOCAL | outer | {"local_sgd_steps": 4, "local_sgd_overlap_steps": 2})
    for _ in range(5):
        job.step(ones_times_rank)
    # The difference of the period is 1: DiLoCo steps to -1.5, half a unit from the mean; then one local step.
    assert every_value(job) == [{0.0}, {-2.5}]
    job.synchronise()
    assert every_value(job) == [{-1.75}] * 2
    assert job.step(ones_times_rank).sent == (0.0, 0.0)
    assert every_value(job) == [{-1.75}, {-2.25}]  # nothing is taken in twice


def with_statistic(knobs: dict[str, Any], rate: float = 0.1) -> SimulatedJob:
    gradient, statistic = TensorSpec("w", (2,), "float32"), TensorSpec("mean", (2,), "float32")
    plan = build_plan([gradient], Cluster.imagined(2, 1), Profile(**knobs), [gradient, statistic])
    return SimulatedJob(plan, Profile(**knobs), {name: np.zeros(2, np.float32) for name in ("w", "mean")}, rate=rate)


def test_synchronising_in_the_warm_up_averages_statistics_alone() -> None:
    job = with_statistic({}, rate=1.0)
    job.step(lambda rank, values: Local({"w": values["w"] + 1}, statistics={"mean": values["mean"] + rank}))
    job.synchronise()
    assert [(values["w"].tolist(), values["mean"].tolist()) for values in job.ranks] == [([-1, -1], [0.5, 0.5])] * 2


def test_an_adaptive_period_grows_as_the_ranks_mean_loss_does() -> None:
    knobs = {"local_sgd_schedule": "adaptive", "local_sgd_steps": 2, "local_sgd_max_steps": 16}
    job, loss = job_of(LOCAL | knobs), 1.0

    def backward(rank: int, values: Values) -> Local:
        return replace(ones_times_rank(rank, values), loss=2 * rank * loss)

    averaged = [job.step(backward).averaged for _ in range(2)]
    loss = 4.0  # the next period: sqrt(4) times 2 steps
    averaged += [job.step(backward).averaged for _ in range(8)]
    assert [number for number, is_average in enumerate(averaged, 1) if is_average] == [2, 4, 8]


def test_statistics_are_averaged_with_the_parameters() -> None:
    job, seen = with_statistic(LOCAL), []
    for _ in range(2):
        job.step(lambda rank, values: Local({"w": values["w"] * 0}, statistics={"mean": values["mean"] + 1 + rank}))
        seen.append([values["mean"].tolist() for values in job.ranks])
    assert seen == [[[1, 1], [2, 2]], [[3, 3], [3, 3]]]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"use_hierarchical_allreduce": True},
        {"use_hierarchical_allreduce": True, "compression": "bf16"},
        {"compression": "powersgd", "powersgd_min_compression": 0.0},
        LOCAL | {"local_sgd_dtype": "bfloat16", "use_hierarchical_allreduce": True},
    ],
)
def test_bytes_are_those_that_the_plan_predicts(knobs: dict[str, Any]) -> None:
    profile, cluster = Profile(**knobs), Cluster.imagined(2, 2)
    gradients = [TensorSpec("large", (200, 100), "float32"), TensorSpec("small", (7,), "float32")]
    plan = build_plan(gradients, cluster, profile)
    job = SimulatedJob(plan, profile, {g.name: np.zeros(g.shape, np.float32) for g in gradients})

    def backward(rank: int, values: Values) -> Local:
        random = np.random.default_rng(rank)
        return Local({name: random.standard_normal(v.shape).astype(np.float32) for name, v in values.items()})

    sent = np.sum([job.step(backward).sent for _ in range(4)], axis=0) / 4
    assert sent == pytest.approx(traffic(plan, cluster).sent)


def test_adams_first_step_is_that_of_the_paper() -> None:
    value = Adam(epsilon=0.5, decoupled_decay=0.1).step("w", np.float32([2.0]), np.float32([3.0]), 0.25)
    # Without bias, the first moments are the gradient and its square: decay, then 3 / (3 + 0.5).
    np.testing.assert_allclose(value, 2.0 * (1 - 0.25 * 0.1) - 0.25 * 3.0 / 3.5, rtol=1e-6)


@pytest.mark.parametrize(("ranks", "stochastic"), [(2, False), (5, True)])
def test_a_quantised_sum_sends_or_keeps_everything(ranks: int, stochastic: bool) -> None:
    settings = QuantisedSettings(8, 32, stochastic=stochastic)
    simulated, random = QuantisedSum("w", 500, ranks, 1, settings), np.random.default_rng(ranks)
    inputs, outputs = np.zeros(500), np.zeros(500)
    for _ in range(20):
        buffers = [random.standard_normal(500, np.float32) for _ in range(ranks)]
        inputs += np.sum(buffers, axis=0)
        outputs += simulated.sum(buffers)
    owed = np.sum(simulated.residuals, axis=0)[:500]
    assert 0 < np.abs(owed).max() < ranks * 0.2
    np.testing.assert_allclose(outputs + owed, inputs, atol=1e-4)


def trial_of(updates: int = 0, **knobs: Any) -> tuple[Trial, CommPlan]:
    profile, cluster = Profile(**knobs), Cluster.imagined(2, 2)
    plan = build_plan([TensorSpec("w", (200, 100), "float32"), TensorSpec("b", (100,), "float32")], cluster, profile)
    return try_out(plan, profile, updates), plan


def test_a_trial_of_exact_averages_finds_rounding_only() -> None:
    for knobs in ({}, {"use_hierarchical_allreduce": True}, {"accumulate_steps": 2}):
        trial, plan = trial_of(**knobs)
        assert trial.holds
        assert trial.synchronised == trial.equal == tuple(range(1, 9))
        assert trial.gradient_deviation is not None
        assert trial.gradient_deviation < 1e-6
        assert trial.movement_deviation < 1e-6
        assert trial.sent_bytes_per_step == pytest.approx(traffic(plan, Cluster.imagined(2, 2)).sent)


def test_a_trial_of_local_sgd_sees_two_periods_and_the_drift_between() -> None:
    trial, _ = trial_of(use_local_sgd=True, local_sgd_steps=3)
    assert trial.shortened == {"local_sgd_is_warm_steps": 2}
    assert trial.synchronised == trial.equal == (1, 2, 5, 8)
    assert trial.drift > 0.1
    assert trial.movement_deviation < 1e-6
    assert "bit-equal after updates 1, 2, 5, 8" in describe(trial)
    broken = replace(trial, equal=(1, 2))
    assert not broken.holds
    assert "NOT equal after updates 5, 8" in describe(broken)
    given, _ = trial_of(3, use_local_sgd=True, local_sgd_steps=3)
    assert (given.updates, given.shortened, given.synchronised) == (3, {}, (1, 2, 3))


@pytest.mark.parametrize(
    ("knobs", "low", "high"),
    [
        ({"compression": "bf16"}, 1e-4, 1e-2),
        ({"compression": "powersgd"}, 0.1, 1.0),
        ({"compression": "powersgd", "powersgd_rank": 100, "powersgd_min_compression": 0.0}, -1.0, 1e-6),
    ],
)
def test_a_trial_shows_what_compression_loses(knobs: dict[str, Any], low: float, high: float) -> None:
    assert low < trial_of(**knobs)[0].movement_deviation < high


def test_a_trial_with_an_overlap_keeps_the_mean_and_says_that_ranks_do_not_wait() -> None:
    trial, _ = trial_of(use_local_sgd=True, local_sgd_steps=4, local_sgd_overlap_steps=1)
    assert (trial.synchronised, trial.equal, trial.averaged) == ((1, 2), (1, 2), (6, 10))
    assert trial.movement_deviation < 1e-6
    assert "averaged beside the next steps after 6, 10" in describe(trial)


def test_a_trial_counts_an_averaging_under_way_as_movement() -> None:
    outer = {"outer_optimizer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}
    knobs = {"use_local_sgd": True, "local_sgd_steps": 4, "local_sgd_dtype": "int8"} | outer
    beside, at_once = (trial_of(local_sgd_overlap_steps=steps, **knobs)[0].movement_deviation for steps in (1, 0))
    assert beside == pytest.approx(at_once, rel=0.2)


def test_what_cannot_be_simulated_is_refused() -> None:
    plan = build_plan([TensorSpec("w", (2,), "float32")], Cluster.imagined(2, 1), Profile())
    with pytest.raises(ConversionError, match="no start value for 'w'"):
        SimulatedJob(plan, Profile(), {})
    large = build_plan([TensorSpec("w", (10**6,), "float32")], Cluster.imagined(64, 8), Profile())
    with pytest.raises(ConversionError, match="simulate up to 200 ranks"):
        try_out(large, Profile())
