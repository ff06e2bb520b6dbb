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
from fleet_train.errors import FleetTrainError, ScheduleMismatch
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


def products(_: Joint, x: Any, y: Any) -> Any:
    """Layers of rows in one and in two dimensions, with a matrix as it is, transposed, and before the rows."""
    hidden = paddle.tanh(nn.Linear(FEATURES, WIDTH)(x))
    pair = paddle.tanh(nn.Linear(WIDTH, WIDTH)(paddle.stack([hidden, nn.Linear(FEATURES, WIDTH)(y)], axis=1)))
    shapes = {"turned": [4, WIDTH], "lower": [5, WIDTH], "left": [3, 2]}
    turned, lower, left = (paddle.create_parameter(shape, x.dtype, name=name) for name, shape in shapes.items())
    one = paddle.tanh(paddle.matmul(hidden, turned, transpose_y=True))
    two = paddle.matmul(left, paddle.tanh(paddle.matmul(pair, lower, transpose_y=True)))
    return ((nn.Linear(4, 1)(one) - x.sum(1, keepdim=True)) ** 2).mean() + ((two - 1.0) ** 2).mean()


Spread = Callable[[Any, Any, Any, int], Any]
SPREAD: dict[str, Spread] = {
    "times ranks, by all": lambda each, _, total, ranks: each.sum() * ranks / total,
    "ranks first": lambda each, _, total, ranks: ranks * each.sum() / total,
    "ranks last": lambda each, _, total, ranks: each.sum() / total * ranks,
    "by a rank's part": lambda each, _, total, ranks: each.sum() / (total / ranks),
    "by one over all": lambda each, _, total, ranks: each.sum() * (1.0 / total) * ranks,
    "per sample": lambda each, _, total, ranks: (each * (ranks / total)).sum(),
    "per sample by all": lambda each, _, total, ranks: (each / total).sum() * ranks,
    "the part of a mean": lambda each, own, total, ranks: each.mean() * (own * ranks / total),
    "half of it": lambda each, _, total, ranks: 0.5 * (each.sum() * (ranks / total)),
    "beside a mean": lambda each, _, total, ranks: each.sum() * (ranks / total) + (each**2).mean(),
    "beside a sum by all": lambda each, _, total, ranks: each.sum() * (ranks / total) + (each**2).sum() / total * ranks,
    "left to the package": lambda each, _, total, __: each.sum() / total,
    "mean": lambda each, *_: each.mean(),
}
"""How scripts write the mean of which a rank has a share. Given: what it has per sample, how many it has, how many all
ranks have gathered, and the number of ranks."""


def spread(how: Spread) -> Callable[[Joint, Any, Any], Any]:
    def network(joint: Joint, x: Any, y: Any) -> Any:
        queries, keys = towers(x, y)
        everyone = joint.all(keys)
        each = (paddle.matmul(queries, everyone, transpose_y=True) ** 2).mean(axis=1)
        return how(each, number_of(keys), number_of(everyone), joint.ranks)

    return network


def chosen_of_all(joint: Joint, x: Any, y: Any) -> Any:
    """Sums and counts of what is chosen of all ranks' samples are those of the joint batch already."""
    queries, keys = towers(x, y)
    everyone = joint.all(keys)
    mask = joint.all(y)[:, 0] > -0.5
    chosen = paddle.masked_select(everyone[:, 0], mask)
    count = mask.cast("float64").sum()
    return (
        (chosen**2).sum() / 7
        + (queries**2).sum() * joint.ranks / count
        + paddle.gather(everyone, paddle.nonzero(mask).flatten()).square().sum()
    )


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
    seed: int = 0


