"""Every strategy where collectives are enqueued and end late, as on GPUs: the bits of the thread engine. On streams of
their own, which prove themselves in the first three steps, and on the calculation stream.

The stream engine is the real one; its groups are Gloo's, whose buffers hold NaN until they are waited for
(`tests.support.late`). Whatever reads a value in a step raises.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.collectives import own_streams
from fleet_train.collectives.engines import CALC, OWN
from fleet_train.convert.fleet import _current
from fleet_train.convert.passes.pipeline import LossScaler
from fleet_train.profile import Profile
from fleet_train.selftest.training import (
    CLASSES,
    FEATURES,
    SAMPLES_PER_RANK,
    Trained,
    TriedNetwork,
    batches,
    share,
)
from fleet_train.train.numerics import SkipNotFinite
from tests.parallel import strategies
from tests.parallel.strategies import (
    DILOCO,
    LARGE,
    LOCAL,
    MLP,
    NORMS,
    STREAMING,
    adam,
    adamw,
    decaying,
    momentum,
    sgd,
)
from tests.support.late import ending_late, install_tripwire
from tests.support.ranks import run_ranks
from tests.support.worker import report
from tests.unit.passes.training import loss_scaling

STEPS = 12
Arrays = dict[str, np.ndarray]
Between = Callable[[Trained, int], Arrays]
Wrap = Callable[[Any, Profile], Any]


def nothing(_: Trained, __: int) -> Arrays:
    return {}


def distributed(inner: Any, profile: Profile) -> Any:
    return fleet.distributed_optimizer(inner, profile)


@dataclass(frozen=True)
class Case:
    """``between`` is called behind every step (from 1) and may return arrays to compare; ``wrap`` makes the optimizer;
    in step ``overflow`` rank 1 is fed an infinity. ``loads``: how often other state is loaded."""

    network: TriedNetwork
    make: Callable[[], Any]
    settings: dict[str, Any]
    between: Between = nothing
    wrap: Wrap = distributed
    overflow: int = 0
    loads: int = 0


def saved_after(step: int, loaded_after: int = 0) -> Between:
    """Save behind one step, and perhaps take it back behind a later one."""

    def between(trained: Trained, now: int) -> Arrays:
        with paddle.static.scope_guard(trained.scope):
            if now == step:
                fleet.save_persistables(trained.exe, "saved", trained.main)
            if now == loaded_after:
                fleet.load_persistables(trained.exe, "saved", trained.main)
        return trained.state() if now in (step, loaded_after) else {}

    return between


def synchronised_after(step: int) -> Between:
    def between(trained: Trained, now: int) -> Arrays:
        if now != step:
            return {}
        with paddle.static.scope_guard(trained.scope):
            fleet.synchronize_parameters(trained.main)
        return trained.state()

    return between


def reduced_after(*steps: int) -> Between:
    """A script's own collectives: they have the communicator of the averaging that is under way."""

    def between(trained: Trained, now: int) -> Arrays:
        if now not in steps:
            return {}
        mine = np.full([3], now + 0.5 * fleet.worker_index(), "float32")
        parameters = {f"mean of {n}": fleet.all_reduce(v, op="mean") for n, v in trained.parameters().items()}
        return {"sum": fleet.all_reduce(mine), "largest": fleet.all_reduce(mine, op="max"), **parameters}

    return between


def skipping(inner: Any, profile: Profile) -> Any:
    """Updates that are not finite are skipped, decided on what all ranks hold alike."""
    optimizer = fleet.distributed_optimizer(inner, profile)
    optimizer.around_update(SkipNotFinite().guard)
    return optimizer


class ScaledLoss:
    """A dynamic loss scale, as mixed precision in float16 has it on GPUs; here in float32."""

    def __init__(self, inner: Any, profile: Profile) -> None:
        self._inner, self._profile = inner, profile
        self._learning_rate = inner._learning_rate

    def minimize(self, loss: Any, _: Any) -> None:
        scaler = LossScaler(loss_scaling(incr_every_n_steps=4, decr_every_n_nan_or_inf=1, decr_ratio=0.5))
        inner = Scaled(self._inner, lambda pairs: scaler.apply(pairs, self._inner.apply_gradients))
        optimizer = fleet.distributed_optimizer(inner, self._profile)
        optimizer.apply_gradients(optimizer.backward(scaler.scaled(loss)))


