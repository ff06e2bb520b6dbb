"""All passes in one program, in the order in which the facade runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.convert.passes.pipeline import LossScaler, merge_gradients
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.convert.passes.recompute import recompute_segments
from fleet_train.convert.passes.sync_norm import Kernels, synchronize_batch_norms
from fleet_train.profile import Profile
from tests.unit.passes.test_precision import convolutional
from tests.unit.passes.test_recompute import divided
from tests.unit.passes.test_sync_norm import SameBatchOn, normalised
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, relative_difference


def minimize_with(level: str, segments: int, accumulate_steps: int) -> Any:
    def minimize(optimizer: Any, loss: Any) -> Any:
        profile = Profile(amp_level=level, recompute_segments=segments)
        lower_precision(loss, profile, on_gpu=False, emulated=True)  # with and without recompute
        scaler = LossScaler(Profile())
        pairs = optimizer.backward(scaler.scaled(loss))
        pairs = synchronize_batch_norms(pairs, SameBatchOn(2), Kernels())
        count = recompute_segments(loss, profile)
        merged = merge_gradients(pairs, accumulate_steps)
        merged.apply(lambda: scaler.apply(merged.pairs, optimizer.apply_gradients))
        return count

    return minimize


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


def vectors(features: Any) -> Any:
    hidden = F.gelu(nn.BatchNorm1D(24)(nn.Linear(FEATURES, 24)(features)))
    return nn.Linear(24, CLASSES)(F.dropout(nn.LayerNorm(24)(hidden + nn.Linear(24, 24)(hidden)), 0.1))


@pytest.mark.parametrize("network", [vectors, convolutional, normalised, pytest.param(divided, marks=pytest.mark.long)])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("segments", [3, 8])
def test_recompute_changes_no_bit_of_the_others(network: Any, level: str, segments: int) -> None:
    states = []
    start = None
    for count in (0, segments):
        trained = Trained(momentum, minimize_with(level, count, accumulate_steps=2), network)
        start = start or trained.state()
        trained.start_from(start)
        paddle.seed(5)
        for batch in batches(6, 8, seed=0):
            trained.step(batch)
        states.append(trained.state())
    assert trained.result > 0
    assert relative_difference(trained.parameters(), {name: start[name] for name in trained.parameters()}) > 1e-2
    differing = [name for name in states[0] if not np.array_equal(states[0][name], states[1][name])]
    assert differing == []


def test_all_but_precision_equal_plain_training() -> None:
    paddle.seed(0)
    plain = Trained(momentum, network=normalised)
    together = Trained(momentum, minimize_with("O0", 4, accumulate_steps=1), normalised)
    together.start_from(plain.state())
    for batch in batches(10, 12, seed=0):
        plain.step(batch)
        together.step(batch)
    assert relative_difference(together.parameters(), plain.parameters(), floor=0.1) < 1e-5