ON_ALL = {
    "momentum": Case(),
    "adam": Case(optimizer=adam),
    "both ways": Case(both_ways),
    "used twice": Case(used_twice, optimizer=adam),
    "hand-made norm": Case(hand_made_norm, minimize_with(average_over="ranks")),
    **{f"layers in float32, {seed}": Case(products, dtype="float32", tolerance=1e-5, seed=seed) for seed in range(3)},
}
ON_TWO = {
    "recompute": Case(both_ways, minimize_with(recompute_segments=3)),
    "norm, recompute": Case(hand_made_norm, minimize_with(recompute_segments=4, average_over="ranks")),
    "merge": Case(both_ways, minimize_with(accumulate_steps=2)),
    "sharding": Case(both_ways, minimize_with(sharding=True), adam),
    "small buckets": Case(used_twice, minimize_with(fuse_parameter_groups_size=1)),
    "Paddle's gradients": Case(both_ways, with_paddles_gradients),
    "two optimizers": Case(both_ways, two_optimizers),
    "float32": Case(both_ways, dtype="float32", tolerance=1e-5),
    "amp": Case(both_ways, minimize_with(amp_level="O1"), dtype="float32", tolerance=0.05),
    "chosen of all": Case(chosen_of_all),
    **{how: Case(spread(loss)) for how, loss in SPREAD.items()},
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


def batch(step: int, sizes: Sequence[int], dtype: str, seed: int = 0) -> tuple[Any, slice]:
    """The joint batch of a step, and this rank's part; the sizes go from rank to rank."""
    turned = [*sizes[step % len(sizes) :], *sizes[: step % len(sizes)]]
    rank = fleet.worker_index()
    values = np.random.default_rng(step + seed * STEPS).standard_normal((2, sum(sizes), FEATURES)).astype(dtype)
    return values, slice(sum(turned[:rank]), sum(turned[: rank + 1]))


def compared(case: Case) -> dict[str, Any]:
    many, one = Program(case, alone=False), Program(case, alone=True)
    plan = fleet.plan()
    sent = [[each.kind, each.nbytes] for each in plan.statistics] if plan else []
    start = many.state()
    one.start_from(start)
    losses = []
    for step in range(STEPS):
        (x, y), own = batch(step, SIZES[fleet.worker_num()], case.dtype, case.seed)
        (share,), (whole,) = many.run(x[own], y[own]), one.run(x, y)
        losses.append([fleet.all_reduce(share.astype("float64"), op="mean").item(), whole.item()])
    ended, expected = many.state(), one.state()
    moved = max(float(np.abs(expected[name] - start[name]).max()) for name in start)
    apart = max(float(np.abs(ended[name] - expected[name]).max()) for name in start)
    return {"apart": apart / moved, "moved": moved, "losses": losses, "state": digest(ended), "sent": sent}


class Held:
    """A program of which a script holds values from before ``minimize``."""

    def __init__(self, alone: bool) -> None:
        self.values: dict[str, Any] = {}
        self.copies: list[Any] = []
        self.program = Program(Case(self._network, self._minimize), alone)

    def _network(self, joint: Joint, x: Any, y: Any) -> Any:
        queries, keys = towers(x, y)
        everyone, first = joint.all(keys), joint.offset(keys)
        logits = paddle.matmul(queries, everyone, transpose_y=True)
        labels = first + paddle.arange(paddle.shape(keys)[0])
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = joint.share(each, number_of(everyone))
        gradients = static.gradients([loss], [keys, y])
        names = ["samples", "offset", "logits", "gradient of keys", "gradient of y"]
        self.values = dict(zip(names, [everyone, first, logits, *gradients], strict=True))
        return loss

    def _minimize(self, optimizer: Any, loss: Any, alone: bool) -> None:
        program = static.default_main_program()
        self.copies.append(program.clone())
        plainly(optimizer, loss, alone)
        data = [op.result(0) for op in program.global_block().ops if op.name() == "pd_op.data"]
        inputs = [value for value in data if value.name in "xy"]
        self.copies.append(static.normalize_program(program, inputs, [self.values["logits"]]))

    def run(self, x: Any, y: Any) -> dict[str, Any]:
        return dict(zip(self.values, self.program.run(x, y, list(self.values.values()))[1:], strict=True))

    def evaluated(self, copy: Any, x: Any, y: Any) -> Any:
        """The logits in a copy of the program."""
        logits = [op.result(0) for op in copy.global_block().ops if op.name() == "pd_op.matmul"][2]
        with static.scope_guard(self.program.scope):
            return self.program.exe.run(copy, feed={"x": x, "y": y}, fetch_list=[logits])[0]

    def exported(self, folder: Path, x: Any, y: Any) -> Any:
        """The logits of the program that is written for inference."""
        exe, program = self.program.exe, self.program
        with static.scope_guard(program.scope):
            static.save(program.main, str(folder / "saved" / f"{fleet.worker_index()}"))
            fleet.save_inference_model(exe, folder / "exported", program.inputs, [self.values["logits"]])
        loaded, feeds, fetched = static.load_inference_model(str(folder / "exported" / "model"), exe)
        return exe.run(loaded, feed=dict(zip(feeds, (x, y), strict=True)), fetch_list=fetched)[0]


def held(folder: Path) -> dict[str, Any]:
    """How far what is held is from one process, by name; and evaluations, which have a rank's own samples."""
    many, one = Held(alone=False), Held(alone=True)
    one.program.start_from(many.program.state())
    ranks, worst = fleet.worker_num(), dict.fromkeys(many.values, 0.0)

    def compare(name: str, found: Any, expected: Any) -> None:
        assert found.shape == expected.shape, (name, found.shape, expected.shape)
        worst[name] = max(worst.get(name, 0.0), float(np.abs(found - expected).max(initial=0.0)))

    for step in range(STEPS):
        (x, y), own = batch(step, SIZES[ranks], "float64")
        found, expected = many.run(x[own], y[own]), one.run(x, y)
        compare("offset", found["offset"], np.array([own.start]))
        for name in ("samples", "logits", "gradient of keys", "gradient of y"):
            whole = expected[name] if name == "samples" else expected[name][own]
            compare(name, found[name] / (ranks if "gradient" in name else 1), whole)
        alone = one.evaluated(one.copies[0], x[own], y[own])
        if fleet.worker_index() == 0:  # no other rank takes part
            for when, copy in zip(("before", "after"), many.copies, strict=True):
                compare(f"evaluated {when}", many.evaluated(copy, x[own], y[own]), alone)
    compare("exported", many.exported(folder, x[own], y[own]), one.evaluated(one.copies[0], x[own], y[own]))
    return worst


def said_of(network: Callable[[Any, Any], Any], minimize: Minimize = plainly, width: int = FEATURES) -> str:
    """What a script hears whose network is wrong; ``width``: of this rank's samples."""
    with static.program_guard(static.Program(), static.Program()):
        x, y = (static.data(name, [None, None], "float64") for name in "xy")
        try:
            minimize(momentum(), network(x, y), False)
            exe = static.Executor(fleet.place())
            exe.run(static.default_startup_program())
            fed = np.ones((2, width))
            exe.run(feed={"x": fed, "y": fed}, fetch_list=[])
        except FleetTrainError as error:
            return str(error)
    return ""


def weighted(value: Any) -> Any:
    return (value * paddle.create_parameter([1], "float64")).sum()


def in_a_branch(x: Any, y: Any) -> Any:
    is_large = x.sum() > 0
    return weighted(static.nn.cond(is_large, lambda: fleet.all_gather_samples(x).sum(), lambda: y.sum()))


def of_its_own_gradient(x: Any, y: Any) -> Any:
    del y
    x.stop_gradient = False
    everyone = fleet.all_gather_samples(paddle.tanh(weighted(x) * x))
    (slope,) = static.gradients([(everyone * everyone).sum()], [x])
    return (slope * slope).sum()


def by_the_inner_optimizer(optimizer: Any, loss: Any, alone: bool) -> None:
    del alone
    optimizer.minimize(loss)


def after_minimize(optimizer: Any, loss: Any, alone: bool) -> None:
    plainly(optimizer, loss, alone)
    fleet.all_gather_samples(loss.reshape([1]))


def gathered(x: Any, y: Any) -> Any:
    return weighted(fleet.all_gather_samples(x)) + y.sum()


def refusals() -> dict[str, str]:
    return {
        "branch": said_of(in_a_branch),
        "second gradient": said_of(of_its_own_gradient),
        "inner optimizer": said_of(gathered, by_the_inner_optimizer),
        "after minimize": said_of(lambda x, y: weighted(x) + y.sum(), after_minimize),
        "no samples": said_of(lambda x, y: weighted(fleet.all_gather_samples(x.sum())) + y.sum()),
        "no value": said_of(lambda _, y: weighted(fleet.sample_offset(3)) + y.sum()),
        "right": said_of(gathered),
    }


DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def dtypes() -> dict[str, list[Any]]:
    """What rank ``r`` gets of 2 (of a fixed batch) or of ``r`` samples of value ``r``, cast to each dtype; and NaN."""
    rank, found = fleet.worker_index(), dict[str, list[Any]]()
    for rows in (2, None):
        with static.program_guard(static.Program(), static.Program()):
            x = static.data("x", [rows, 2], "float32")
            values = [fleet.all_gather_samples(x.cast(dtype)) for dtype in DTYPES]
            values += [fleet.all_gather_samples(paddle.log(-x))]
            shapes = [list(value.shape) for value in values]
            plainly(momentum(), (weighted(values[-2]) + weighted(values[-3])).sum(), False)
            exe = static.Executor(fleet.place())
            exe.run(static.default_startup_program())
            fed = np.full((rank if rows is None else rows, 2), rank + 1.0, "float32")
            got = exe.run(feed={"x": fed}, fetch_list=[value.cast("float64") for value in values])
            found[str(rows)] = [[array[:, 1].tolist() for array in got[:-1]], bool(np.isnan(got[-1]).all()), shapes]
    return found


def main() -> None:
    paddle.enable_static()
    fleet.init()
    paddle.seed(7)
    for name in sys.argv[1:]:
        if name == "held":
            found: Any = held(Path.cwd())
        elif name == "refusals":
            found = refusals()
        elif name == "dtypes":
            found = dtypes()
        elif name == "unlike":
            found = said_of(gathered, width=FEATURES + fleet.worker_index())
        else:
            found = compared((ON_ALL | ON_TWO)[name])
        report(fleet.worker_index(), **{name: found})


def ranks_with(folder: Path, ranks: int, cases: Sequence[str], **options: Any) -> RanksResult:
    return run_ranks(Path(__file__), ranks, folder=folder, args=cases, **options)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RanksResult]:
    cases = {2: [*ON_ALL, *ON_TWO, "held", "refusals", "dtypes"], 3: [*ON_ALL], 4: [*ON_ALL]}
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