class Scaled:
    """A Paddle optimizer whose update is made by ``apply``."""

    def __init__(self, inner: Any, apply: Callable[[Any], Any]) -> None:
        self._inner, self.apply_gradients = inner, apply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TwoOptimizers:
    """One optimizer for the first half of the parameters and one for the rest, with losses of their own."""

    def __init__(self, inner: Any, profile: Profile) -> None:
        self._profile = profile
        self._learning_rate = inner._learning_rate

    def minimize(self, loss: Any, startup: Any) -> None:
        parameters = paddle.static.default_main_program().global_block().all_parameters()
        half = len(parameters) // 2
        for part, rate, target in ((parameters[:half], 0.1, loss), (parameters[half:], 0.01, loss * loss)):
            inner = paddle.optimizer.Adam(rate, epsilon=1e-3, parameters=part)
            fleet.distributed_optimizer(inner, self._profile).minimize(target, startup)


def odd_shapes(features: Any) -> Any:
    """Buffers that no number of ranks divides, one of them a single element, and a gradient without any axis."""
    hidden = paddle.tanh(nn.Linear(FEATURES, 7, bias_attr=False)(features))
    hidden = hidden * paddle.static.create_parameter([], "float32", name="gain")
    hidden = paddle.tanh(nn.Linear(7, 13)(hidden)) + paddle.static.create_parameter([1], "float32", name="shift")
    return nn.Linear(13, CLASSES)(hidden)


ODD = TriedNetwork("odd_shapes", odd_shapes)
# Warm-up 3, period 4: an averaging begins behind step 7 and is taken in behind step 10.
OVERLAP = LOCAL | {"local_sgd_overlap_steps": 3}


POWERSGD = {"compression": "powersgd"}
GROUPED = {"use_hierarchical_allreduce": True}
MERGE = {"accumulate_steps": 3}
NORM = {"sync_batch_norm": True}
THREADS = {"num_threads": 4}
# Cut alike for both engines, whatever each measures of the link: blocks follow the cut.
FEW_BITS = {"compression": "int4", "fuse_grad_size_in_MB": 1.0}
BUCKETS = {"fuse_parameter_groups_size": 2, "last_comm_group_size_MB": 0.0001}
CHECKED = {"divergence_check_steps": 1}
UNFUSED = {"fuse_all_reduce_ops": False}

