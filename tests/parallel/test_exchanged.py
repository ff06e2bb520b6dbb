"""Samples of a batch that meet those of the other ranks, and means over ranks inside a network: their values and their
gradients, on ranks of their own with unlike batches, beside one process with the joint batch in float64.

The ranks run this file, too, with the names of cases. A rank may have one sample, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn, static
from paddle.utils import unique_name

from fleet_train import fleet
from fleet_train.convert.passes.exchanged import mean_with_gradient
from fleet_train.convert.passes.pipeline import merge_gradients
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report

FEATURES, WIDTH, STEPS = 6, 8, 6
SIZES = {2: (5, 1), 3: (4, 0, 1), 4: (3, 1, 0, 5)}


@dataclass(frozen=True)
class Joint:
    """What a script calls. ``ranks``: 1 for one process, whose batch is the joint one."""

    ranks: int

    def all(self, value: Any) -> Any:
        return value if self.ranks == 1 else fleet.all_gather_samples(value)

    def offset(self, value: Any) -> Any:
        return paddle.zeros([1], "int64") if self.ranks == 1 else fleet.sample_offset(value)

    def mean(self, value: Any) -> Any:
        return value if self.ranks == 1 else mean_with_gradient(value)

    def share(self, each: Any, total: Any) -> Any:
        """The mean of the joint batch, of whose samples this rank has ``each``; ``total``: their number."""
        return each.sum() * (self.ranks / total)


def towers(x: Any, y: Any) -> tuple[Any, Any]:
    """No bias in the second: a softmax would remove it, and its gradient is rounding noise."""
    return paddle.tanh(nn.Linear(FEATURES, WIDTH)(x)), nn.Linear(FEATURES, WIDTH, bias_attr=False)(y)


def number_of(value: Any) -> Any:
    return paddle.shape(value)[0].cast(value.dtype)


def in_batch(joint: Joint, queries: Any, keys: Any) -> Any:
    """The softmax of the queries over all keys: a rank's share of its mean."""
    everyone = joint.all(keys)
    labels = joint.offset(keys) + paddle.arange(paddle.shape(keys)[0])
    logits = paddle.matmul(queries, everyone, transpose_y=True)
    each = nn.functional.cross_entropy(logits, labels, reduction="none")
    return joint.share(each, number_of(everyone))


def negatives(joint: Joint, x: Any, y: Any) -> Any:
    return in_batch(joint, *towers(x, y))


def both_ways(joint: Joint, x: Any, y: Any) -> Any:
    queries, keys = towers(x, y)
    return in_batch(joint, queries, keys) + in_batch(joint, keys, queries)


def used_twice(joint: Joint, x: Any, y: Any) -> Any:
    """A term of the whole joint batch, which all ranks compute alike; a value that needs no gradient; an integer."""
    queries, keys = towers(x, y)
    everyone, given = joint.all(keys), joint.all(y)
    numbers = joint.all((y[:, 0] > 0).cast("int64"))
    apart = (paddle.matmul(everyone, everyone, transpose_y=True) ** 2).mean()
    weighted = (everyone * numbers.cast(y.dtype).unsqueeze(1)).sum() + (everyone[:, 0] * given[:, 0]).sum()
    return in_batch(joint, queries, keys) + 0.1 * apart + 0.01 * weighted


def hand_made_norm(joint: Joint, x: Any, y: Any) -> Any:
    hidden = nn.Linear(FEATURES, WIDTH, bias_attr=False)(x)
    count = joint.mean(number_of(x))
    mean = joint.mean(hidden.sum(0)) / count
    variance = joint.mean(((hidden - mean) ** 2).sum(0)) / count
    normal = (hidden - mean) / (variance + 1e-5).sqrt()
    each = (nn.Linear(WIDTH, 1)(paddle.tanh(normal)) - y.sum(1, keepdim=True)) ** 2
    return joint.share(each, count * joint.ranks)


Minimize = Callable[[Any, Any, bool], Any]
"""``minimize(optimizer, loss, alone)``: with one process if ``alone``."""


def minimize_with(**knobs: Any) -> Minimize:
    def minimize(optimizer: Any, loss: Any, alone: bool) -> Any:
        if not alone:
            return fleet.distributed_optimizer(optimizer, Profile(**knobs)).minimize(loss)
        if "amp_level" in knobs:
            lower_precision(loss, Profile(**knobs), on_gpu=False)
        merged = merge_gradients(optimizer.backward(loss), knobs.get("accumulate_steps", 1))
        return merged.apply(lambda: optimizer.apply_gradients(merged.pairs))

    return minimize


plainly = minimize_with()


def with_paddles_gradients(optimizer: Any, loss: Any, alone: bool) -> Any:
    """A script that derives its gradients without the optimizer."""
    wrapped = optimizer if alone else fleet.distributed_optimizer(optimizer, Profile())
    return wrapped.apply_gradients(static.append_backward(loss))


def two_optimizers(optimizer: Any, loss: Any, alone: bool) -> Any:
    """Two losses of one program, each with its own parameters."""
    del optimizer
    weights = loss.block.program.global_block().all_parameters()
    for part, weight in enumerate(weights):
        each = momentum() if alone else fleet.distributed_optimizer(momentum(), Profile())
        each.minimize(loss * (1.0 + part), parameters=[weight])


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.1, 0.9)


def adam() -> Any:
    return paddle.optimizer.Adam(0.01)


@dataclass(frozen=True)
class Case:
    network: Callable[[Joint, Any, Any], Any] = negatives
    minimize: Minimize = plainly
    optimizer: Callable[[], Any] = momentum
    dtype: str = "float64"
    tolerance: float = 1e-10
    """Of how far one process moves."""


