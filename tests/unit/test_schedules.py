"""Learning-rate schedules: saved and restored with a program's state, and stepped once per update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.optimizer import lr

from fleet_train import fleet, log
from fleet_train.convert import persistables, session
from fleet_train.errors import CheckpointError, ProfileError
from fleet_train.profile import Profile
from tests.programs.random_programs.optimizers import SCHEDULES

SAVED_AFTER, STEPS, RATE = 3, 6, 0.05
MADE = {name: make for name, make in SCHEDULES.items() if name}
MADE["plateau"] = lambda rate: lr.ReduceOnPlateau(rate, factor=0.5, patience=0)
MADE["warmup, then restarts"] = lambda rate: lr.LinearWarmup(lr.CosineAnnealingWarmRestarts(rate, 2), 1, 0.0, rate)
MADE["warmup, then plain"] = lambda rate: lr.LinearWarmup(rate, 4, 0.0, rate)


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log, "_logged", set())
    paddle.enable_static()
    fleet.init()
    yield
    fleet.shutdown()
    paddle.disable_static()


class Training:
    """A program that a script has just built, with its schedule at the start; ``run`` is one turn of its loop."""

    def __init__(self, schedule: Any, **knobs: Any) -> None:
        self.schedule = schedule
        x = paddle.static.data("x", [None, 4], "float32")
        start = paddle.nn.initializer.Constant(0.3)
        self.loss = (paddle.nn.Linear(4, 1, paddle.ParamAttr(name="w", initializer=start))(x) ** 2).mean()
        fleet.distributed_optimizer(paddle.optimizer.Adam(schedule), Profile(**knobs)).minimize(self.loss)
        self.exe = paddle.static.Executor(paddle.CPUPlace())
        self.exe.run(paddle.static.default_startup_program())
        self.runs = 0

    def run(self, number: int) -> float:
        x = np.random.default_rng(number).standard_normal((8, 4)).astype("float32")
        self.runs += 1
        return float(self.exe.run(feed={"x": x}, fetch_list=[self.loss])[0])

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            losses.append(self.run(number))
            self.step(losses[-1])
        return losses

    def step(self, loss: float = 0.0) -> None:
        if isinstance(self.schedule, lr.ReduceOnPlateau):
            self.schedule.step(loss)
        elif isinstance(self.schedule, lr.LRScheduler):
            self.schedule.step()

    def weights(self) -> np.ndarray:
        return np.array(paddle.static.global_scope().find_var("w").get_tensor())


@contextmanager
def anew() -> Iterator[None]:
    """As in a new process."""
    with (
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        yield


def straight(make: Callable[[float], Any], folder: Path) -> tuple[list[float], np.ndarray, float]:
    """The losses after the save, the weights and the rate of a training that saves and goes on."""
    with anew():
        training = Training(make(RATE))
        training.train(0, SAVED_AFTER)
        fleet.save_persistables(training.exe, folder)
        losses = training.train(SAVED_AFTER, STEPS)
        return losses, training.weights(), float(training.schedule())


def nothing(schedule: Any) -> None:
    del schedule


def all_steps(schedule: Any) -> None:
    for _ in range(SAVED_AFTER):
        schedule.step()


HANDLED: dict[str, Callable[[Any], None]] = {
    "step(epoch)": lambda schedule: schedule.step(SAVED_AFTER),
    "all steps anew": all_steps,
}


# Schedules that can be set by a number of steps, because no rate is computed from the one before.
OF_STEPS = ("noam", "piecewise", "exponential", "warmup", "warmup, then plain", "lambda", "step", "cyclic")


@pytest.mark.parametrize(
    ("name", "handled"), [*((name, "nothing") for name in MADE), *((n, how) for n in OF_STEPS for how in HANDLED)]
)
def test_a_resumed_training_goes_on_bit_by_bit(
    name: str, handled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, weights, rate = straight(MADE[name], tmp_path)
    with anew():
        training = Training(MADE[name](RATE))
        fleet.load_persistables(training.exe, tmp_path)
        HANDLED.get(handled, nothing)(training.schedule)
        assert training.train(SAVED_AFTER, STEPS) == losses
        np.testing.assert_array_equal(training.weights(), weights)
        assert float(training.schedule()) == rate
        assert "step" not in vars(training.schedule)
    assert f"continues at step {SAVED_AFTER}, with the learning rate" in capsys.readouterr().err


def test_what_the_script_sets_after_the_load_wins(tmp_path: Path) -> None:
    straight(MADE["exponential"], tmp_path)
    for change, epoch in (
        (lambda schedule: schedule.step(0), 0),
        (lambda schedule: schedule.set_state_dict({"last_epoch": 9, "last_lr": 0.01}), 9),
        (lambda schedule: schedule.step(), SAVED_AFTER + 1),
    ):
        with anew():
            training = Training(MADE["exponential"](RATE))
            fleet.load_persistables(training.exe, tmp_path)
            change(training.schedule)
            training.run(0)
            assert training.schedule.last_epoch == epoch


def test_a_load_in_mid_training_goes_back_with_the_schedule(tmp_path: Path) -> None:
    with anew():
        training = Training(MADE["step"](RATE))
        training.train(0, SAVED_AFTER)
        fleet.save_persistables(training.exe, tmp_path)
        first = training.train(SAVED_AFTER, STEPS)
        for _ in range(2):
            fleet.load_persistables(training.exe, tmp_path)
        assert training.train(SAVED_AFTER, STEPS) == first


def test_a_copy_of_the_program_saves_and_loads_its_schedule(tmp_path: Path) -> None:
    with anew():
        training = Training(MADE["step"](RATE))
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            Training(MADE["exponential"](RATE))  # converted last, and of other parameters
        training.train(0, SAVED_AFTER)
        copy = paddle.static.default_main_program().clone()
        fleet.save_persistables(training.exe, tmp_path, copy)
        first = training.train(SAVED_AFTER, STEPS)
        fleet.load_persistables(training.exe, tmp_path, copy)
        assert training.train(SAVED_AFTER, STEPS) == first


def without_its_schedule(folder: Path) -> None:
    """A saved state without a schedule's."""
    with anew():
        training = Training(MADE["exponential"](RATE))
        training.train(0, SAVED_AFTER)
        replace(fleet.capture_persistables(), schedule=None).write(folder)


