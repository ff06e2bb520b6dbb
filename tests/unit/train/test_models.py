"""The reference trainer: its flags, its networks, and what its programs, schedules and optimizers compute, in numpy."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest
from click.testing import CliRunner
from paddle import nn

from fleet_train.cli.train import command
from fleet_train.data import synthetic
from fleet_train.errors import DataError, FleetTrainError
from fleet_train.profile import Profile
from fleet_train.train import programs as models
from fleet_train.train.config import TrainConfig
from fleet_train.train.programs import Programs, build_model, build_programs, make_optimizer
from fleet_train.train.settings import MODELS, VISION_MODELS, Schedule
from tests.unit.passes.training import State, Trained, batches

pytestmark = pytest.mark.usefixtures("one_process")
CASES = ["mlp", "cnn", "ResNet18", "MobileNetV1", "MobileNetV2", "MobileNetV3Small", "VGG11", "ShuffleNetV2"]


def shape_of_logits(name: str, shape: tuple[int, ...], classes: int) -> list[int]:
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()), paddle.utils.unique_name.guard():
        logits = build_model(name, shape, classes)(paddle.static.data("features", [-1, *shape], "float32"))
        return list(logits.shape)  # read before the program is gone


def test_every_name_is_a_network_and_every_network_has_a_name() -> None:
    assert set(MODELS) == {*models._SMALL, *VISION_MODELS}
    assert set(models._SMALL) <= set(CASES)
    assert [name for name in VISION_MODELS.values() if not callable(getattr(paddle.vision.models, name, None))] == []


@pytest.mark.parametrize("name", CASES)
def test_small_images_become_logits(name: str) -> None:
    assert shape_of_logits(name, (3, 32, 32), 7) == [-1, 7]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32), (32,)])
def test_data_that_is_no_colour_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"--model ResNet18 needs colour images \[3, height, width\]"):
        shape_of_logits("ResNet18", shape, 10)


SAMPLES, CLASSES = 24, 10


def logits_of(programs: Programs, exe: Any, feed: dict[str, np.ndarray]) -> np.ndarray:
    """Log probabilities, which have the same softmax and order as the logits."""
    (probabilities,) = exe.run(programs.evaluation, feed=feed, fetch_list=[programs.probabilities])
    return np.log(probabilities.astype(np.float64))


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The samples, for an mlp without dropout: its training program computes what its evaluation program computes."""
    network = lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))  # noqa: E731
    monkeypatch.setitem(models._SMALL, "mlp", network)
    return synthetic(SAMPLES).train.arrays(np.arange(SAMPLES))


def built(profile: Profile | None = None, **settings: Any) -> tuple[Programs, Any]:
    config = TrainConfig(model="mlp", learning_rate=1e-9, **settings)
    programs = build_programs(config, synthetic(SAMPLES).train, config.schedule(1), 1, profile)
    exe = paddle.static.Executor(paddle.CPUPlace())
    paddle.seed(0)
    exe.run(programs.startup)
    return programs, exe


def loss_and_log_probabilities(
    feed: dict[str, np.ndarray], profile: Profile | None = None, **settings: Any
) -> tuple[float, np.ndarray, np.ndarray]:
    """The training program's loss; the evaluation program's log probabilities, and those of the labels."""
    with paddle.static.scope_guard(paddle.static.Scope()):
        programs, exe = built(profile, **settings)
        logits = logits_of(programs, exe, feed)
        (loss,) = exe.run(programs.loss.block.program, feed=feed, fetch_list=[programs.loss])
    return loss.item(), logits, logits[np.arange(SAMPLES), feed["labels"]]


