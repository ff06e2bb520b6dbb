"""Recomputed training and composed batch norms are the same training (on ranks: tests/parallel/test_passes.py)."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.collectives.sync_batch_norm import Statistics
from fleet_train.convert.passes.pipeline import LossScaler, merge_gradients
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.convert.passes.recompute import recompute_segments
from fleet_train.convert.passes.sync_norm import Arithmetic, Composed, Kernels, synchronize_batch_norms
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from tests.support.ranks import run_ranks
from tests.unit.passes.test_precision import convolutional
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, momentum, relative_difference


class SameBatchOn:
    """An exchange with ranks that all bring what this one brings."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.order: list[str] = []

    def start(self) -> Any:
        return None

    def combine(self, what: str, local: Any, chain: Any) -> Any:
        self.order.append(what)
        counts = [(paddle.numel(each.values) // each.mean.shape[0]).cast(each.mean.dtype) for each in local]
        return [
            Statistics(self.world_size * count, each.mean, each.variance)
            for count, each in zip(counts, local, strict=True)
        ], chain

    def average(self, what: str, sums: Any, counts: Any, chain: Any, unread: Any = ()) -> Any:  # noqa: ARG002
        self.order.append(what)
        means = [
            (bias * float(self.world_size) / count, scale * float(self.world_size) / count)
            for (bias, scale), count in zip(sums, counts, strict=True)
        ]
        return means, chain


ARITHMETICS = {"kernels": Kernels(), "composed": Composed()}


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    return ARITHMETICS[request.param]


def minimize_synchronized(exchange: Any, arithmetic: Arithmetic = ARITHMETICS["kernels"]) -> Any:
    def minimize(optimizer: Any, loss: Any) -> Any:
        pairs = synchronize_batch_norms(optimizer.backward(loss), exchange, arithmetic)
        optimizer.apply_gradients(pairs)
        return pairs

    return minimize


def normalised(features: Any) -> Any:
    """Batch norm over images in both layouts, over vectors, used twice, and one that is frozen."""
    image = nn.Conv2D(1, 4, 3, padding=1)(features.reshape([-1, 1, 4, 4]))
    image = F.tanh(nn.BatchNorm2D(4)(image)).transpose([0, 2, 3, 1])
    image = nn.BatchNorm2D(4, momentum=0.5, epsilon=1e-3, data_format="NHWC")(image) + image
    vector = nn.BatchNorm1D(64, use_global_stats=True)(image.flatten(1))
    vector = nn.Linear(64, 8)(vector)
    shared = nn.BatchNorm1D(8)
    return nn.Linear(8, CLASSES)(shared(F.tanh(shared(vector))))


def residual(features: Any) -> Any:
    """The norm at the end of a branch and the one of its shortcut wait for nothing of one another."""
    image = features.reshape([-1, 1, 4, 4])
    branch = nn.BatchNorm2D(3)(nn.Conv2D(1, 3, 3, padding=1)(image))
    branch = nn.BatchNorm2D(4)(nn.Conv2D(3, 4, 3, padding=1)(F.tanh(branch)))
    shortcut = nn.BatchNorm2D(4, momentum=0.5)(nn.Conv2D(1, 4, 1)(image))
    return nn.Linear(64, CLASSES)(F.tanh(branch + shortcut).flatten(1))


def in_two_dtypes(features: Any) -> Any:
    """As ``residual``, but the shortcut is computed in float64."""
    image = features.reshape([-1, 1, 4, 4])
    branch = nn.BatchNorm2D(1)(nn.Conv2D(1, 1, 3, padding=1)(image))
    paddle.set_default_dtype("float64")
    shortcut = nn.BatchNorm2D(1)(image.cast("float64"))
    paddle.set_default_dtype("float32")
    return nn.Linear(16, CLASSES)(F.tanh(branch.cast("float64") + shortcut).cast("float32").flatten(1))


def test_norms_of_another_dtype_have_an_exchange_and_digits_of_their_own() -> None:
    exchange = SameBatchOn(2)
    plain, synchronized = (
        Trained(momentum, lambda optimizer, loss, change=change: change(optimizer.backward(loss)), in_two_dtypes)
        for change in (list, lambda pairs: synchronize_batch_norms(pairs, exchange, Kernels()))
    )
    synchronized.start_from(plain.state())
    assert len(exchange.order) == 4
    batch = batches(1, 12, seed=0)[0]
    ours, expected = (one.step(batch, [gradient for _, gradient in one.result]) for one in (synchronized, plain))
    assert "float64" in {str(gradient.dtype) for gradient in ours}
    for found, wanted in zip(ours, expected, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [[-1, FEATURES], [-1, FEATURES, 1, 1]])
def test_a_single_value_per_channel_is_its_own_mean(shape: list[int], arithmetic: Arithmetic) -> None:
    """Paddle's kernel hands a single value on without looking at it."""

    def network(features: Any) -> Any:
        norm = nn.BatchNorm1D(FEATURES) if len(shape) == 2 else nn.BatchNorm2D(FEATURES)
        return nn.Linear(FEATURES, CLASSES)(norm(features.reshape(shape)).flatten(1))

    trained = Trained(momentum, minimize_synchronized(SameBatchOn(2), arithmetic), network)
    features, labels = batches(1, 1, seed=0)[0]
    name = next(name for name in trained.state() if name.startswith("batch_norm") and name.endswith(".w_1"))
    trained.step((features, labels))
    np.testing.assert_allclose(trained.state()[name], 0.1 * features[0], rtol=1e-6)
    np.testing.assert_allclose(trained.state()[name.replace("w_1", "w_2")], np.full(FEATURES, 0.9), rtol=1e-6)


def test_large_mean_does_not_cancel() -> None:
    trained = Trained(
        momentum, minimize_synchronized(SameBatchOn(2)), lambda x: nn.BatchNorm1D(FEATURES)(x)[:, :CLASSES]
    )
    features, labels = batches(1, 64, seed=0)[0]
    before = trained.state()
    trained.step((features + 1e4, labels))
    variance = (trained.state()["batch_norm1d_0.w_2"] - 0.9 * before["batch_norm1d_0.w_2"]) / 0.1
    np.testing.assert_allclose(variance, (features + np.float32(1e4)).astype("float64").var(0), rtol=1e-3)


def test_batch_norm_in_a_branch_is_refused() -> None:
    def hidden(features: Any) -> Any:
        norm, linear = nn.BatchNorm1D(FEATURES), nn.Linear(FEATURES, CLASSES)
        return linear(paddle.static.nn.cond(features.sum() > 0, lambda: norm(features), lambda: features))

    with pytest.raises(ConversionError, match=r"sync_batch_norm: .* control-flow block"):
        Trained(momentum, minimize_synchronized(SameBatchOn(2)), hidden)


def minimize_recomputed(segments: int, *checkpoints: str, every_blocks: int = 0) -> Any:
    given = {"segments": segments, "checkpoints": list(checkpoints), "every_blocks": every_blocks}
    profile = Profile(**{f"recompute_{name}": value for name, value in given.items() if value})  # type: ignore[arg-type]

    def minimize(optimizer: Any, loss: Any) -> int:
        pairs = optimizer.backward(loss)
        count = recompute_segments(loss, profile)
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


WHERE: list[Any] = [(2,), (5,), (12,), (60,), (0, "linear_2.w_0", "linear_3.w_0"), {"every_blocks": 2}]


@pytest.mark.parametrize(("network", "where"), [*((deep, where) for where in WHERE), (divided, (2,)), (divided, (12,))])
def test_parameters_and_statistics_are_bit_equal(network: Any, where: Any) -> None:
    recomputed = minimize_recomputed(0, **where) if isinstance(where, dict) else minimize_recomputed(*where)
    assert assert_bit_equal([minimize_recomputed(0), recomputed], network) > 3


def assert_bit_equal(ways: list[Any], network: Any) -> int:
    """Five steps of each; what the last one's ``minimize`` returned."""
    states, losses, start = [], [], None
    for minimize in ways:
        trained = Trained(momentum, minimize, network)
        start = start or trained.state()
        trained.start_from(start)
        paddle.seed(5)  # dropout draws the same masks
        losses.append([trained.step(batch) for batch in batches(6, 8, seed=0)])
        states.append(trained.state())
    assert losses[0] == losses[1]
    assert relative_difference(trained.parameters(), {name: start[name] for name in trained.parameters()}) > 1e-2
    assert [name for name in states[0] if not np.array_equal(states[0][name], states[1][name])] == []
    return int(trained.result)


def tossed(features: Any) -> Any:
    hidden = nn.Linear(FEATURES, 24)(features)
    for _ in range(3):
        hidden = F.tanh(nn.Linear(24, 24)(hidden * paddle.randint(1, 4, [24]).astype("float32")))
        hidden = paddle.index_select(hidden, paddle.randperm(24), axis=1)
    return nn.Linear(24, CLASSES)(hidden)


def test_random_integers_are_drawn_once() -> None:
    plain, recomputed = Trained(momentum, network=tossed), Trained(momentum, minimize_recomputed(5), tossed)
    for name in ("pd_op.randint", "pd_op.randperm"):
        assert recomputed.operators().count(name) == plain.operators().count(name) == 3
    assert assert_bit_equal([minimize_recomputed(0), minimize_recomputed(5)], tossed) > 3


def test_random_and_in_place_operators_run_once() -> None:
    plain, recomputed = Trained(momentum, network=deep), Trained(momentum, minimize_recomputed(5), deep)
    for name in ("pd_op.dropout", "pd_op.batch_norm_"):
        assert recomputed.operators().count(name) == plain.operators().count(name) == 3
    assert recomputed.operators().count("pd_op.add") > plain.operators().count("pd_op.add")
    for nothing in (minimize_recomputed(0), minimize_recomputed(0, every_blocks=100)):
        assert Trained(momentum, nothing, deep).operators() == plain.operators()


def test_a_parameter_that_the_loss_does_not_depend_on_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"'no_such.w_0': the loss does not depend"):
        Trained(momentum, minimize_recomputed(0, "no_such.w_0"), deep)


PEAK = """
    import numpy as np, paddle
    from paddle import nn
    from fleet_train.convert.passes.recompute import recompute_segments
    from fleet_train.profile import Profile
    from tests.support.worker import report

    def peak(segments):
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup):
            hidden = paddle.static.data("features", [None, 64])
            for _ in range(16):
                hidden = nn.functional.gelu(paddle.tanh(nn.Linear(64, 64)(hidden)))
            loss, optimizer = hidden.mean(), paddle.optimizer.SGD(0.1)
            pairs = optimizer.backward(loss)
            recompute_segments(loss, Profile(recompute_segments=segments))
            optimizer.apply_gradients(pairs)
        exe, peaks = paddle.static.Executor(paddle.CPUPlace()), []
        exe.run(startup)
        for _ in range(5):
            paddle.base.core.host_memory_stat_reset_peak_value("Allocated", 0)
            exe.run(main, feed={"features": np.ones((4096, 64), "float32")}, fetch_list=[loss])
            peaks.append(paddle.base.core.host_memory_stat_peak_value("Allocated", 0))
        return min(peaks)  # a thread of Paddle's frees memory, on a busy machine late

    paddle.enable_static()
    report(0, recomputed=peak(4), plain=peak(0))
"""


def test_peak_of_memory_falls(tmp_path: Path) -> None:
    # As the product runs programs: on several threads the executor chooses what runs when, and a busy machine the peak.
    serial = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
    peaks = run_ranks(PEAK, 1, nodes=0, folder=tmp_path, env=serial).values[0]
    assert peaks["recomputed"] < 0.6 * peaks["plain"]


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


def vectors(features: Any) -> Any:
    hidden = F.gelu(nn.BatchNorm1D(24)(nn.Linear(FEATURES, 24)(features)))
    return nn.Linear(24, CLASSES)(F.dropout(nn.LayerNorm(24)(hidden + nn.Linear(24, 24)(hidden)), 0.1))


@pytest.mark.parametrize(
    ("network", "case"),
    list(product([vectors, convolutional, normalised], [("O0", 3), ("O1", 8), ("O2", 3), ("O2", 8)])),
)
def test_recompute_changes_no_bit_of_the_others(network: Any, case: tuple[str, int]) -> None:
    level, segments = case
    ways = [minimize_with(level, count, accumulate_steps=2) for count in (0, segments)]
    assert assert_bit_equal(ways, network) > 0


@pytest.mark.parametrize(("network", "world_size", "seed"), [(normalised, 1, 0), (normalised, 3, 1), (residual, 2, 0)])
def test_equals_paddle_on_equal_batches(network: Any, world_size: int, seed: int, arithmetic: Arithmetic) -> None:
    """``residual`` has norms that share an exchange."""
    paddle.seed(seed)
    plain = Trained(momentum, network=network)
    start = plain.state()
    synchronized = Trained(momentum, minimize_synchronized(SameBatchOn(world_size), arithmetic), network)
    synchronized.start_from(start)
    for batch in batches(10, 12, seed):
        expected, found = plain.step(batch), synchronized.step(batch)
        assert found == pytest.approx(expected, rel=1e-5)
    assert relative_difference(plain.state(), start) > 1e-2
    # running statistics as well
    assert relative_difference(synchronized.state(), plain.state(), floor=0.1) < 1e-5


def test_exchanges_follow_one_order_and_norms_that_do_not_wait_for_each_other_share_one() -> None:
    plain, chained, shared = SameBatchOn(2), SameBatchOn(2), SameBatchOn(2)
    assert Trained(momentum, minimize_synchronized(plain)).operators() == Trained(momentum).operators()
    assert plain.order == []
    Trained(momentum, minimize_synchronized(chained), normalised)
    names = ["batch_norm2d_0.w_0", "batch_norm2d_1.w_0", "batch_norm1d_1.w_0", "batch_norm1d_1.w_0"]
    forward = [f"statistics of '{name}'" for name in names]
    assert chained.order == forward + [f"gradient of '{name}'" for name in reversed(names)]
    Trained(momentum, minimize_synchronized(shared), residual)
    first, end, shortcut = (f"'batch_norm2d_{number}.w_0'" for number in range(3))
    assert shared.order == [
        f"statistics of {first}",
        f"statistics of {end}, {shortcut}",
        f"gradient of {end}, {shortcut}",
        f"gradient of {first}",
    ]
