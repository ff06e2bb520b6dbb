"""NaN and infinity: what is skipped, what stays, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train import DistributedStrategy, fleet
from fleet_train.convert import saving
from fleet_train.errors import CheckpointError, NotFinite, ProfileError
from fleet_train.profile import Profile
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from fleet_train.train.numerics import (
    LossWatch,
    SkipNotFinite,
    WeightAverage,
    keep_statistics_finite,
    refuse_to_skip_with,
)
from tests.unit.passes.training import FEATURES, Trained, batches

pytestmark = pytest.mark.usefixtures("one_process")


def with_batch_norm(features: Any) -> Any:
    return nn.Linear(24, 5)(nn.functional.relu(nn.BatchNorm1D(24)(nn.Linear(FEATURES, 24)(features))))


class Skipping(Trained):
    def __init__(self, accumulate_steps: int = 1) -> None:
        self.skipping = SkipNotFinite()
        strategy = DistributedStrategy()
        strategy.accumulate_steps = accumulate_steps

        def minimize(optimizer: Any, loss: Any) -> None:
            distributed = fleet.distributed_optimizer(optimizer, strategy)
            distributed.around_update(WeightAverage(0.9).follow)
            distributed.around_update(self.skipping.guard)
            distributed.minimize(loss)
            keep_statistics_finite(paddle.static.default_main_program())

        super().__init__(lambda: paddle.optimizer.Momentum(0.1, 0.9), minimize, with_batch_norm)

    def skipped(self) -> int:
        with paddle.static.scope_guard(self.scope):
            return self.skipping.count()


def broken(batch: tuple[np.ndarray, np.ndarray], value: float) -> tuple[np.ndarray, np.ndarray]:
    features = batch[0].copy()
    features[3, 2] = value
    return features, batch[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_skipped_update_leaves_no_trace_but_its_count(value: float) -> None:
    disturbed, undisturbed = Skipping(), Skipping()
    undisturbed.start_from(disturbed.state())
    one, bad, two, three = batches(4, 8, seed=0)
    for batch in (one, broken(bad, value), two, three):
        disturbed.step(batch)
    for batch in (one, two, three):
        undisturbed.step(batch)
    assert (disturbed.skipped(), undisturbed.skipped()) == (1, 0)
    found, expected = disturbed.state(), undisturbed.state()
    differing = [name for name in expected if found[name].tobytes() != expected[name].tobytes()]
    assert differing == ["skipped_updates"], "weights, velocities, average and batch-norm statistics are as they were"


def test_one_bad_micro_batch_skips_the_update_of_all_of_them() -> None:
    trained = Skipping(accumulate_steps=2)
    one, bad, two, three = batches(4, 8, seed=1)
    before = trained.parameters()
    trained.step(broken(bad, np.nan))
    trained.step(one)
    after = trained.parameters()
    weights = [name for name in before if "batch_norm" not in name]
    assert all(np.array_equal(before[name], after[name]) for name in weights)
    trained.step(two)
    trained.step(three)
    assert trained.skipped() == 1
    assert all(np.isfinite(value).all() for value in trained.state().values())
    assert not np.array_equal(before["linear_0.w_0"], trained.parameters()["linear_0.w_0"])


def test_loss_that_is_not_finite_ends_with_rank_step_and_samples() -> None:
    watch = LossWatch(None)
    batch = {"features": np.ones((4, 2), np.float32), "labels": np.zeros(4, np.int64)}
    watch.check(0.5, 10, np.array([7, 1, 40, 3]), batch)
    batch["features"][2, 1] = np.nan
    expected = (
        r"the loss of rank 0 is nan at step 15; its batch: samples 7, 1, 40, 3; 'features' itself is not finite in "
        r"samples 40 \(last checked before: the loss of step 10, see fetch_frequency\); this step is not saved"
    )
    with pytest.raises(NotFinite, match=expected):
        watch.check(float("nan"), 15, np.array([7, 1, 40, 3]), batch)


def test_when_updates_are_skipped_the_rank_says_it_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"features": np.ones((2, 2), np.float32)}
    LossWatch(SkipNotFinite()).check(float("inf"), 3, np.array([5, 6]), batch)
    said = capsys.readouterr().err
    assert "the loss of rank 0 is inf at step 3; its batch: samples 5, 6; this update is skipped" in said


def set_values(trained: Trained, **values: float) -> None:
    """The first element of each of these variables."""
    variables = trained.main.state_dict("all", trained.scope)
    for name, value in values.items():
        array = np.array(variables[name])
        array.reshape(-1)[0] = value
        variables[name].set(array, paddle.CPUPlace())


def saved_to_the_end(checkpoints: Checkpoints) -> None:
    checkpoints.save(None, TrainState(0, 3, 9, 1, {}, {}, {}, {}))
    checkpoints.finish()


def distributed(optimizer: Any, loss: Any) -> None:
    fleet.distributed_optimizer(optimizer).minimize(loss)


def test_state_that_is_not_finite_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    trained = Trained(lambda: paddle.optimizer.Adam(0.1), distributed)
    trained.step(broken(batches(1, 8, seed=0)[0], 1e25))  # finite, but not its square
    moment, weight = "linear_0.w_0_moment2_0", "linear_0.w_0"
    for name, value, said in (
        (moment, np.inf, "is infinite in 1 of 384 elements after step 3; .*state of the optimizer"),
        (weight, np.nan, "is NaN in 1 of 384 elements after step 3"),
    ):
        for background in (False, True):
            set_values(trained, **{moment: 0.0, weight: 0.0, name: value})
            output = tmp_path / f"{name} {background}"
            with paddle.static.scope_guard(trained.scope):
                checkpoints = Checkpoints(output, background=background)
                with pytest.raises(NotFinite, match=rf"'{name}' {said}.*; this is not saved"):
                    saved_to_the_end(checkpoints)
                assert not storage.complete(checkpoints.folder)
                with pytest.raises(NotFinite, match=rf"save to .*: '{name}' is .*; this is not saved"):
                    fleet.save_persistables(None, output / "own", trained.main)
                assert not (output / "own").exists()
    # A file that an earlier version has written.
    set_values(trained, **{moment: 0.0, weight: 1.0})
    with paddle.static.scope_guard(trained.scope), pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(saving, "what_is_not_finite", lambda *_: None)
        set_values(trained, **{weight: np.nan})
        fleet.save_persistables(None, tmp_path / "earlier", trained.main)
    set_values(trained, **{weight: 1.0})
    before = trained.state()
    with (
        paddle.static.scope_guard(trained.scope),
        pytest.raises(
            CheckpointError, match=r"earlier: 'linear_0.w_0' is NaN in 1 of 384 elements: .*; load an earlier"
        ),
    ):
        fleet.load_persistables(None, tmp_path / "earlier", trained.main)
    assert all(np.array_equal(value, before[name]) for name, value in trained.state().items())


def masked(features: Any) -> Any:
    """A network with a mask of infinities, a constant in every respect."""
    values = nn.initializer.Assign(np.array([0, 0, 0, 0, -np.inf], "float32"))
    mask = paddle.static.create_parameter(
        [5], "float32", "mask", attr=paddle.ParamAttr(trainable=False, initializer=values)
    )
    return with_batch_norm(features) + paddle.clip(mask, -9.0, 0.0)


OPTIMIZERS = ["SGD", "Momentum", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Adadelta", "RMSProp", "Rprop", "Lamb"]
OPTIMIZERS += ["NAdam", "RAdam"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_healthy_training_leaves_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    optimizer = getattr(paddle.optimizer, name)
    trained = Trained(lambda: optimizer(learning_rate=0.01), distributed, masked)
    for number, batch in enumerate(batches(4, 8, seed=0)):
        with paddle.static.scope_guard(trained.scope):
            fleet.save_persistables(None, tmp_path / str(number), trained.main)
            fleet.load_persistables(None, tmp_path / str(number), trained.main)
        trained.step(batch)


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (Profile(compression="dgc"), "one NaN would stay in it forever"),
        (Profile(compression="powersgd"), "one NaN would stay in it forever"),
        (Profile(use_local_sgd=True, local_sgd_schedule="adaptive"), "computed from the loss"),
    ],
)
def test_profiles_that_remember_gradients_cannot_skip(profile: Profile, why: str) -> None:
    with pytest.raises(ProfileError, match=why):
        refuse_to_skip_with(profile)


def test_other_profiles_can() -> None:
    refuse_to_skip_with(Profile(compression="bf16", use_local_sgd=True))
