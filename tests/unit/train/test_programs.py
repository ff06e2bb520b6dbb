"""What the programs of the reference trainer compute, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train.data import synthetic
from fleet_train.profile import Profile
from fleet_train.train import programs as models
from fleet_train.train.config import TrainConfig
from fleet_train.train.programs import Programs, build_programs

pytestmark = pytest.mark.usefixtures("one_process")

SAMPLES, CLASSES = 24, 10


def logits_of(programs: Programs, exe: Any, feed: dict[str, np.ndarray]) -> np.ndarray:
    """Log probabilities, which have the same softmax and order as the logits."""
    (probabilities,) = exe.run(programs.evaluation, feed=feed, fetch_list=[programs.probabilities])
    return np.log(probabilities.astype(np.float64))


@pytest.fixture(autouse=True)
def no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the training program computes what the evaluation program computes."""
    network = lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))  # noqa: E731
    monkeypatch.setitem(models._SMALL, "mlp", network)


@pytest.fixture
def feed() -> dict[str, np.ndarray]:
    return synthetic(SAMPLES).train.arrays(np.arange(SAMPLES))


def built(profile: Profile | None = None, **settings: Any) -> tuple[Programs, Any]:
    config = TrainConfig(model="mlp", learning_rate=1e-9, **settings)
    programs = build_programs(config, synthetic(SAMPLES).train, config.schedule(1), 1, profile)
    exe = paddle.static.Executor(paddle.CPUPlace())
    paddle.seed(0)
    exe.run(programs.startup)
    return programs, exe


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_training_loss_spreads_the_targets(feed: dict[str, np.ndarray], smoothing: float) -> None:
    with paddle.static.scope_guard(paddle.static.Scope()):
        programs, exe = built(label_smoothing=smoothing)
        logits, labels = logits_of(programs, exe, feed), feed["labels"]
        (loss,) = exe.run(programs.loss.block.program, feed=feed, fetch_list=[programs.loss])
    hit = logits[np.arange(SAMPLES), labels]
    expected = -((1 - smoothing) * hit + smoothing * logits.mean(axis=1)).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_mixed_precision_of_the_profile_is_in_the_training_program_only(feed: dict[str, np.ndarray]) -> None:
    with paddle.static.scope_guard(paddle.static.Scope()):
        programs, exe = built(Profile(amp_level="O1", amp_dtype="bfloat16"), ema_decay=0.9, on_nan="skip")
        logits, labels = logits_of(programs, exe, feed), feed["labels"]
        (loss,) = exe.run(programs.loss.block.program, feed=feed, fetch_list=[programs.loss])
    expected = -logits[np.arange(SAMPLES), labels].mean()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert loss.item() != pytest.approx(expected, rel=1e-5), "bfloat16 keeps 8 bits"