CASES: dict[str, Case] = {
    # A device has random numbers of its own.
    **{
        name: Case(one.network, one.make, one.settings)
        for name, one in strategies.CASES.items()
        if one.settings.get("quantised_rounding") != "stochastic" and "collective_stream" not in one.settings
    },
    "odd shapes": Case(ODD, adam, UNFUSED),
    "odd shapes, powersgd": Case(ODD, sgd, BUCKETS | POWERSGD | {"powersgd_min_compression": 1.0}),
    "two optimizers, executor's threads": Case(LARGE, adam, THREADS | BUCKETS, wrap=TwoOptimizers),
    "loss scale": Case(MLP, momentum, BUCKETS, wrap=ScaledLoss, overflow=5),
    "loss scale, int4": Case(LARGE, momentum, FEW_BITS, wrap=ScaledLoss, overflow=5),
    "amp O1, overflow": Case(MLP, momentum, {"amp_level": "O1"}, wrap=skipping, overflow=5),
    "overflow": Case(MLP, adam, BUCKETS, wrap=skipping, overflow=5),
    "overflow, merge": Case(MLP, adam, MERGE, wrap=skipping, overflow=5),
    "int4, merge, loaded": Case(
        LARGE, momentum, BUCKETS | FEW_BITS | {"accumulate_steps": 2}, saved_after(4, 7), loads=1
    ),
    "streaming diloco, loaded in the middle": Case(MLP, adamw, STREAMING, saved_after(6, loaded_after=9), loads=1),
    "powersgd, cold and forgetful": Case(
        LARGE, sgd, POWERSGD | {"powersgd_warm_start": False, "powersgd_error_feedback": False}
    ),
    "powersgd, loaded": Case(LARGE, sgd, POWERSGD, saved_after(4, 7), loads=1),
    "sync batch norm, merge, all passes": Case(
        NORMS, momentum, NORM | {"accumulate_steps": 2, "recompute_segments": 2, "amp_level": "O1"}
    ),
    "merge, loaded in the middle of an update": Case(MLP, adam, MERGE, saved_after(4, loaded_after=6), loads=1),
    "merge, synchronised and reduced": Case(MLP, adam, MERGE, reduced_after(2, 3, 5)),
    "few barriers": Case(MLP, adam, {"barrier_every_steps": 5} | BUCKETS, saved_after(7)),
    "few barriers, merge, reduced": Case(
        MLP, adam, {"barrier_every_steps": 3, "accumulate_steps": 2}, reduced_after(9)
    ),
    "checked in every step": Case(ODD, adam, CHECKED | BUCKETS),
    "checked in every step, overlap, diloco": Case(MLP, adam, OVERLAP | DILOCO | CHECKED),
    "overlap, synchronised in the middle": Case(MLP, momentum, OVERLAP, synchronised_after(8)),
    "overlap, loaded in the middle": Case(MLP, adam, DILOCO | OVERLAP, saved_after(5, loaded_after=9), loads=1),
    "overlap, reduced beside it": Case(MLP, momentum, OVERLAP, reduced_after(7, 8, 9)),
    "local SGD, adaptive, saved": Case(
        MLP, decaying, LOCAL | {"local_sgd_schedule": "adaptive"}, saved_after(7, loaded_after=8), loads=1
    ),
    "hierarchical, sync batch norm": Case(NORMS, momentum, NORM | GROUPED | BUCKETS),
    "hierarchical, overlap, reduced beside it": Case(MLP, adam, OVERLAP | GROUPED, reduced_after(8)),
    "hierarchical, powersgd": Case(LARGE, sgd, GROUPED | POWERSGD | BUCKETS | {"sync_nccl_allreduce": True}),
}


def train(case: Case, seed: int, start: Arrays | None, device: Any, stream: str = "auto") -> tuple[Arrays, Arrays]:
    """(start, end): everything that the program holds, and at the end what was found between the steps."""
    forced = {"force_hierarchical_allreduce": True} if case.settings.get("use_hierarchical_allreduce") else {}
    # Without a wrap that skips it, the overflow is to reach the methods.
    reaction: Any = {"nonfinite": "ignore"} if case.overflow else {}
    rank, profile = fleet.worker_index(), Profile(**case.settings, **forced, **reaction, collective_stream=stream)
    paddle.seed(seed * 10 + rank)
    trained = Trained(case.network, lambda inner: case.wrap(inner, profile), case.make)
    if start is not None:
        trained.start_from(start)
    start, found = trained.state(), Arrays()
    for step, (features, labels) in enumerate(batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed), 1):
        mine = features[share(rank)]
        if step == case.overflow and rank == 1:
            mine[0, 0] = np.inf
        trained.step(mine, labels[share(rank)])
        if device is not None:
            device.step += 1
        found |= {f"{name} after step {step}": value for name, value in case.between(trained, step).items()}
    return start, trained.state() | found


def compare(case: Case, seed: int) -> list[dict[str, Any]]:
    """What was seen on own streams, and on the calculation stream."""
    start, threads = train(case, seed, None, None)
    return [on_streams(case, seed, start, threads, stream) for stream in (OWN, CALC)]


def on_streams(
    case: Case, seed: int, start: Arrays, threads: Arrays, stream: str, reads_early: bool = False
) -> dict[str, Any]:
    job = _current().job
    with ending_late(job, seed, reads_early) as (calls, device):
        _, streams = train(case, seed, start, device, stream)
        ended_on = job.engine.stream
    same = [name for name in threads if np.array_equal(threads[name], streams.get(name), equal_nan=True)]
    return {
        "differing": sorted(threads.keys() - same) + sorted(streams.keys() - threads.keys()),
        "moved": any(not np.array_equal(value, threads[name]) for name, value in start.items()),
        "finite": all(bool(np.isfinite(value).all()) for value in streams.values()),
        "begun": calls.begun,
        "early": device.early_reads,
        "ended on": ended_on,
    }


