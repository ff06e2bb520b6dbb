"""NaN and infinity in a gradient of one rank: with ``nonfinite: skip`` a step leaves nothing, on every rank and in all
state; by default the job ends and says whose gradient it was. The ranks run this file, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.convert.session import current
from fleet_train.profile import Profile
from fleet_train.selftest.training import (
    BATCH_NORM,
    SAMPLES_PER_RANK,
    Batch,
    Trained,
    TriedNetwork,
    batches,
    share,
)
from tests.parallel.strategies import MLP
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import report

BUCKETS: dict[str, Any] = {"fuse_parameter_groups_size": 2, "nccl_comm_num": 2}
LOCAL: dict[str, Any] = {"use_local_sgd": True, "local_sgd_is_warm_steps": 1, "local_sgd_steps": 3}
SKIP = {"nonfinite": "skip"}


def looked_up(features: Any) -> Any:
    table = nn.Embedding(400, 8)
    ids = (features.abs() * 100).cast("int64").clip(0, 399)
    return nn.Linear(8, 5)(F.tanh(table(ids).mean(axis=1) * features.mean(axis=1, keepdim=True)))


def in_16_bits(features: Any) -> Any:
    """With a parameter, and so a gradient, of bfloat16 beside float32."""
    zero = nn.initializer.Constant(0.0)
    shift = paddle.create_parameter([int(features.shape[1])], "bfloat16", "shift", default_initializer=zero)
    return nn.Linear(int(features.shape[1]), 5)((features.astype("bfloat16") + shift).astype("float32"))


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


def adam() -> Any:
    return paddle.optimizer.AdamW(0.01, grad_clip=nn.ClipGradByGlobalNorm(0.5))


def sgd() -> Any:
    return paddle.optimizer.SGD(0.05)


# Network, optimizer, knobs, and the runs of the program that a spoilt one takes with it.
CASES: dict[str, tuple[TriedNetwork, Callable[[], Any], dict[str, Any], int]] = {
    "momentum": (MLP, momentum, BUCKETS, 1),
    "adam": (MLP, adam, BUCKETS, 1),
    "merge": (MLP, adam, BUCKETS | {"accumulate_steps": 2}, 2),
    "sharding": (MLP, adam, BUCKETS | {"sharding": True}, 1),
    "rows": (TriedNetwork("looked_up", looked_up), sgd, {"sparse_embeddings": True}, 1),
    "rows, merge": (TriedNetwork("looked_up", looked_up), adam, {"sparse_embeddings": True, "accumulate_steps": 2}, 2),
    "bf16": (MLP, adam, {"compression": "bf16"}, 1),
    "16-bit gradients": (TriedNetwork("in_16_bits", in_16_bits), sgd, {}, 1),
    "int8": (MLP, momentum, BUCKETS | {"compression": "int8"}, 1),
    "int4, merge": (MLP, adam, {"compression": "int4", "accumulate_steps": 2}, 2),
    "int8, sharding": (MLP, adam, BUCKETS | {"compression": "int8", "sharding": True}, 1),
    "powersgd": (MLP, momentum, BUCKETS | {"compression": "powersgd", "powersgd_start_step": 1}, 1),
    "batch norm": (BATCH_NORM, momentum, {}, 1),
    "synchronised batch norm": (BATCH_NORM, momentum, {"sync_batch_norm": True}, 1),
}
LOCAL_CASES = {
    "local": (MLP, momentum, LOCAL),
    "local, adam": (MLP, adam, LOCAL | {"accumulate_steps": 2}),
    "local, int8": (MLP, momentum, LOCAL | {"local_sgd_dtype": "int8", "outer_optimizer": "slowmo"}),
}
LATE = ("momentum", "merge", "sharding", "batch norm", "local", "local, adam")
"""Tried where calls are enqueued and end late, as on GPUs, and no value may be read in a step."""
SPOILT = ((4, 1, np.nan), (7, 0, np.inf))
"""Runs of the program (0, 1, ...), the rank that is spoilt in it, and by what."""
RUNS = 10


def made(network: TriedNetwork, optimizer: Callable[[], Any], knobs: dict[str, Any]) -> Trained:
    paddle.seed(3)
    return Trained(network, lambda inner: fleet.distributed_optimizer(inner, Profile(**knobs)), optimizer)


def own_batches() -> list[Batch]:
    mine = share(fleet.worker_index())
    joint = batches(RUNS, SAMPLES_PER_RANK * fleet.worker_num(), 7)
    return [(features[mine].copy(), labels[mine]) for features, labels in joint]


def spoilt(data: Sequence[Batch]) -> list[Batch]:
    copies = [(features.copy(), labels) for features, labels in data]
    for run, rank, value in SPOILT:
        if rank == fleet.worker_index():
            copies[run][0][1, 2] = value
    return copies


def kept_state(trained: Trained) -> dict[str, Any]:
    with paddle.static.scope_guard(trained.scope):
        memories = [
            (f"{number} {name}", value.numpy())
            for main, exchange in current().exchanges
            if main is trained.main
            for number, (_, method) in enumerate(exchange.memories)
            for name, value in method.state().items()
        ]
    return {name: value for name, value in trained.state().items() if name != "skipped_updates"} | dict(memories)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def compared(name: str) -> dict[str, Any]:
    """A training with spoilt runs, beside one without them."""
    network, optimizer, knobs, taken = CASES[name]
    with_them = made(network, optimizer, knobs | SKIP)
    data = own_batches()
    for batch in spoilt(data):
        with_them.step(*batch)
    without = made(network, optimizer, knobs)
    start = without.parameters()
    missing = {run // taken for run, _, _ in SPOILT}
    for run, batch in enumerate(data):
        if run // taken not in missing:
            without.step(*batch)
    ours, expected = kept_state(with_them), kept_state(without)
    if name == "batch norm":  # each rank's own statistics follow the batches that it has seen
        statistics = {each for each in ours if "batch_norm" in each and each.endswith(("w_1", "w_2"))}
        assert all(np.isfinite(ours[each]).all() for each in statistics)
        ours, expected = ({k: v for k, v in state.items() if k not in statistics} for state in (ours, expected))
    moved = differing(without.parameters(), start)
    return {"differ": differing(ours, expected), "moved": len(moved), "skipped": skipped_of(with_them)}


def skipped_of(trained: Trained) -> int:
    return int(trained.state()["skipped_updates"].item())


def local(name: str) -> dict[str, Any]:
    """What a spoilt local step changes on a rank."""
    network, optimizer, knobs = LOCAL_CASES[name]
    trained = made(network, optimizer, knobs | SKIP)
    merged, changed, before = knobs.get("accumulate_steps", 1), list[str](), trained.state()
    runs = {run // merged for run, _, _ in SPOILT}
    averaged = {update for update in range(RUNS) if update == 0 or update % 3 == 0}
    for run, batch in enumerate(spoilt(own_batches())):
        if run % merged == 0:
            before = trained.state()
        trained.step(*batch)
        update = run // merged
        if (run + 1) % merged == 0 and update in runs and update not in averaged:
            now = trained.state()
            changed += [each for each in differing(now, before) if each != "skipped_updates" and "merge" not in each]
    finite = all(np.isfinite(value).all() for value in trained.state().values())
    return {"differ": changed, "moved": int(finite), "skipped": skipped_of(trained)}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    if sys.argv[1] in ("skip", "late"):
        names = LATE if sys.argv[1] == "late" else (*CASES, *LOCAL_CASES)
        found = {name: compared(name) if name in CASES else local(name) for name in names}
        report(fleet.worker_index(), found=found)
        return
    trained = made(MLP, sgd, LOCAL if sys.argv[1] == "local" else BUCKETS)
    for batch in spoilt(own_batches()):
        trained.step(*batch)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return run_ranks(Path(__file__), 2, folder=tmp_path_factory.mktemp("skip"), args=["skip"], timeout_seconds=200)


@pytest.mark.parametrize("name", [*CASES, *LOCAL_CASES])
def test_a_step_that_all_ranks_skip_leaves_nothing(ended: RanksResult, name: str) -> None:
    for rank in ended.of_all("found"):
        assert rank[name]["differ"] == []
        assert rank[name]["moved"]
        assert rank[name]["skipped"] == len(SPOILT)


def test_the_rank_with_the_gradient_is_warned_of_each_skipped_step(ended: RanksResult) -> None:
    first, second = (rank.output for rank in ended.ranks)
    assert "holds NaN" in second
    assert "on rank 1 (127.0.0.2:" in second
    assert "in step 5; no rank updates in this step (nonfinite: skip)" in second
    assert "holds infinity" in first or "holds NaN" in first
    assert "in step 5;" not in first


@pytest.mark.long
def test_on_streams_a_skipped_step_leaves_nothing_and_no_value_is_read_in_it(tmp_path: Path) -> None:
    ended = run_ranks(Path(__file__), 2, folder=tmp_path, args=["late"], timeout_seconds=200, late_streams=True)
    for rank in ended.of_all("found"):
        assert {name: (rank[name]["differ"], rank[name]["skipped"]) for name in LATE} == dict.fromkeys(
            LATE, ([], len(SPOILT))
        )


@pytest.mark.long
def test_on_streams_the_job_ends_a_step_later(tmp_path: Path) -> None:
    args = ["synchronous"]
    result = run_ranks(Path(__file__), 2, folder=tmp_path, args=args, check=False, late_streams=True)
    assert result.exit_codes[1] == 13, result.report()
    assert "a gradient holds NaN or infinity on rank 1" in result.ranks[1].output
    assert "in step 5 (updates are counted from 1)" in result.ranks[1].output


@pytest.mark.parametrize("kind", ["synchronous", "local"])
def test_by_default_the_job_ends_in_that_step_and_names_the_rank_and_its_feed(tmp_path: Path, kind: str) -> None:
    result = run_ranks(Path(__file__), 2, folder=tmp_path, args=[kind], check=False)
    first, second = result.ranks
    assert (first.exit_code, second.exit_code) == (11, 13), result.report()
    assert "holds NaN" in second.output
    assert "on rank 1 (127.0.0.2:" in second.output
    assert "in step 5 (updates are counted from 1)" in second.output
    assert "What was fed is not finite itself: 'features' in rows 1" in second.output
    assert "stopped with NotFinite: the gradient of" in first.output


if __name__ == "__main__":
    main()
