"""Clipping, weight decay and its exceptions against the same arithmetic in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_train.train.config import TrainConfig
from fleet_train.train.programs import make_optimizer
from tests.unit.passes.training import State, Trained, batches

pytestmark = pytest.mark.usefixtures("one_process")

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


def assert_update(settings: dict[str, Any], expected: Any) -> None:
    before, after, gradients = trained_with(**settings)
    for name in before:
        want = expected(before[name].astype(np.float64), gradients[name].astype(np.float64), gradients)
        np.testing.assert_allclose(after[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


def clip_factor(gradients: State) -> float:
    norm = np.sqrt(sum(np.square(value.astype(np.float64)).sum() for value in gradients.values()))
    assert norm > CLIP, "this test must clip"
    return float(CLIP / norm)


def decay_of(weight: np.ndarray) -> float:
    return DECAY if weight.ndim > 1 else 0.0


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_global_norm_is_clipped_before_the_decay_is_added(optimizer: str) -> None:
    assert_update(
        {"optimizer": optimizer, "clip_norm": CLIP, "weight_decay": DECAY},
        lambda weight, gradient, all_of_them: weight - RATE * (gradient * clip_factor(all_of_them) + DECAY * weight),
    )


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_biases_are_spared_from_the_decay(optimizer: str) -> None:
    assert_update(
        {"optimizer": optimizer, "weight_decay": DECAY, "no_decay_norm_bias": True},
        lambda weight, gradient, _: weight - RATE * (gradient + decay_of(weight) * weight),
    )


@pytest.mark.parametrize("spared", [False, True])
def test_decoupled_decay_spares_biases_too(spared: bool) -> None:
    def adamw(weight: np.ndarray, gradient: np.ndarray, _: State) -> np.ndarray:
        decay = decay_of(weight) if spared else DECAY
        return weight * (1 - RATE * decay) - RATE * gradient / (np.abs(gradient) + 1e-8)

    before, after, gradients = trained_with(optimizer="adamw", weight_decay=DECAY, no_decay_norm_bias=spared)
    for name in before:
        moved = np.abs(gradients[name]) > 1e-4  # the first step of Adam is the gradient's sign, where there is one
        want = adamw(before[name].astype(np.float64), gradients[name].astype(np.float64), gradients)
        np.testing.assert_allclose(after[name][moved], want[moved], rtol=1e-4, atol=1e-5, err_msg=name)


def test_adam_spares_biases_from_its_l2_term() -> None:
    def adam(weight: np.ndarray, gradient: np.ndarray, _: State) -> np.ndarray:
        with_decay = gradient + decay_of(weight) * weight
        return weight - RATE * with_decay / (np.abs(with_decay) + 1e-8)

    before, after, gradients = trained_with(optimizer="adam", weight_decay=DECAY, no_decay_norm_bias=True)
    for name in before:
        gradient = gradients[name].astype(np.float64)
        moved = np.abs(gradient + decay_of(before[name]) * before[name]) > 1e-4
        want = adam(before[name].astype(np.float64), gradient, gradients)
        np.testing.assert_allclose(after[name][moved], want[moved], rtol=1e-4, atol=1e-5, err_msg=name)