def read_early(case: Case, seed: int) -> list[dict[str, Any]]:
    """NCCL reads each buffer before it has been computed: with the proof, and without it."""
    start, threads = train(case, seed, None, None)
    seen = []
    for steps, over in ((own_streams.PROOF_STEPS, "samples"), (0, "ranks")):  # counts of 0 would give NaN
        case = replace(case, settings=case.settings | {"average_over": over})
        with (
            mock.patch.object(own_streams, "PROOF_STEPS", steps),
            contextlib.redirect_stderr(io.StringIO()) as told,
        ):
            seen.append(on_streams(case, seed, start, threads, OWN, reads_early=True) | {"told": told.getvalue()})
    return seen


def main() -> None:
    """Compare the cases that the first argument names, as JSON."""
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    install_tripwire()
    results = {}
    for name in json.loads(sys.argv[1]):
        print(f"case {name}", flush=True)  # in the log of a rank that fails
        results[name] = compare(CASES[name], seed=list(CASES).index(name))
    results["read early"] = read_early(Case(ODD, adam, CHECKED | BUCKETS), seed=3)
    report(fleet.worker_index(), cases=results)


Ranks = list[list[dict[str, Any]]]
Found = Callable[[str], Ranks]

HIERARCHICAL = [name for name in CASES if "hierarchical" in name or "local groups" in name]
FLAT = [name for name in CASES if name not in HIERARCHICAL]
SHORT = FLAT[::6]
# Ranks, nodes, and the cases of one launch; all but the first are long.
LAUNCHES = [(2, 2, SHORT), (2, 2, [name for name in FLAT if name not in SHORT]), (4, 2, HIERARCHICAL)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks found for a case; each launch is made once."""

    @cache
    def launch(number: int) -> Ranks:
        world_size, nodes, chosen = LAUNCHES[number]
        result = run_ranks(
            Path(__file__),
            world_size,
            folder=tmp_path_factory.mktemp("streams"),
            nodes=nodes,
            args=[json.dumps(chosen)],
            timeout_seconds=400,
        )
        cases: Ranks = result.of_all("cases")
        return cases

    launch_of = {"read early": 0} | {name: number for number, (_, _, chosen) in enumerate(LAUNCHES) for name in chosen}
    return lambda name: [rank[name] for rank in launch(launch_of[name])]


@pytest.mark.parametrize(
    "name",
    [
        name if number == 0 else pytest.param(name, marks=pytest.mark.long)
        for number, (_, _, chosen) in enumerate(LAUNCHES)
        for name in chosen
    ],
)
def test_late_streams_give_the_bits_of_the_threads(found: Found, name: str) -> None:
    for rank, streams in enumerate(found(name)):
        for stream, seen in zip((OWN, CALC), streams, strict=True):
            assert seen["differing"] == [], f"rank {rank}, {stream}"
            assert seen["finite"], f"rank {rank} has read what had not ended"
            assert seen["moved"], f"rank {rank} was not trained"
            assert seen["begun"] > 0, f"rank {rank} has begun nothing on its streams"
            assert seen["early"] <= allowed_reads(CASES[name]), f"rank {rank} has waited for its device in a step"
            assert seen["ended on"] == stream, f"rank {rank}: the proof has failed"


def test_what_is_read_too_early_is_seen_by_the_proof_and_not_by_the_comparison_of_replicas(found: Found) -> None:
    """All ranks get the same wrong sum: replicas, which are compared in every step, stay equal."""
    for rank, (proven, unproven) in enumerate(found("read early")):
        assert proven["differing"] == [], "nothing wrong is used"
        assert proven["ended on"] == CALC
        assert ("all ranks go on with calc: on" in proven["told"]) == (rank == 0)
        assert bool(re.search(r"start value of '.*': .* differ from", proven["told"])) == (rank == 0)
        assert unproven["ended on"] == OWN
        assert len(unproven["differing"]) > 1
        assert unproven["moved"]


def allowed_reads(case: Case) -> int:
    """Gradient merge reads the program's count up to the first update, and again where other state was loaded."""
    size: int = case.settings.get("accumulate_steps", 1)
    return 0 if size == 1 else size * (1 + case.loads)


if __name__ == "__main__":
    main()
