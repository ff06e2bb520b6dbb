"""Ranks with data of unequal length, and decisions of all ranks in a loop of one's own, beside one process.

The ranks run this file, too. One process trains the joint batches: of each step, what the ranks have, in rank order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import report

BATCHES = (7, 4, 5)
SEEDS = (0, 1, 2)
FEATURES = 6


def batch_of(seed: int, rank: int, number: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, rank, number])
    x = rng.standard_normal((3 + (rank + number) % 3, FEATURES))
    return {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True)) + rank}


def network(seed: int, profile: Profile | None = None) -> tuple[Any, Any]:
    """A program of its own in a scope of its own: what runs one step, and what reads the parameters."""
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        paddle.seed(seed)
        x, y = (paddle.static.data(name, [None, width], "float64") for name, width in (("x", FEATURES), ("y", 1)))
        valid = paddle.static.data("valid", [None, 1], "float64")
        layers = [paddle.nn.Linear(FEATURES, 8, name="first"), paddle.nn.Linear(8, 1, name="second")]
        cost = (layers[1](paddle.tanh(layers[0](x))) - y) ** 2
        loss = (cost * valid).sum() / valid.sum()
        optimizer: Any = paddle.optimizer.Adam(0.01)
        if profile is not None:
            optimizer = fleet.distributed_optimizer(optimizer, profile)
        optimizer.minimize(loss)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(startup, scope=scope)

    def run(feed: dict[str, Any]) -> float:
        (value,) = exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
        return float(value.item())

    def read() -> Any:
        names = sorted(each.name for each in main.global_block().all_parameters())
        return np.concatenate([np.array(scope.find_var(name).get_tensor()).reshape(-1) for name in names])

    return run, read


def joint(seed: int, ranks: int, is_cut: bool) -> Any:
    """What one process has after the joint batches of two epochs."""
    run, read = network(seed)
    for epoch in range(2):
        steps = min(BATCHES[:ranks]) if is_cut else max(BATCHES[:ranks])
        for number in range(steps):
            parts = [batch_of(seed, r, 10 * epoch + number) for r in range(ranks) if number < BATCHES[r]]
            feed = {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}
            run(feed | {"valid": np.ones((len(feed["x"]), 1))})
    return read()


def of_ranks(ranks: int) -> dict[str, Any]:
    rank, found = fleet.worker_index(), {}
    for seed in SEEDS:
        for kind in ("list", "generator", "cut"):
            run, read = network(seed, Profile())
            begun, counts = read(), []
            for epoch in range(2):
                own = [batch_of(seed, rank, 10 * epoch + number) for number in range(BATCHES[rank])]
                given: Any = own if kind == "list" else iter(own)
                count = 0
                if kind == "cut":
                    for batch in fleet.even_batches(given):
                        run(batch | {"valid": np.ones((len(batch["x"]), 1))})
                        count += 1
                else:
                    for batch in fleet.even_batches(given, valid="valid"):
                        run(batch)
                        count += 1
                counts.append(count)
            apart = np.abs(read() - joint(seed, ranks, is_cut=kind == "cut")).max()
            found[f"{kind} {seed}"] = [float(apart), float(np.abs(read() - begun).max()), counts]
    return found


def refused(given: dict[str, Any], **named: Any) -> str:
    network(0, Profile(**given))
    try:
        fleet.even_batches([{"x": np.ones((2, FEATURES))}], **named)
    except ConversionError as error:
        return str(error)
    return ""


def main() -> None:
    paddle.enable_static()
    paddle.set_default_dtype("float64")
    fleet.init()
    rank, ranks = fleet.worker_index(), fleet.worker_num()
    report(flags=[fleet.any(rank == 1), fleet.any(np.bool_(False)), fleet.all(rank < ranks), fleet.all(rank != 1)])
    report(**of_ranks(ranks))
    report(
        local=refused({"use_local_sgd": True, "local_sgd_steps": 2}, valid="valid"),
        plain=refused({"average_over": "ranks"}, valid="valid"),
        merge=refused({"accumulate_steps": 2}, valid="valid"),
        unknown=refused({}, valid="mask"),
    )


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RanksResult]:
    return {n: run_ranks(Path(__file__), n, folder=tmp_path_factory.mktemp(f"{n}")) for n in (2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["list", "generator", "cut"])
def test_uneven_ranks_train_as_one_process_does_with_the_joint_batches(
    on_ranks: dict[int, RanksResult], ranks: int, kind: str
) -> None:
    steps = (min if kind == "cut" else max)(BATCHES[:ranks])
    for seed in SEEDS:
        for apart, moved, counts in on_ranks[ranks].of_all(f"{kind} {seed}"):
            assert moved > 0.01
            assert apart < 1e-12
            assert counts == [steps, steps]


def test_all_ranks_decide_alike(on_ranks: dict[int, RanksResult]) -> None:
    for result in on_ranks.values():
        assert result.of_all("flags") == [[True, False, True, False]] * len(result.ranks)


def test_the_ranks_whose_rest_is_left_out_are_named(on_ranks: dict[int, RanksResult]) -> None:
    words = "fleet.even_batches: rank 1 has fewer batches than others, whose rest is left out of each epoch"
    assert words in on_ranks[3].ranks[0].output


def test_where_copies_would_count_they_are_refused(on_ranks: dict[int, RanksResult]) -> None:
    for name, words in {
        "local": "in LocalSGD's local steps a rank's loss is its own batch's",
        "plain": "average_over: ranks counts a batch of copies like any other",
        "merge": "gradient merge may count a micro-batch of copies",
        "unknown": "the program has no input of this name, only valid, x, y",
    }.items():
        assert [words in said for said in on_ranks[2].of_all(name)] == [True, True], on_ranks[2].of_all(name)


if __name__ == "__main__":
    main()