def test_the_plan_has_the_exchanges_of_a_pass(on_ranks: dict[int, RanksResult]) -> None:
    """Of samples, whose number is unknown, the bytes of one."""
    row = WIDTH * 8
    assert on_ranks[2].of_all("momentum")[0]["sent"] == [["allgather", row], ["allreduce", row]]
    means = [["allgather", nbytes] for nbytes in (8, row, row, row, row)]
    assert on_ranks[2].of_all("hand-made norm")[0]["sent"] == means


@pytest.mark.parametrize("name", ON_TWO)
def test_they_meet_under_every_pass(on_ranks: dict[int, RanksResult], name: str) -> None:
    refuse_apart(on_ranks[2].of_all(name), ON_TWO[name])


def test_what_a_script_holds_is_that_of_one_process(on_ranks: dict[int, RanksResult]) -> None:
    """An evaluation and a program that is written have a rank's own samples."""
    first, second = on_ranks[2].of_all("held")
    assert {name: far for name, far in {**first, **second}.items() if not far < 1e-12} == {}
    assert {"evaluated before", "evaluated after", "exported"} <= first.keys()


def test_samples_of_any_dtype_are_gathered(on_ranks: dict[int, RanksResult]) -> None:
    for found in on_ranks[2].of_all("dtypes"):
        for rows, expected in (("2", [1.0, 1.0, 2.0, 2.0]), ("None", [2.0])):
            values, is_nan, shapes = found[rows]
            assert values == [[min(each, 1.0) for each in expected], *[expected] * (len(DTYPES) - 1)]
            assert is_nan
            assert shapes == [[-1, 2]] * (len(DTYPES) + 1)