def test_sums_and_confusion_are_those_of_the_predictions(feed: dict[str, np.ndarray]) -> None:
    with paddle.static.scope_guard(paddle.static.Scope()):
        programs, exe = built()
        logits, labels = logits_of(programs, exe, feed), feed["labels"]
        fetched = exe.run(
            programs.evaluation, feed=feed, fetch_list=[*programs.evaluation_sums.values(), programs.confusion]
        )
    found = dict(zip(programs.evaluation_sums, fetched, strict=False))
    order = np.argsort(-logits, axis=1)
    assert found["loss"].item() == pytest.approx(-logits[np.arange(SAMPLES), labels].sum(), rel=1e-5)
    assert found["accuracy"].item() == (order[:, 0] == labels).sum()
    assert found["top5_accuracy"].item() == (order[:, :5] == labels[:, None]).any(axis=1).sum()
    assert 0 < found["accuracy"].item() < found["top5_accuracy"].item() < SAMPLES
    expected = np.zeros((CLASSES, CLASSES), np.int64)
    np.add.at(expected, (labels, order[:, 0]), 1)
    assert fetched[-1].astype(np.int64).tolist() == expected.tolist()


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_training_loss_spreads_the_targets(feed: dict[str, np.ndarray], smoothing: float) -> None:
    loss, logits, hit = loss_and_log_probabilities(feed, label_smoothing=smoothing)
    assert loss == pytest.approx(-((1 - smoothing) * hit + smoothing * logits.mean(axis=1)).mean(), rel=1e-4)


def test_mixed_precision_of_the_profile_is_in_the_training_program_only(feed: dict[str, np.ndarray]) -> None:
    profile = Profile(amp_level="O1", amp_dtype="bfloat16")
    loss, _, hit = loss_and_log_probabilities(feed, profile, ema_decay=0.9, on_nan="skip")
    assert loss == pytest.approx(-hit.mean(), rel=0.02)
    assert loss != pytest.approx(-hit.mean(), rel=1e-5), "bfloat16 keeps 8 bits"


RATE, DECAY, CLIP = 0.1, 0.05, 0.2


def trained_with(**settings: Any) -> tuple[State, State, State]:
    """Weights before and after one update, and the gradients of that update."""
    config = TrainConfig(learning_rate=RATE, **settings)
    pairs: list[Any] = []

    class Late:
        """An optimizer that is made once its program has a forward part."""

        def minimize(self, loss: Any) -> None:
            optimizer = make_optimizer(config, RATE, loss.block.program)
            pairs.extend(optimizer.backward(loss))
            optimizer.apply_gradients(list(pairs))

    trained = Trained(Late)
    before = trained.parameters()
    values = trained.step(batches(1, 8, seed=0)[0], fetch=[gradient for _, gradient in pairs])
    gradients = {parameter.name: value for (parameter, _), value in zip(pairs, values, strict=True)}
    return before, trained.parameters(), gradients


def clip_factor(gradients: State) -> float:
    norm = np.sqrt(sum(np.square(value.astype(np.float64)).sum() for value in gradients.values()))
    assert norm > CLIP, "this test must clip"
    return float(CLIP / norm)