ON_ALL = {
    "momentum": Case(),
    "adam": Case(optimizer=adam),
    "both ways": Case(both_ways),
    "used twice": Case(used_twice, optimizer=adam),
    "hand-made norm": Case(hand_made_norm),
}
ON_TWO = {
    "recompute": Case(both_ways, minimize_with(recompute_segments=3)),
    "norm, recompute": Case(hand_made_norm, minimize_with(recompute_segments=4)),
    "merge": Case(both_ways, minimize_with(accumulate_steps=2)),
    "sharding": Case(both_ways, minimize_with(sharding=True), adam),
    "in the graph": Case(both_ways, minimize_with(collective_stream="graph")),
    "small buckets": Case(used_twice, minimize_with(fuse_parameter_groups_size=1)),
    "Paddle's gradients": Case(both_ways, with_paddles_gradients),
    "two optimizers": Case(both_ways, two_optimizers),
    "float32": Case(both_ways, dtype="float32", tolerance=1e-5),
    "amp": Case(both_ways, minimize_with(amp_level="O1"), dtype="float32", tolerance=0.05),
    "amp O2": Case(both_ways, minimize_with(amp_level="O2"), dtype="float32", tolerance=0.05),
}


class Program:
    """A case's program, in its own scope."""

    def __init__(self, case: Case, alone: bool) -> None:
        self.main, self.startup, self.scope = static.Program(), static.Program(), static.Scope()
        self.exe = static.Executor(fleet.place())
        paddle.set_default_dtype(case.dtype)
        with static.program_guard(self.main, self.startup), unique_name.guard():
            self.inputs = [static.data(name, [None, FEATURES], case.dtype) for name in "xy"]
            for value in self.inputs:
                value.stop_gradient = False  # Paddle's product of no rows with no gradient for them fails
            self.loss = case.network(Joint(1 if alone else fleet.worker_num()), *self.inputs)
            case.minimize(case.optimizer(), self.loss, alone)
        with static.scope_guard(self.scope):
            self.exe.run(self.startup)

    def run(self, x: Any, y: Any, fetch: Sequence[Any] = ()) -> list[Any]:
        with static.scope_guard(self.scope):
            return list(self.exe.run(self.main, feed={"x": x, "y": y}, fetch_list=[self.loss, *fetch]))

    def state(self) -> dict[str, Any]:
        found = self.main.state_dict("param", self.scope)
        return {name: np.array(value) for name, value in found.items()}

    def start_from(self, state: dict[str, Any]) -> None:
        for name, value in self.main.state_dict("param", self.scope).items():
            value.set(state[name], fleet.place())


def batch(step: int, sizes: Sequence[int], dtype: str) -> tuple[Any, slice]:
    """The joint batch of a step, and this rank's part; the sizes go from rank to rank."""
    turned = [*sizes[step % len(sizes) :], *sizes[: step % len(sizes)]]
    rank = fleet.worker_index()
    values = np.random.default_rng(step).standard_normal((2, sum(sizes), FEATURES)).astype(dtype)
    return values, slice(sum(turned[:rank]), sum(turned[: rank + 1]))


def compared(case: Case) -> dict[str, Any]:
    many, one = Program(case, alone=False), Program(case, alone=True)
    start = many.state()
    one.start_from(start)
    losses = []
    for step in range(STEPS):
        (x, y), own = batch(step, SIZES[fleet.worker_num()], case.dtype)
        (share,), (whole,) = many.run(x[own], y[own]), one.run(x, y)
        losses.append([fleet.all_reduce(share.astype("float64"), op="mean").item(), whole.item()])
    ended, expected = many.state(), one.state()
    moved = max(float(np.abs(expected[name] - start[name]).max()) for name in start)
    apart = max(float(np.abs(ended[name] - expected[name]).max()) for name in start)
    return {"apart": apart / moved, "moved": moved, "losses": losses, "state": digest(ended)}


def main() -> None:
    paddle.enable_static()
    fleet.init()
    paddle.seed(7)
    for name in sys.argv[1:]:
        report(fleet.worker_index(), **{name: compared((ON_ALL | ON_TWO)[name])})


def ranks_with(folder: Path, ranks: int, cases: Sequence[str], **options: Any) -> RanksResult:
    return run_ranks(Path(__file__), ranks, folder=folder, args=cases, **options)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RanksResult]:
    cases = {2: [*ON_ALL, *ON_TWO], 3: [*ON_ALL], 4: [*ON_ALL]}
    return {ranks: ranks_with(tmp_path_factory.mktemp(f"{ranks}"), ranks, names) for ranks, names in cases.items()}


def refuse_apart(results: list[Any], case: Case) -> None:
    assert len({each["state"] for each in results}) == 1
    assert results[0]["moved"] > 0.01
    assert results[0]["apart"] <= case.tolerance
    for share, whole in results[0]["losses"]:
        assert share == pytest.approx(whole, rel=max(case.tolerance, 1e-10))


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", ON_ALL)
def test_samples_meet_those_of_all_ranks(on_ranks: dict[int, RanksResult], name: str, ranks: int) -> None:
    refuse_apart(on_ranks[ranks].of_all(name), ON_ALL[name])


@pytest.mark.parametrize("name", ON_TWO)
def test_they_meet_under_every_pass(on_ranks: dict[int, RanksResult], name: str) -> None:
    refuse_apart(on_ranks[2].of_all(name), ON_TWO[name])


def test_they_meet_where_collectives_end_late(tmp_path: Path) -> None:
    names = ["momentum", "used twice", "hand-made norm"]
    result = ranks_with(tmp_path, 2, names, late_streams=True)
    for name in names:
        refuse_apart(result.of_all(name), ON_ALL[name])


if __name__ == "__main__":
    main()
