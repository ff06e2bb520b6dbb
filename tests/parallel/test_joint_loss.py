"""What a script has of a program whose loss is the joint batch's: the value that it fetches in training, the program
that Paddle saves, and copies that evaluate. On ranks of their own with unlike batches, beside one process in float64.

The ranks run this file, too, with the names of cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn, static
from paddle.utils import unique_name

from fleet_train import fleet
from fleet_train.compat import clone_for_test
from fleet_train.convert import session
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import report

SIZES = {2: (6, 3), 3: (4, 0, 5)}
WIDTHS = {"x": 4, "y": 1, "mask": 1}
FIXED_SIZES = (8, 5)
STEPS = 3

Loss = Callable[[Any, Any, Any], Any]


def squares(x: Any, y: Any) -> Any:
    return (nn.Linear(WIDTHS["x"], 1)(x) - y) ** 2


def mean(x: Any, y: Any, mask: Any) -> Any:
    del mask
    return squares(x, y).mean()


def total(x: Any, y: Any, mask: Any) -> Any:
    del mask
    return squares(x, y).sum()


def masked(x: Any, y: Any, mask: Any) -> Any:
    return (squares(x, y) * mask).sum() / mask.sum()


def clipped_count(x: Any, y: Any, mask: Any) -> Any:
    return (squares(x, y) * mask).sum() / paddle.clip(mask.sum(), 1.0, 1e3)


def whole_count(x: Any, y: Any, mask: Any) -> Any:
    count = (mask > 0.5).cast("int64").sum()
    return (squares(x, y) * mask).sum() / paddle.maximum(count, paddle.ones_like(count)).cast("float64")


def added_to_a_count(x: Any, y: Any, mask: Any) -> Any:
    return (squares(x, y) * mask).sum() / (2.0 * (mask.sum() + 0.5) + 1e-3)


def root_of_a_mean(x: Any, y: Any, mask: Any) -> Any:
    del mask
    return paddle.sqrt(squares(x, y).mean())


def root_of_a_sum(x: Any, y: Any, mask: Any) -> Any:
    return paddle.sqrt((squares(x, y) * mask).sum() + 1.0)


def mean_by_hand(x: Any, y: Any, mask: Any) -> Any:
    del mask
    return squares(x, y).sum() / x.shape[0]


def deviation(x: Any, y: Any, mask: Any) -> Any:
    del mask
    each = squares(x, y)
    return each.std() + each.sum() / each.numel().cast("float64")


def normalised(x: Any, y: Any, mask: Any) -> Any:
    hidden = nn.BatchNorm1D(5)(nn.Linear(WIDTHS["x"], 5, bias_attr=False)(x))
    each = (nn.Linear(5, 1)(paddle.tanh(hidden)) - y) ** 2
    return (each * mask).sum() / mask.sum() + each.mean()


def mean_and_root(x: Any, y: Any, mask: Any) -> Any:
    return masked(x, y, mask) + root_of_a_mean(x, mask, mask) + root_of_a_sum(x, y, mask)


def mean_and_sum(x: Any, y: Any, mask: Any) -> Any:
    return squares(x, y).mean() + 0.3 * (squares(x, mask)).sum()


@dataclass(frozen=True)
class Case:
    loss: Loss
    knobs: dict[str, Any] = field(default_factory=dict)
    fixed: bool = False
    """Whether the number of samples is in the program, another one on each rank."""
    copies: bool = True
    """Whether the program is copied and saved, too."""


LOSSES = {
    each.__name__: Case(each)
    for each in (
        *(mean, total, masked, clipped_count, whole_count, added_to_a_count, root_of_a_mean, root_of_a_sum),
        *(mean_and_sum, mean_and_root),
    )
}
UNDER = {
    "summed gradients": Case(mean, {"average_over": "nothing"}),
    "recompute": Case(mean_and_sum, {"recompute_segments": 2}),
}
FIXED = {
    f"fixed {each.__name__}": Case(each, fixed=True, copies=False)
    for each in (mean, total, masked, mean_by_hand, deviation)
}
NORMS = {
    "synchronised": Case(normalised, {"sync_batch_norm": True}, copies=False),
    "synchronised, recomputed": Case(normalised, {"sync_batch_norm": True, "recompute_segments": 2}, copies=False),
}
NOT_JOINT = {"not synchronised": Case(normalised, copies=False)}
CASES = LOSSES | UNDER


class Program:
    """A case's program, in its own scope."""

    def __init__(self, case: Case, alone: bool) -> None:
        self.main, self.startup, self.scope = static.Program(), static.Program(), static.Scope()
        self.exe = static.Executor(fleet.place())
        paddle.set_default_dtype("float64")
        with static.program_guard(self.main, self.startup), unique_name.guard():
            samples = None if not case.fixed else sum(FIXED_SIZES) if alone else FIXED_SIZES[fleet.worker_index()]
            self.inputs = [static.data(name, [samples, width], "float64") for name, width in WIDTHS.items()]
            self.inputs[0].stop_gradient = False  # Paddle's product of no rows with no gradient for them fails
            self.loss = case.loss(*self.inputs)
            optimizer: Any = paddle.optimizer.Momentum(0.1, 0.9)
            if not alone:
                profile = Profile(**{"average_over": "samples", **case.knobs})
                optimizer = fleet.distributed_optimizer(optimizer, profile)
            optimizer.minimize(self.loss)
        self.copy = clone_for_test(self.main) if case.copies else None
        with static.scope_guard(self.scope):
            self.exe.run(self.startup)

    def run(self, program: Any, fed: dict[str, Any], fetch: Sequence[Any]) -> list[Any]:
        with static.scope_guard(self.scope):
            return list(self.exe.run(program, feed=fed, fetch_list=list(fetch)))

    def trained(self, fed: dict[str, Any]) -> float:
        return float(self.run(self.main, fed, [self.loss])[0].item())

    def evaluated(self, fed: dict[str, Any]) -> float:
        return float(self.run(self.copy, fed, [self.loss])[0].item())

    def values(self) -> dict[str, Any]:
        found = self.main.state_dict("all", self.scope)
        return {name: np.array(value) for name, value in found.items()}

    def parameters(self) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.main.state_dict("param", self.scope).items()}

    def start_from(self, values: dict[str, Any]) -> None:
        for name, value in self.main.state_dict("all", self.scope).items():
            value.set(values[name], fleet.place())

    def save(self, folder: Path) -> None:
        used = [value for value in self.inputs if value.all_used_ops()]
        with static.scope_guard(self.scope):
            static.save(self.main, str(folder / "saved"))
            static.save_inference_model(str(folder / "inference"), used, [self.loss], self.exe, program=self.main)