def decay_of(weight: np.ndarray) -> float:
    return DECAY if weight.ndim > 1 else 0.0


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("spared", [False, True])
def test_global_norm_is_clipped_before_a_decay_is_added_that_may_spare_biases(optimizer: str, spared: bool) -> None:
    before, after, gradients = trained_with(
        optimizer=optimizer, clip_norm=CLIP, weight_decay=DECAY, no_decay_norm_bias=spared
    )
    for name, weight in before.items():
        decay = decay_of(weight) if spared else DECAY
        want = weight - RATE * (gradients[name] * clip_factor(gradients) + decay * weight)
        np.testing.assert_allclose(after[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("optimizer", "spared"), [("adamw", False), ("adamw", True), ("adam", True)])
def test_adam_has_its_decay_in_the_gradient_and_adamw_beside_it(optimizer: str, spared: bool) -> None:
    before, after, gradients = trained_with(optimizer=optimizer, weight_decay=DECAY, no_decay_norm_bias=spared)
    for name, weight in before.items():
        decay = (decay_of(weight) if spared else DECAY) * weight
        gradient = gradients[name] + (decay if optimizer == "adam" else 0.0)
        moved = np.abs(gradient) > 1e-4  # the first step of Adam is the gradient's sign, where there is one
        want = weight - RATE * gradient / (np.abs(gradient) + 1e-8) - (RATE * decay if optimizer == "adamw" else 0.0)
        np.testing.assert_allclose(after[name][moved], want[moved], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule("constant", 4), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Schedule("cosine", 4), [1.0, 0.8536, 0.5, 0.1464, 0.0]),
        (Schedule("linear", 4), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Schedule("linear", 7, 3), [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (Schedule("polynomial", 4), [1.0, 0.5625, 0.25, 0.0625, 0.0]),
        (Schedule("polynomial", 4, power=1.0), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Schedule("step", 8), [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01]),
        # Milestones are steps and not moved by the warm-up.
        (Schedule("step", 7, 2, milestones=(4, 7), decay=0.5), [0.3333, 0.6667, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]),
    ],
)
def test_a_schedules_factors_by_step_of_which_the_last_stays(schedule: Schedule, factors: list[float]) -> None:
    steps = schedule.total_steps
    assert [round(schedule(step), 4) for step in range(steps + 1)] == factors
    assert schedule(steps + 100) == schedule(steps)


def test_the_rate_is_the_optimizers_and_may_grow_with_the_ranks() -> None:
    assert TrainConfig(optimizer="adam").peak_learning_rate(4) == 0.002
    assert TrainConfig(learning_rate=0.1, scale_lr=True).peak_learning_rate(4) == pytest.approx(0.4)
    assert TrainConfig(learning_rate=0.1).peak_learning_rate(4) == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "resnet18"}, "--model 'resnet18' is unknown; use one of mlp, cnn, ResNet18, "),
        ({"lr_schedule": "magic"}, "use one of constant, cosine, linear, polynomial, step"),
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"learning_rate": 0.0}, "--lr 0.0"),
        ({"clip_norm": -1.0}, "--clip_norm -1.0: must be at least 0"),
        ({"label_smoothing": 1.0}, "--label_smoothing 1.0: must be at least 0 and below 1"),
        ({"ema_decay": float("nan")}, "--ema_decay nan"),
        ({"lr_milestones": (30.0,)}, "--lr_milestones belong to --lr_schedule step, not to cosine"),
        ({"lr_schedule": "step", "lr_milestones": (60.0, 30.0)}, "they must rise"),
        ({"lr_schedule": "step", "lr_decay": 1.5}, "--lr_decay 1.5: must be above 0 and below 1"),
        ({"checkpoint_every_steps": -1}, "--checkpoint_every_steps -1"),
        ({"resume": True, "overwrite": True}, "give only one of them"),
    ],
)
def test_senseless_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetTrainError, match=message):
        TrainConfig(**fields)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configs that the command would have trained with."""
    configs: list[TrainConfig] = []
    fake: Any = ModuleType("fleet_train.train.reference")
    fake.run = configs.append
    monkeypatch.setitem(sys.modules, "fleet_train.train.reference", fake)
    return configs


def test_flags_reach_the_config_and_the_ranks(ran: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("fleet_train.cli.train.ask_here", lambda *given: asked.append(given))
    flags = "--model mlp --data synthetic --lr 0.5 --scale_lr --epochs 3 --batch_size 8 --resume --strategy multi_node"
    for given in ([], [*flags.split(), "--set=fetch_frequency=2"]):
        assert CliRunner().invoke(command, given).exit_code == 0
    assert asked[-1] == ("multi_node", ("fetch_frequency=2",))
    settings: dict[str, Any] = {"model": "mlp", "data": "synthetic", "learning_rate": 0.5, "scale_lr": True}
    settings |= {"epochs": 3, "batch_size": 8, "resume": True, "strategy": "multi_node"}
    assert ran == [TrainConfig(), TrainConfig(**settings)]


def test_a_senseless_value_is_refused_before_paddle_is_imported(ran: list[TrainConfig]) -> None:
    assert isinstance(CliRunner().invoke(command, ["--epochs", "0"]).exception, FleetTrainError)
    assert ran == []
