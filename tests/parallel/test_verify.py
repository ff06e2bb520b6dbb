"""``launch --verify_joint_batch``: which programs' gradients are the joint batch's on two ranks, what is said of the
others, and that the training does not notice. The ranks run this file, too: all programs in one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn, static
from paddle.nn import functional

from fleet_train import fleet, log
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report

ROWS, STEPS = 6, 2
Feed = dict[str, Any]
Build = Callable[[Any, Any], Any]


def plain(x: Any, y: Any) -> Any:
    return (nn.Linear(8, 1)(functional.relu(nn.Linear(4, 8)(x))) - y).square().mean()


def drawn(x: Any, y: Any) -> Any:
    hidden = functional.dropout(nn.Linear(4, 8)(x), 0.4)
    hidden = hidden * paddle.uniform(paddle.shape(hidden), min=0.5, max=1.5)
    return (nn.Linear(8, 1)(functional.dropout(hidden, 0.3, axis=0)) - y).square().mean()


def normed(x: Any, y: Any) -> Any:
    return (nn.Linear(8, 1)(nn.BatchNorm1D(8)(nn.Linear(4, 8)(x))) - y).square().mean()


def met(x: Any, y: Any) -> Any:
    return (functional.softmax(nn.Linear(4, 1)(x), axis=0) * y).mean()


def gathered(x: Any, y: Any) -> Any:
    keys = nn.Linear(4, 8)(x)
    logits = paddle.matmul(nn.Linear(4, 8)(x), fleet.all_gather_samples(keys), transpose_y=True)
    labels = fleet.sample_offset(keys) + paddle.arange(paddle.shape(keys)[0], dtype="int64")
    return functional.cross_entropy(logits, labels.unsqueeze(1)) + 0 * y.mean()


def neighbours(x: Any, y: Any) -> Any:
    out = nn.Linear(4, 1)(x) * y
    return (out[1:] - out[:-1]).square().mean()


def looked_up(x: Any, y: Any) -> Any:
    ids = paddle.cast(x.abs() * 4, "int64").clip(0, 19)
    return (nn.Linear(4, 1)(nn.Embedding(20, 4, padding_idx=0, sparse=True)(ids).mean(1)) - y).square().mean()


def branching(x: Any, y: Any) -> Any:
    hidden = nn.Linear(4, 4)(x)
    hidden = static.nn.cond(x.mean() > -9, lambda: functional.dropout(hidden, 0.5), lambda: hidden * 2)
    return (nn.Linear(4, 1)(hidden) - y).square().mean()


def by_a_joint_count(x: Any, y: Any) -> Any:
    count = static.data("count", [1], "float32")
    return (nn.Linear(4, 1)(x) - y).square().sum() / count


def masked(x: Any, y: Any) -> Any:
    valid = static.data("valid", [None, 1], "float32")
    return ((nn.Linear(4, 1)(x) - y).square() * valid).sum() / valid.sum()


def summed(x: Any, y: Any) -> Any:
    return (nn.Linear(4, 1)(x) - y).square().sum()


def made_up_for(x: Any, y: Any) -> Any:
    return summed(x, y) * fleet.worker_num()


def with_places(x: Any, y: Any) -> Any:
    rows = paddle.gather(nn.Linear(4, 1)(x) - y, static.data("places", [None], "int64"))
    return rows.square().mean()


def fed_unequally() -> Feed:
    rows = 3 + 6 * fleet.worker_index()
    return {"x": random().random((rows, 4), "float32"), "y": random().random((rows, 1), "float32")}


def none_valid() -> Feed:
    return {"valid": np.full((ROWS, 1), fleet.worker_index(), "float32")}


def some_valid() -> Feed:
    return {"valid": (np.arange(ROWS) <= 3 * fleet.worker_index()).astype("float32").reshape(ROWS, 1)}


def with_a_table(x: Any, y: Any) -> Any:
    table = static.data("table", [None, 4], "float32")
    return (nn.Linear(4, 1)(x + table.mean(0)) - y).square().mean()


def of_a_fixed_table(x: Any, y: Any) -> Any:
    table = static.data("table", [3, 4], "float32")
    return (nn.Linear(4, 1)(x + table.mean(0)) - y).square().mean()


def in_time(x: Any, y: Any) -> Any:
    words = static.data("words", [3, None, 4], "float32")
    states, _ = nn.SimpleRNN(4, 4, time_major=True)(words)
    return (nn.Linear(4, 1)(functional.dropout(states, 0.3)[-1] + x) - y).square().mean()


def random() -> np.random.Generator:
    return np.random.default_rng(fleet.worker_index())


# The network, settings, what is fed beside x and y, and the beginning of what is said.
OK, NOT, UNTRIED = "verified: ", "not verified: ", "the joint batch was not verified: "
CASES: dict[str, tuple[Build, Mapping[str, Any], Callable[[], Feed], str]] = {
    "plain": (plain, {}, dict, OK),
    "drawn": (drawn, {}, dict, OK),
    "drawn, recomputed": (drawn, {"recompute_segments": 3}, dict, OK),
    "drawn, merged": (drawn, {"accumulate_steps": 2}, dict, OK),
    "sharded": (plain, {"sharding": True}, dict, OK),
    "compressed": (plain, {"compression": "int8"}, dict, OK),
    "LocalSGD": (plain, {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2}, dict, OK),
    "low precision": (plain, {"amp_level": "O1"}, dict, OK),
    "rows": (looked_up, {"sparse_embeddings": True}, dict, OK),
    "dense table": (looked_up, {}, dict, OK),
    "gathered": (gathered, {}, dict, OK),
    "synchronised": (normed, {"sync_batch_norm": True}, dict, OK),
    "joint count": (by_a_joint_count, {}, lambda: {"count": np.array([ROWS], "float32")}, OK),
    "table": (with_a_table, {}, lambda: {"table": np.ones((3, 4), "float32")}, OK),
    "in time": (in_time, {}, lambda: {"words": random().standard_normal((3, ROWS, 4)).astype("float32")}, OK),
    "masked": (masked, {"average_over": "samples"}, some_valid, OK),
    "masked, merged": (masked, {"average_over": "samples", "accumulate_steps": 2}, some_valid, OK),
    "none valid on a rank": (masked, {"average_over": "samples"}, none_valid, OK),
    "unequal": (plain, {"average_over": "samples"}, fed_unequally, OK),
    "summed": (summed, {"average_over": "samples"}, dict, OK),
    "made up for": (made_up_for, {}, dict, OK),
    "unequal, over ranks": (plain, {"average_over": "ranks"}, fed_unequally, NOT),
    "summed, over ranks": (summed, {"average_over": "ranks"}, dict, NOT),
    "places": (with_places, {}, lambda: {"places": random().permutation(ROWS)[:4]}, NOT),
    "by hand": (plain, {}, dict, UNTRIED),
    "masked, over ranks": (masked, {"average_over": "ranks"}, some_valid, NOT),
    "normed": (normed, {}, dict, NOT),
    "met": (met, {}, dict, NOT),
    "neighbours": (neighbours, {}, dict, NOT),
    "branching": (branching, {}, dict, UNTRIED),
    "own table": (of_a_fixed_table, {}, lambda: {"table": random().random((3, 4), "float32")}, UNTRIED),
    "levels": (plain, {}, lambda: {"x": levels()}, UNTRIED),
}  # fmt: skip
EXACTLY = [name for name, (*_, said) in CASES.items() if said == OK and name != "low precision"]


def levels() -> Any:
    return paddle.base.create_lod_tensor(np.ones((ROWS, 4), "float32"), [[2, ROWS - 2]], paddle.CPUPlace())


def train(name: str) -> str:
    """Train one program; returns the digest of what it ends with."""
    build, settings, more, _ = CASES[name]
    main, startup, scope = static.Program(), static.Program(), static.Scope()
    with static.program_guard(main, startup), static.scope_guard(scope), paddle.utils.unique_name.guard():
        paddle.seed(7 + fleet.worker_index())
        loss = build(static.data("x", [None, 4], "float32"), static.data("y", [None, 1], "float32"))
        optimizer = fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), Profile(**settings))
        if name == "by hand":
            trained = main.global_block().all_parameters()
            optimizer.apply_gradients(list(zip(trained, static.gradients(loss, trained), strict=True)))
        else:
            optimizer.minimize(loss)
        exe, numbers = static.Executor(fleet.place()), random()
        exe.run(startup)
        for _ in range(STEPS):
            feed = {
                name: numbers.standard_normal((ROWS, size)).astype("float32") for name, size in (("x", 4), ("y", 1))
            }
            assert len(exe.run(main, feed=[feed | more()], fetch_list=[loss])) == 1
        names = [each.name for each in main.global_block().all_parameters()]
        return digest({name: np.array(scope.find_var(name).get_tensor()) for name in sorted(set(names))})


def worker() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.logger.addHandler(handler)
    paddle.enable_static()
    fleet.init(is_collective=True)
    said, ends = {}, {}
    for name in CASES:
        lines.clear()
        log._logged.clear()
        ends[name] = train(name)
        said[name] = [line for line in lines if "verified: " in line]
    report(said=said, ends=ends)


def on_ranks(folder: Path, steps: str, timeout_seconds: int = 240) -> RanksResult:
    env = {"FLEET_TRAIN_VERIFY_JOINT_BATCH": steps, "FLAGS_new_executor_serial_run": "1"}
    return run_ranks(Path(__file__), 2, folder=folder, env=env, timeout_seconds=timeout_seconds)


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return on_ranks(tmp_path_factory.mktemp("verified"), str(STEPS))


def line_of(verified: RanksResult, name: str) -> str:
    lines: Sequence[str] = verified.values[0]["said"][name]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(verified: RanksResult, name: str) -> None:
    assert line_of(verified, name).startswith(CASES[name][3])
    assert verified.values[1]["said"][name] == []


@pytest.mark.parametrize("name", EXACTLY)
def test_it_is_the_joint_batchs_to_rounding(verified: RanksResult, name: str) -> None:
    words = line_of(verified, name).split(" the joint batch's to ")[1]
    assert float(words.split(";")[0].split()[0]) < (1e-4 if name == "synchronised" else 1e-5)


def test_the_likely_cause_is_named(verified: RanksResult) -> None:
    assert "batch norm takes each rank's own batch (test_verify.py, line" in line_of(verified, "normed")
    assert "samples meet" in line_of(verified, "met")
    assert "with average_over: ranks, it divides by a number of valid samples" in line_of(
        verified, "masked, over ranks"
    )
    assert "but for the factor 0.5, by which the script" in line_of(verified, "joint count")
    assert "average_over: ranks counts unequal batches alike (3, 9 samples)" in line_of(verified, "unequal, over ranks")
    assert "it is 1/2 of it everywhere: the loss is a sum" in line_of(verified, "summed, over ranks")
    assert "but for the factor 0.5, by which the script" in line_of(verified, "made up for")
    assert "'places' has not one row per sample" in line_of(verified, "places")
    assert "the script makes its gradients itself" in line_of(verified, "by hand")
    assert "what is drawn at random there (a branch" in line_of(verified, "branching")
    assert "LoD" in line_of(verified, "levels")
    assert line_of(verified, "plain").endswith(f"in {STEPS} steps")


def test_the_training_does_not_notice(verified: RanksResult, tmp_path: Path) -> None:
    unseen = on_ranks(tmp_path, "0")
    assert unseen.of_all("ends") == verified.of_all("ends")
    assert not any(unseen.values[0]["said"].values())


if __name__ == "__main__":
    worker()