def loaded_trains(folder: Path, fed: dict[str, Any], start: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The parameters after a step of the saved program, on one card."""
    program, scope = static.Program(), static.Scope()
    paddle.base.core.deserialize_pir_program(str(folder / "saved.json"), program, 1)
    for name, value in start.items():
        scope.var(name).get_tensor().set(value, fleet.place())
    with static.scope_guard(scope):
        static.Executor(fleet.place()).run(program, feed=fed)
    return {name: np.array(scope.find_var(name).get_tensor()) for name in names}


def loaded_loss(folder: Path, fed: dict[str, Any]) -> float:
    exe = static.Executor(fleet.place())
    with static.scope_guard(static.Scope()):
        program, feeds, fetched = static.load_inference_model(str(folder / "inference"), exe)
        return float(exe.run(program, feed={name: fed[name] for name in feeds}, fetch_list=fetched)[0].item())


def batch(step: int, fixed: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The joint batch, and this rank's part; the sizes go from rank to rank unless they are fixed."""
    ranks, rank, random = fleet.worker_num(), fleet.worker_index(), np.random.default_rng(step)
    sizes = FIXED_SIZES if fixed else [*SIZES[ranks][step % ranks :], *SIZES[ranks][: step % ranks]]
    whole = {name: random.standard_normal((sum(sizes), width)) for name, width in WIDTHS.items()}
    whole["mask"] = (whole["mask"] > -0.5) * 1.0
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return whole, {name: value[own] for name, value in whole.items()}


def farthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


def compared(case: Case, folder: Path) -> dict[str, float]:
    """How far everything is from one process."""
    many, one = Program(case, alone=False), Program(case, alone=True)
    one.start_from(many.values())
    apart = dict.fromkeys(("trained", "fetched"), 0.0)
    for step in range(STEPS):
        whole, own = batch(step, case.fixed)
        share, joint = many.trained(own), one.trained(whole)
        mean_of_shares = fleet.all_reduce(np.array([share]), op="mean").item()
        apart["fetched"] = max(apart["fetched"], abs(mean_of_shares - joint))
        apart["trained"] = max(apart["trained"], farthest(many.parameters(), one.parameters()))
    if not case.copies:
        return apart
    own = batch(STEPS)[1]
    if not len(own["x"]):  # one process has NaN for a mean of no samples
        own = batch(STEPS)[0]
    start = many.values()
    one.start_from(start)
    expected = one.evaluated(own)
    apart["evaluated by all"] = abs(many.evaluated(own) - expected)
    many.save(folder)
    if fleet.worker_index() == 0:  # no other rank takes part
        apart["evaluated alone"] = abs(many.evaluated(own) - expected)
        apart["loaded"] = abs(loaded_loss(folder, own) - expected)
        one.trained(own)
        ended = one.parameters()
        apart["loaded, trained"] = farthest(loaded_trains(folder, own, start, list(ended)), ended)
    return apart


def merged(loss: Loss) -> list[float]:
    """How far the mean of what ranks fetch is from the loss of each joint micro-batch."""
    many, one = Program(Case(loss, {"accumulate_steps": 2}, copies=False), alone=False), Program(Case(loss), alone=True)
    apart = []
    for step in range(4):
        whole, own = batch(step)
        for name, value in one.main.state_dict("param", one.scope).items():
            value.set(many.parameters()[name], fleet.place())
        expected = one.evaluated(whole)
        apart.append(abs(fleet.all_reduce(np.array([many.trained(own)]), op="mean").item() - expected))
    return apart


def barriers() -> list[int]:
    """How many barriers each of 12 passes has, with exchanges of counts, of a mean, and of gradients."""
    program, job = Program(Case(mean_and_root, {"barrier_every_steps": 5}), alone=False), session.current().job
    real, passes = job.step_barrier, range(1, 13)
    found = [0] * len(passes)

    def step_barrier(name: str, *arguments: Any) -> Any:
        found[number - 1] += 1
        return real(name, *arguments)

    job.step_barrier = step_barrier  # type: ignore[method-assign]
    for number in passes:
        program.trained(batch(number)[1])
    del job.step_barrier
    return found


def main() -> None:
    paddle.enable_static()
    fleet.init()
    paddle.seed(7)
    rank = fleet.worker_index()
    for name in sys.argv[1:]:
        if name == "barriers":
            report(rank, barriers=barriers())
            continue
        if name == "merged":
            report(rank, merged={each.__name__: merged(each) for each in (mean, total, masked)})
            continue
        folder = Path.cwd() / name / str(rank)
        folder.mkdir(parents=True)
        report(rank, **{name: compared((CASES | FIXED | NORMS | NOT_JOINT)[name], folder)})


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RanksResult]:
    cases = {2: [*CASES, *FIXED, *NORMS, *NOT_JOINT, "barriers", "merged"], 3: [*LOSSES, *NORMS]}
    return {
        ranks: run_ranks(Path(__file__), ranks, folder=tmp_path_factory.mktemp(f"{ranks}"), args=names)
        for ranks, names in cases.items()
    }


