"""Saved state: what a file of one process is good for, which tensors a program accepts, and which must be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from fleet_train import fleet
from fleet_train.convert.passes.pipeline import LossScaler
from fleet_train.convert.program_state import (
    ProgramState,
    SavedState,
    fit,
    is_finite,
    what_is_not_finite,
)
from fleet_train.errors import CheckpointError
from fleet_train.profile import Profile
from tests.support.images import infer
from tests.unit.passes.training import loss_scaling


class Network:
    """A network with batch norm in programs and a scope of its own; ``minimize`` appends what trains it."""

    def __init__(self, minimize: Callable[[Any], Any] | None, width: int = 6) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self.exe = paddle.static.Executor()
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            hidden = paddle.nn.Linear(4, width)(paddle.static.data("x", [None, 4], "float32"))
            norm = paddle.nn.BatchNorm1D(width)
            if minimize is None:
                norm.eval()
            self.output = paddle.nn.Linear(width, 3)(norm(hidden))
            self.loss = paddle.mean(self.output**2)
            if minimize is not None:
                minimize(self.loss)
        with paddle.static.scope_guard(self.scope):
            self.exe.run(self.startup)

    def run(self, seed: int, fetch: Any = None) -> Any:
        features = np.random.default_rng(seed).standard_normal((5, 4)).astype("float32")
        with paddle.static.scope_guard(self.scope):
            return self.exe.run(self.main, feed={"x": features}, fetch_list=[self.loss if fetch is None else fetch])[0]

    def state(self) -> dict[str, np.ndarray]:
        with paddle.static.scope_guard(self.scope):
            state = ProgramState(self.main)
        return state.read(state.variables)

    def save(self, folder: Path) -> None:
        with paddle.static.scope_guard(self.scope):
            fleet.save_persistables(self.exe, folder, self.main)

    def load(self, folder: Path) -> None:
        with paddle.static.scope_guard(self.scope):
            fleet.load_persistables(self.exe, folder, self.main)


def with_profile(**settings: Any) -> Callable[[Any], Any]:
    def minimize(loss: Any) -> None:
        fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), Profile(**settings)).minimize(loss)

    return minimize


def with_loss_scale(loss: Any) -> None:
    optimizer = paddle.optimizer.Momentum(0.1)
    scaler = LossScaler(loss_scaling(incr_every_n_steps=2))
    scaler.apply(optimizer.backward(scaler.scaled(loss)), optimizer.apply_gradients)


@pytest.fixture
def job() -> Iterator[None]:
    paddle.enable_static()
    fleet.init()
    yield
    fleet.shutdown()
    paddle.disable_static()


in_a_job = pytest.mark.usefixtures("job")


@in_a_job
@pytest.mark.parametrize("settings", [{}, {"accumulate_steps": 2, "recompute_segments": 2}])
def test_exported_training_program_is_the_evaluation_program(tmp_path: Path, settings: dict[str, Any]) -> None:
    trained, evaluated = Network(with_profile(**settings)), Network(None)
    for seed in range(3):
        trained.run(seed)
    with paddle.static.scope_guard(trained.scope):
        fleet.save_inference_model(trained.exe, tmp_path, ["x"], [trained.output])
    trained.save(tmp_path / "saved")
    evaluated.load(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.pdiparams", "saved"]
    features = np.random.default_rng(9).standard_normal((5, 4)).astype("float32")
    outputs = infer(tmp_path, features, tmp_path)
    np.testing.assert_allclose(outputs, evaluated.run(9, evaluated.output), rtol=1e-5, atol=1e-6)


@in_a_job
@pytest.mark.parametrize(
    "minimize", [with_profile(), with_profile(accumulate_steps=3), with_loss_scale], ids=["plain", "merge", "scale"]
)
def test_a_loaded_run_continues_bit_by_bit(tmp_path: Path, minimize: Callable[[Any], Any]) -> None:
    straight, resumed = Network(minimize), Network(minimize)
    for seed in range(4):
        straight.run(seed)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for network in (straight, resumed):
        for seed in range(4, 7):
            network.run(seed)
    expected = straight.state()
    found = resumed.state()
    assert [name for name in expected if found[name].tobytes() != expected[name].tobytes()] == []


@in_a_job
def test_plain_paddle_program_takes_the_tensors_as_they_are(tmp_path: Path) -> None:
    trained, plain = Network(with_profile(accumulate_steps=2)), Network(None)
    for seed in range(3):
        trained.run(seed)
    trained.save(tmp_path)
    saved = load_file(tmp_path / "persistables.safetensors")
    for name, variable in plain.main.state_dict("all", plain.scope).items():
        variable.set(saved[name], paddle.CPUPlace())
    evaluated = Network(None)
    evaluated.load(tmp_path)
    np.testing.assert_array_equal(plain.run(9, plain.output), evaluated.run(9, evaluated.output))
    for name, value in plain.state().items():
        np.testing.assert_array_equal(value, trained.state()[name], strict=True)


@in_a_job
def test_nothing_is_changed_when_the_first_offending_tensor_is_named(tmp_path: Path) -> None:
    Network(with_profile()).save(tmp_path)
    other = Network(with_profile(), width=7)
    before = other.state()
    with pytest.raises(
        CheckpointError, match=r"'batch_norm1d_0\.b_0' is \[6\] float32, this program needs \[7\] float32"
    ):
        other.load(tmp_path)
    file = tmp_path / "persistables.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"persistables\.safetensors is cut off in tensor 'linear_1\.w_0_velocity_0'"
    ):
        other.load(tmp_path)
    assert {name: value.tobytes() for name, value in other.state().items()} == {
        name: value.tobytes() for name, value in before.items()
    }


@in_a_job
def test_a_description_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "complete.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="format 2; this version reads format 3"):
        Network(with_profile()).load(tmp_path)


@in_a_job
def test_statistics_are_what_batches_move() -> None:
    moved = ["batch_norm1d_0.w_1", "batch_norm1d_0.w_2"]
    for network, expected in ((Network(with_profile()), moved), (Network(None), [])):
        with paddle.static.scope_guard(network.scope):
            assert ProgramState(network.main).statistics == expected


W = {"w": ("parameter", [3, 4], "float32")}
VELOCITY = {"w_velocity_0": ("optimizer", [3, 4], "float32")}
SUMS = {"w@gradient_merge": ("pass", [3, 4], "float32"), "gradient_merge_count_0": ("pass", [1], "int64")}


@pytest.mark.parametrize(
    ("saved", "ours", "told"),
    [
        (W, W | VELOCITY, "here has no tensor 'w_velocity_0', which this program needs"),
        (W | VELOCITY, VELOCITY, "here has a tensor 'w' that this program does not have"),
        (
            W,
            {"w": ("parameter", [3, 4], "float64")},
            r"'w' is \[3, 4\] float32, this program needs \[3, 4\] float64",
        ),
        ({}, {"b": W["w"], "a": W["w"]}, "here has no tensor 'a'"),
    ],
)
def test_first_tensor_that_does_not_fit_is_named(saved: dict, ours: dict, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        fit(saved, ours, "here")


def test_what_fits_is_taken_and_what_a_pass_keeps_may_be_on_one_side_only() -> None:
    trained = W | VELOCITY
    names = ["w", "w_velocity_0"]
    assert fit(trained, trained, "here") == (names, [])
    assert fit(trained | SUMS, W, "here") == (["w"], []), "a program without an optimizer leaves its state aside"
    missing = "here has no 'gradient_merge_count_0' and 1 more, which keep their start values"
    assert fit(trained, trained | SUMS, "here") == (names, [missing])
    unused = "here has 'gradient_merge_count_0' and 1 more, which this profile does not use"
    assert fit(trained | SUMS, trained, "here") == (names, [unused])


HUGE = float(np.finfo("float32").max)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([1.0, np.nan], False),
        ([np.inf, -np.inf], False),
        ([-np.inf, 0.0], False),
        ([HUGE, HUGE], True),  # the sum overflows
        ([], True),
    ],
)
def test_only_nan_and_infinity_are_not_finite(values: list[float], expected: bool) -> None:
    assert is_finite(np.array(values, "float32")) is expected
    bits = np.array(values, "float32").view(np.uint32) >> 16
    assert is_finite(bits.astype(np.uint16)) is expected, "bfloat16's bits"
    assert is_finite(np.array([2**62, 2**62]))


KINDS = {"w": "parameter", "mask": "parameter", "w_moment2_0": "optimizer", "best": "optimizer", "w@average": "pass"}


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("w", [np.nan, np.inf, 1.0], r"'w' is NaN in 1 and infinite in 1 of 3 elements"),
        ("w", [-np.inf], r"'w' is infinite in 1 of 1 elements"),
        ("w@average", [np.inf], r"'w@average' is infinite in 1 of 1 elements"),
        ("fleet_train/int8/w.error", [np.nan], r"'fleet_train/int8/w.error' is NaN in 1 of 1 elements"),
        ("mask", [np.nan, -np.inf], r"'mask' is NaN in 1 and infinite in 1 of 2 elements"),
        (
            "w_moment2_0",
            [np.inf, 0.0],
            "'w_moment2_0' is infinite in 1 of 2 elements; this is state of the optimizer: where it is infinite, the "
            "weights never change again, or become infinite themselves (a gradient was too large)",
        ),
        # Healthy: what a script has made for itself, a mask, an update that may be skipped, no loss so far.
        ("mask", [0.0, -np.inf], None),
        ("best", [np.inf], None),
        ("w@gradient_merge", [np.nan], None),
        ("fleet_train/local_sgd/numbers", [4.0, 0.0, 0.1, np.nan], None),
    ],
)
def test_what_is_not_finite_is_named_unless_it_may_be(name: str, values: list[float], said: str | None) -> None:
    found = np.array(values, "float32")
    good = {"w": np.ones(3, "float32"), "step": np.array([3])}
    assert what_is_not_finite(SavedState({**good, name: found}, KINDS), {"mask"}) == said
    own = [{"own": np.zeros(1, "float32")}, {"own": np.ones(1, "float32"), name: found}]
    expected = None if said is None else f"rank 1's {said}"
    assert what_is_not_finite(SavedState(good, KINDS, own), {"mask"}) == expected
