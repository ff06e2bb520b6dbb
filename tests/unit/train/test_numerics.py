"""What is put around updates, against numpy: the weights' average, updates that NaN skips, the norm of the gradient."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train import fleet
from fleet_train.convert import saving
from fleet_train.convert.rewrite import UpdatedGradients, insert_gradient_norm
from fleet_train.data import BatchLoader, ShardedBatchSampler
from fleet_train.errors import CheckpointError, ConversionError, NotFinite, ProfileError
from fleet_train.profile import Profile
from fleet_train.train import Trainer, TrainerSettings
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from fleet_train.train.numerics import (
    LossWatch,
    SkipNotFinite,
    WeightAverage,
    refuse_to_skip_with,
    refuse_unlike_batches,
    seed_process,
    stream_seed,
)
from tests.unit.passes.training import FEATURES, State, Trained, batches

pytestmark = pytest.mark.usefixtures("one_process")

DECAY = 0.7


def distributed(accumulate_steps: int, *around: Any, then: Callable[[], None] = lambda: None) -> Any:
    """`minimize` of a network, with these around its updates."""

    def minimize(optimizer: Any, loss: Any) -> None:
        made = fleet.distributed_optimizer(optimizer, Profile(accumulate_steps=accumulate_steps))
        for each in around:
            made.around_update(each)
        made.minimize(loss)
        then()

    return minimize


class Averaged(Trained):
    def __init__(self, make_optimizer: Any, accumulate_steps: int = 1) -> None:
        self.average = WeightAverage(DECAY)
        super().__init__(make_optimizer, distributed(accumulate_steps, self.average.follow))

    def averaged(self) -> State:
        with paddle.static.scope_guard(self.scope):
            return self.average.weights()


def expected_average(history: list[State]) -> State:
    """Directly from the definition: weights of an update count (1 - decay) * decay**age, normed to 1."""
    shares = np.array([(1 - DECAY) * DECAY**age for age in reversed(range(len(history)))], np.float64)
    shares /= shares.sum()
    names = history[0]
    return {
        name: sum(share * each[name].astype(np.float64) for share, each in zip(shares, history, strict=True))
        for name in names
    }


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("make_optimizer", "merged"),
    [
        (lambda: paddle.optimizer.SGD(0.1), 1),
        (lambda: paddle.optimizer.Momentum(0.1, 0.9), 2),
        (lambda: paddle.optimizer.AdamW(0.01), 1),
    ],
)
def test_the_average_is_that_of_the_weights_after_each_update(make_optimizer: Any, merged: int) -> None:
    trained = Averaged(make_optimizer, merged)
    assert_close(trained.averaged(), trained.parameters())
    history = []
    for number, batch in enumerate(batches(6, 8, seed=1), 1):
        trained.step(batch)
        if number % merged == 0:
            history.append(trained.parameters())
            assert_close(trained.averaged(), expected_average(history))
    assert {f"{name}@average" for name in history[0]} | {"weight_average_updates"} <= trained.state().keys()


def test_in_place_shows_the_average_and_gives_the_weights_back_even_after_an_error() -> None:
    trained = Averaged(lambda: paddle.optimizer.SGD(0.1))
    for batch in batches(3, 8, seed=3):
        trained.step(batch)
    weights, averaged = trained.parameters(), trained.averaged()
    with paddle.static.scope_guard(trained.scope), contextlib.suppress(RuntimeError), trained.average.in_place():
        assert_close(trained.parameters(), averaged)
        raise RuntimeError
    assert all(np.array_equal(weights[name], value) for name, value in trained.parameters().items())


def with_batch_norm(features: Any) -> Any:
    return nn.Linear(24, 5)(nn.functional.relu(nn.BatchNorm1D(24)(nn.Linear(FEATURES, 24)(features))))


class Skipping(Trained):
    def __init__(self, accumulate_steps: int = 1) -> None:
        self.skipping = SkipNotFinite()
        around = (WeightAverage(0.9).follow, self.skipping.guard)
        minimize = distributed(accumulate_steps, *around)
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


def test_loss_that_is_not_finite_ends_with_rank_step_and_samples_or_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    watch = LossWatch(None)
    batch = {"features": np.ones((4, 2), np.float32), "labels": np.zeros(4, np.int64)}
    watch.check(0.5, 10, np.array([7, 1, 40, 3]), batch)
    batch["features"][2, 1] = np.nan
    expected = "rank 0 is nan at step 15; its batch: samples 7, 1, 40, 3; 'features' itself is not finite in samples "
    with pytest.raises(NotFinite, match=expected + r"40 \(last checked before: the loss of step 10"):
        watch.check(float("nan"), 15, np.array([7, 1, 40, 3]), batch)

    batch["features"][2, 1] = 1.0
    LossWatch(SkipNotFinite()).check(float("inf"), 3, np.array([7, 1, 40, 3]), batch)
    said = capsys.readouterr().err
    assert "the loss of rank 0 is inf at step 3; its batch: samples 7, 1, 40, 3; this update is skipped" in said


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


def test_state_that_is_not_finite_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    trained = Trained(lambda: paddle.optimizer.Adam(0.1), distributed(1))
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
    # A file that somebody else has written.
    set_values(trained, **{moment: 0.0, weight: 1.0})
    with paddle.static.scope_guard(trained.scope), pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(saving, "what_is_not_finite", lambda *_: None)
        set_values(trained, **{weight: np.nan})
        fleet.save_persistables(None, tmp_path / "earlier", trained.main)
    set_values(trained, **{weight: 1.0})
    before = trained.state()
    said = r"earlier: 'linear_0.w_0' is NaN in 1 of 384 elements: .*; load an earlier"
    with paddle.static.scope_guard(trained.scope), pytest.raises(CheckpointError, match=said):
        fleet.load_persistables(None, tmp_path / "earlier", trained.main)
    assert all(np.array_equal(value, before[name]) for name, value in trained.state().items())


def masked(features: Any) -> Any:
    """A network with a mask of infinities, a constant in every respect."""
    values = nn.initializer.Assign(np.array([0, 0, 0, 0, -np.inf], "float32"))
    fixed = paddle.ParamAttr(trainable=False, initializer=values)
    mask = paddle.static.create_parameter([5], "float32", "mask", attr=fixed)
    return with_batch_norm(features) + paddle.clip(mask, -9.0, 0.0)


OPTIMIZERS = ["SGD", "Momentum", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Adadelta", "RMSProp", "Rprop", "Lamb"]
OPTIMIZERS += ["NAdam", "RAdam"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_healthy_training_leaves_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    optimizer = getattr(paddle.optimizer, name)
    trained = Trained(lambda: optimizer(learning_rate=0.01), distributed(1), masked)
    for number, batch in enumerate(batches(4, 8, seed=0)):
        with paddle.static.scope_guard(trained.scope):
            fleet.save_persistables(None, tmp_path / str(number), trained.main)
            fleet.load_persistables(None, tmp_path / str(number), trained.main)
        trained.step(batch)


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (Profile(compression="powersgd"), None),
        (Profile(use_local_sgd=True, local_sgd_schedule="adaptive"), "computed from the loss"),
        (Profile(compression="bf16", use_local_sgd=True), None),
    ],
)
def test_a_period_that_follows_from_the_loss_cannot_skip(profile: Profile, why: str | None) -> None:
    with contextlib.nullcontext() if why is None else pytest.raises(ProfileError, match=why):
        refuse_to_skip_with(profile)


@pytest.mark.parametrize(
    ("last_batch", "over", "is_refused"),
    [("exact", "ranks", True), ("exact", "samples", False), ("merge", "ranks", False)],
)
def test_unlike_last_batches_need_weights(last_batch: str, over: Any, is_refused: bool) -> None:
    expected = (
        pytest.raises(ProfileError, match="use average_over: samples") if is_refused else contextlib.nullcontext()
    )
    with expected:
        refuse_unlike_batches(last_batch, Profile(average_over=over))


CLIP = paddle.nn.ClipGradByGlobalNorm(0.01)


def wrapped(clip: Any = None, profile: Profile | None = None) -> Any:
    return fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, grad_clip=clip), profile or Profile())


def test_selected_rows_are_refused_by_their_name() -> None:
    rows = SimpleNamespace(is_dense_tensor_type=lambda: False)
    updated = UpdatedGradients(None, [(SimpleNamespace(name="words_table"), rows)])
    with pytest.raises(ConversionError, match=r"gradient of 'words_table' is sparse .* sparse=False"):
        insert_gradient_norm(updated)


FEATURES_OF_16 = SimpleNamespace(num_samples=16, arrays=lambda indices: {"x": np.ones((len(indices), 4), "float32")})


@pytest.mark.parametrize(
    ("merged", "log_every", "frequency", "expected"),
    [(1, 3, 1, [3, 6, 11, 14]), (2, 1, 1, [1, 2, 3, 4, 5, 6, 7, 8]), (1, 3, 5, [6, 11, 16]), (1, 20, 1, [8, 16])],
)
def test_it_is_fetched_in_the_steps_that_are_recorded_only(
    small_loss: Any, merged: int, log_every: int, frequency: int, expected: list[int]
) -> None:
    optimizer = wrapped(profile=Profile(accumulate_steps=merged, fetch_frequency=frequency))
    optimizer.minimize(small_loss)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    sink, real, fetched = mock.Mock(), exe.run, []

    def run(*args: Any, **options: Any) -> Any:
        fetched.append(len(options["fetch_list"]))
        return real(*args, **options)

    settings = TrainerSettings(epochs=2, log_every=log_every)
    loader = BatchLoader(FEATURES_OF_16, ShardedBatchSampler(16, 2, 0, 1))
    with mock.patch.object(exe, "run", run):
        Trainer(exe, small_loss, loader, settings, gradient_norm=optimizer.gradient_norm(), sinks=sink).fit()
    records = [call.args for call in sink.write.call_args_list]
    assert [step for step, scalars in records if "train/gradient_norm" in scalars] == expected
    assert [run // merged + 1 for run, values in enumerate(fetched) if values == 2] == expected


def run_once(program: Any, feed: dict[str, Any], fetched: Any) -> Any:
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    return exe.run(program, feed=feed, fetch_list=[fetched])[0]


@pytest.mark.parametrize(
    ("clip", "profile"), [(None, Profile()), (CLIP, Profile()), (None, Profile(use_local_sgd=True))]
)
def test_it_is_the_norm_over_all_parameters_before_clipping(small_loss: Any, clip: Any, profile: Profile) -> None:
    optimizer = wrapped(clip, profile)
    with pytest.raises(ConversionError, match="called before minimize"):
        optimizer.gradient_norm()
    optimizer.minimize(small_loss)
    program = small_loss.block.program
    asked_for = "pd_op.squared_l2_norm" in {each.name() for each in program.global_block().ops}
    assert asked_for == (clip is not None), "a program whose norm nobody asks for is Paddle's own"
    norm = optimizer.gradient_norm()
    assert optimizer.gradient_norm().is_same(norm)
    features = np.random.default_rng(3).standard_normal((5, 4)).astype("float32")
    found = run_once(program, {"x": features}, norm)
    # The loss is the mean of x @ w + b over 5 x 3 numbers: each column of w has the gradient mean(x) / 3.
    weight = np.repeat(features.mean(axis=0, dtype="float64")[:, None] / 3, 3, axis=1)
    assert (found.shape, found.dtype) == ((1,), np.float32)
    assert found.item() == pytest.approx(np.sqrt((weight**2).sum() + 3 * (1 / 3) ** 2), rel=1e-6)


def test_it_is_that_of_weighted_micro_batches_and_costs_nothing_unless_it_is_asked_for() -> None:
    x, mask = paddle.static.data("x", [None, 4]), paddle.static.data("mask", [None, 1])
    loss = (paddle.nn.Linear(4, 1, bias_attr=False)(x) * mask).sum() / mask.sum()
    optimizer = wrapped(profile=Profile(average_over="samples", accumulate_steps=2))
    optimizer.minimize(loss)
    block = loss.block.program.global_block()
    assert [each for each in block.ops if each.name() == "pd_op.cast" and each.result(0).use_empty()] == []
    norm = optimizer.gradient_norm()
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    random = np.random.default_rng(4)
    batches = [random.standard_normal((size, 4)).astype("float32") for size in (5, 2)]
    masks = [np.array([[1], [0], [0], [1], [1]], "float32"), np.ones((2, 1), "float32")]
    found = [
        exe.run(feed={"x": batch, "mask": of_batch}, fetch_list=[norm])[0].item()
        for batch, of_batch in zip(batches, masks, strict=True)
    ]
    gradient = (np.concatenate(batches) * np.concatenate(masks)).sum(0) / 5
    assert found == [0.0, pytest.approx(np.linalg.norm(gradient), rel=1e-6)]


def test_parameters_that_are_not_clipped_are_in_it_and_an_embeddings_rows_as_often_as_they_are_used() -> None:
    """With sparse=True, too, gradients are dense in today's programs."""
    unclipped = paddle.ParamAttr(need_clip=False)
    for features, dtype, make, norm in (
        (np.array([[1, 1, 1, 0]]), "float32", lambda: paddle.nn.Linear(4, 1, bias_attr=unclipped), 4),
        (np.array([1, 1, 4]), "int64", lambda: paddle.nn.Embedding(7, 3, sparse=True), 3 * 2**2 + 3 * 1**2),
    ):
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            data = paddle.static.data("x", list(features.shape), dtype)
            optimizer = wrapped(CLIP)
            optimizer.minimize(paddle.sum(make()(data)))
            found = run_once(program, {"x": features.astype(dtype)}, optimizer.gradient_norm())
        assert found.item() == pytest.approx(np.sqrt(norm))


def test_streams_of_all_ranks_and_steps_differ_and_a_processs_generators_repeat() -> None:
    assert stream_seed(0, 0, 0) == 7896617691693857887
    seeds = {stream_seed(seed, rank, step) for seed in range(4) for rank in range(4) for step in range(50)}
    assert len(seeds) == 4 * 4 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    drawn = []
    for rank in (0, 0, 1):
        seed_process(3, rank)
        drawn.append((random.random(), float(np.random.random())))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))