def test_a_schedule_that_begins_anew_beside_a_loaded_rate_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_its_schedule(tmp_path)
    said = "was saved with the learning rate 0.0245, and ExponentialDecay begins anew with 0.05, because"
    with anew():
        training = Training(MADE["exponential"](RATE))
        fleet.load_persistables(training.exe, tmp_path)
        training.train(0, 3)
    assert capsys.readouterr().err.count(said) == 1
    with anew():
        training = Training(MADE["exponential"](RATE))
        fleet.load_persistables(training.exe, tmp_path)
        all_steps(training.schedule)
        training.train(0, 3)
    with anew():
        training = Training(RATE)  # no schedule: the saved rate is the one that is loaded
        fleet.load_persistables(training.exe, tmp_path)
        training.train(0, 3)
    assert "begins anew" not in capsys.readouterr().err
    monkeypatch.setattr(session.current(), "is_strict", True)
    with anew():
        training = Training(MADE["exponential"](RATE))
        fleet.load_persistables(training.exe, tmp_path)
        with pytest.raises(CheckpointError, match=said):
            training.run(0)


def test_another_schedule_than_the_saved_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight(MADE["exponential"], tmp_path)
    with anew():
        training = Training(MADE["warmup"](RATE))
        fleet.load_persistables(training.exe, tmp_path)
        assert training.schedule.last_epoch == 0
        training.run(0)
    assert "LinearWarmup begins anew with 0, because no state of such a schedule was saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    "entry", [[], {"kind": "StepDecay"}, {"kind": 3, "state": {}}, {"kind": "", "state": {"last_lr": {"float": "x"}}}]
)
def test_a_damaged_schedule_is_refused_before_anything_is_loaded(tmp_path: Path, entry: Any) -> None:
    with anew():
        training = Training(MADE["step"](RATE))
        captured = fleet.capture_persistables()
        persistables.publish(tmp_path, captured.write_tensors(tmp_path) | {"schedule": entry})
        training.train(0, 2)
        before = training.weights()
        with pytest.raises(CheckpointError, match="its learning-rate schedule is damaged"):
            fleet.load_persistables(training.exe, tmp_path)
        np.testing.assert_array_equal(training.weights(), before)


def test_a_state_that_is_no_json_is_named_and_the_rest_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(lr.StepDecay):  # type: ignore[misc]
        def state_keys(self) -> None:
            self.keys = ["last_epoch", "last_lr", "memory"]

    with anew():
        training = Training(Own(RATE, 2))
        training.schedule.memory = object()
        fleet.save_persistables(training.exe, tmp_path)
        fleet.load_persistables(training.exe, tmp_path)
    assert "the state of Own is not saved: it holds a object" in capsys.readouterr().err


@pytest.mark.parametrize("merged", [2, 3, 4])
def test_a_schedule_that_is_stepped_per_run_beside_gradient_merge_is_named_once(
    merged: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"accumulate_steps: {merged}: StepDecay is stepped after every run"
    with anew():
        Training(MADE["step"](RATE), accumulate_steps=merged).train(0, 3 * merged)
    assert capsys.readouterr().err.count(said) == 1
    monkeypatch.setattr(session.current(), "is_strict", True)
    with anew():
        training = Training(MADE["step"](RATE), accumulate_steps=merged)
        with pytest.raises(ProfileError, match=said):
            training.train(0, 3 * merged)
        assert training.runs <= merged + 1


@pytest.mark.parametrize("merged", [1, 2, 3, 4])
def test_a_schedule_that_is_stepped_once_per_update_or_epoch_is_not_accused(
    merged: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with anew():
        per_update = Training(MADE["step"](RATE), accumulate_steps=merged)
        for number in range(5 * merged):
            per_update.run(number)
            if (number + 1) % merged == 0:
                per_update.step()
    with anew():
        per_epoch = Training(MADE["step"](RATE), accumulate_steps=merged)
        for number in range(35):
            per_epoch.run(number)
            if number % 7 == 6:
                per_epoch.step()
    with anew():
        Training(RATE, accumulate_steps=merged).train(0, 3 * merged)
    assert "is stepped after every run" not in capsys.readouterr().err