HEARD = {
    "branch": "fleet.all_gather_samples is inside a control-flow block, where communication has no order",
    "second gradient": "the gradient of its gradient is not exchanged",
    "inner optimizer": "call it before minimize of the optimizer that fleet.distributed_optimizer returns",
    "after minimize": "the program trains, and this value is that of each rank alone",
    "no samples": "was given a value of shape []: it needs a first dimension",
    "no value": "fleet.sample_offset was given int; it takes a value of a static program",
}


@pytest.mark.parametrize("name", HEARD)
def test_a_script_hears_what_is_wrong(on_ranks: dict[int, RanksResult], name: str) -> None:
    for said in on_ranks[2].of_all("refusals"):
        assert HEARD[name] in said[name]
        assert said["right"] == ""


def test_samples_of_unlike_shapes_are_named(tmp_path: Path) -> None:
    result = ranks_with(tmp_path, 2, ["unlike"], check=False)
    words = "rank 0 has samples of shape [6], rank 1 of shape [7]; they may differ in their number alone"
    assert words in result.ranks[0].output, result.report()
    assert result.exit_codes == [ScheduleMismatch.exit_code] * 2


def test_they_meet_where_collectives_end_late(tmp_path: Path) -> None:
    names = ["momentum", "used twice", "hand-made norm"]
    result = ranks_with(tmp_path, 2, names, late_streams=True)
    for name in names:
        refuse_apart(result.of_all(name), ON_ALL[name])


if __name__ == "__main__":
    main()
