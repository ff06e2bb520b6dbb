"""Recomputed training is the same training, bit by bit, with less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.convert.passes.recompute import recompute_segments
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from tests.support.ranks import run_ranks
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, relative_difference


def recompute(segments: int, checkpoints: tuple[str, ...], every_blocks: int) -> Profile:
    settings = {"segments": segments, "checkpoints": list(checkpoints), "every_blocks": every_blocks}
    return Profile(**{f"recompute_{name}": value for name, value in settings.items() if value})  # type: ignore[arg-type]


def minimize_recomputed(segments: int, *checkpoints: str, every_blocks: int = 0) -> Any:
    def minimize(optimizer: Any, loss: Any) -> int:
        pairs = optimizer.backward(loss)
        count = recompute_segments(loss, recompute(segments, checkpoints, every_blocks))
        optimizer.apply_gradients(pairs)
        return count

    return minimize


def deep(features: Any) -> Any:
    """Residuals across the cuts, dropout, batch norm, a weight that is used twice, joined tensors."""
    hidden = nn.Linear(FEATURES, 24)(features)
    shared = nn.Linear(24, 24)
    for _ in range(3):
        hidden = hidden + F.dropout(F.gelu(nn.BatchNorm1D(24)(shared(hidden))), 0.2)
        hidden = nn.LayerNorm(24)(F.tanh(nn.Linear(48, 24)(paddle.concat([hidden, hidden * 0.5], axis=1))))
    return nn.Linear(24, CLASSES)(hidden)


def divided(features: Any) -> Any:
    """Operators that give and take vectors of tensors, which no host operator may be given."""
    hidden = nn.Linear(FEATURES, 24)(features)
    for cut in (
        lambda value: paddle.split(value, [6, 12, 6], axis=1)[1:],
        lambda value: paddle.chunk(value, 3, axis=1)[::2],
        lambda value: paddle.unbind(value.reshape([-1, 3, 8]), axis=1)[:2],
        lambda value: paddle.unstack(value.reshape([-1, 2, 12]), axis=1, num=2),
        lambda value: paddle.meshgrid(value.mean(0), value.mean(0)),
        lambda value: paddle.broadcast_tensors([value, value.mean(0, keepdim=True)]),
        lambda value: [paddle.einsum("ij,kj->ik", F.tanh(value), value).mean(axis=1, keepdim=True), value],
    ):
        parts = cut(F.tanh(hidden))
        joined = paddle.concat([F.gelu(part) * part for part in parts], axis=-1).mean(0, keepdim=True)
        hidden = F.tanh(nn.Linear(24, 24)(hidden) + nn.Linear(int(joined.shape[-1]), 24)(joined))
        hidden = hidden + paddle.stack([hidden, hidden * 0.5], axis=1).sum(axis=1) + paddle.add_n([hidden, hidden])
    return nn.Linear(24, CLASSES)(hidden)


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


@pytest.mark.parametrize(
    "where", [(2,), (5,), (12,), (60,), (0, "linear_2.w_0", "linear_3.w_0"), {"every_blocks": 2}], ids=str
)
@pytest.mark.parametrize(("network", "seed"), [(deep, 0), (deep, 1), (divided, 0)])
def test_parameters_and_statistics_are_bit_equal(where: Any, network: Any, seed: int) -> None:
    states, losses = [], []
    start = None
    for minimize in (
        minimize_recomputed(0),
        minimize_recomputed(0, **where) if isinstance(where, dict) else minimize_recomputed(*where),
    ):
        trained = Trained(momentum, minimize, network)
        start = start or trained.state()
        trained.start_from(start)
        paddle.seed(seed)  # dropout draws the same masks
        losses.append([trained.step(batch) for batch in batches(5, 8, seed)])
        states.append(trained.state())
    assert trained.result > 3
    assert losses[0] == losses[1]
    assert relative_difference(states[1], start) > 1e-2
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


def test_random_and_in_place_operators_run_once() -> None:
    plain, recomputed = Trained(momentum, network=deep), Trained(momentum, minimize_recomputed(5), deep)
    for name in ("pd_op.dropout", "pd_op.batch_norm_"):
        assert recomputed.operators().count(name) == plain.operators().count(name) == 3
    assert recomputed.operators().count("pd_op.add") > plain.operators().count("pd_op.add")


def test_every_block_is_the_same_as_naming_its_weights() -> None:
    """The weights of ``deep`` in the order in which they are read; linear_1 is shared, so it is read three times."""
    every = Trained(momentum, minimize_recomputed(0, every_blocks=3), deep)
    named = Trained(momentum, minimize_recomputed(0, "linear_2.w_0", "linear_3.w_0"), deep)
    assert every.result > 5
    assert named.result > 5
    assert Trained(momentum, minimize_recomputed(0, every_blocks=100), deep).result == 0
    for trained in (every, named):
        assert trained.operators().count("pd_op.dropout") == 3


def test_zero_segments_change_nothing() -> None:
    plain, same = Trained(momentum, network=deep), Trained(momentum, minimize_recomputed(0), deep)
    assert same.operators() == plain.operators()


def test_a_parameter_that_the_loss_does_not_depend_on_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"'no_such.w_0': the loss does not depend"):
        Trained(momentum, minimize_recomputed(0, "no_such.w_0"), deep)


PEAK = """
    import sys
    import numpy as np, paddle
    from paddle import nn
    from fleet_train.convert.passes.recompute import recompute_segments
    from fleet_train.profile import Profile
    from tests.support.worker import report

    paddle.enable_static()
    hidden = features = paddle.static.data("features", [None, 64])
    for _ in range(16):
        hidden = nn.functional.gelu(paddle.tanh(nn.Linear(64, 64)(hidden)))
    loss = hidden.mean()
    optimizer = paddle.optimizer.SGD(0.1)
    pairs = optimizer.backward(loss)
    recompute_segments(loss, Profile(recompute_segments=int(sys.argv[1])))
    optimizer.apply_gradients(pairs)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    peaks = []
    for _ in range(5):
        paddle.base.core.host_memory_stat_reset_peak_value("Allocated", 0)
        exe.run(feed={"features": np.ones((4096, 64), "float32")}, fetch_list=[loss])
        peaks.append(paddle.base.core.host_memory_stat_peak_value("Allocated", 0))
    report(0, peak=min(peaks))  # a thread of Paddle's frees memory, on a busy machine late
"""


def test_peak_of_memory_falls(tmp_path: Path) -> None:
    # As the product runs programs: on several threads the executor chooses what runs when, and a busy machine the peak.
    serial = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
    peaks = [
        run_ranks(PEAK, 1, nodes=0, folder=tmp_path / segments, args=[segments], env=serial).values[0]["peak"]
        for segments in ("0", "4")
    ]
    assert peaks[1] < 0.6 * peaks[0]