def refuse_apart(results: list[dict[str, float]], names: Sequence[str], tolerance: float = 1e-12) -> None:
    for rank, found in enumerate(results):
        assert rank or set(names) <= found.keys()
        assert {name: far for name, far in found.items() if name in names and not far < tolerance} == {}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_what_ranks_fetch_is_the_loss_of_the_joint_batch(
    on_ranks: dict[int, RanksResult], name: str, ranks: int
) -> None:
    refuse_apart(on_ranks[ranks].of_all(name), ["trained", "fetched"])


def test_a_micro_batchs_loss_is_that_of_all_ranks_micro_batches(on_ranks: dict[int, RanksResult]) -> None:
    for found in on_ranks[2].of_all("merged"):
        assert {name: apart for name, apart in found.items() if not max(apart) < 1e-12} == {}
        assert len(found) == 3


def test_it_is_the_joint_batch_where_collectives_end_late(tmp_path: Path) -> None:
    names = ["masked", "added_to_a_count", "mean_and_root"]
    result = run_ranks(Path(__file__), 2, folder=tmp_path, args=names, late_streams=True)
    for name in names:
        refuse_apart(result.of_all(name), ["trained", "fetched", "evaluated alone", "loaded, trained"])


def test_exchanges_of_a_pass_share_the_steps_barrier(on_ranks: dict[int, RanksResult]) -> None:
    assert on_ranks[2].of_all("barriers") == [[1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0]] * 2


@pytest.mark.parametrize("name", FIXED)
def test_numbers_of_samples_that_are_in_the_programs_may_be_unlike(on_ranks: dict[int, RanksResult], name: str) -> None:
    """Paddle divides by a number of the script with a factor in float32."""
    refuse_apart(on_ranks[2].of_all(name), ["trained", "fetched"], 1e-6 if "by_hand" in name else 1e-12)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", NORMS)
def test_synchronised_batch_norms_are_those_of_the_joint_batch(
    on_ranks: dict[int, RanksResult], name: str, ranks: int
) -> None:
    refuse_apart(on_ranks[ranks].of_all(name), ["trained", "fetched"])


def test_rank_0_says_once_that_batch_norms_are_not_synchronised(on_ranks: dict[int, RanksResult]) -> None:
    said = [rank.output.count("normalises by each rank's own samples") for rank in on_ranks[2].ranks]
    assert said == [1, 0]
    assert "average_over: samples: batch norm (test_joint_loss.py, line " in on_ranks[2].ranks[0].output
    assert on_ranks[3].ranks[0].output.count("normalises by") == 0


@pytest.mark.parametrize("name", CASES)
def test_a_copy_that_evaluates_has_the_loss_of_its_own_batch(on_ranks: dict[int, RanksResult], name: str) -> None:
    refuse_apart(on_ranks[2].of_all(name), ["evaluated alone", "evaluated by all"])


@pytest.mark.parametrize("name", CASES)
def test_a_saved_program_is_that_of_one_card(on_ranks: dict[int, RanksResult], name: str) -> None:
    refuse_apart(on_ranks[2].of_all(name), ["loaded", "loaded, trained"])


if __name__ == "__main__":
    main()
