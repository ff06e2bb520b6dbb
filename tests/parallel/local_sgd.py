"""Run as several ranks: LocalSGD by the product beside the simulator with all ranks in this process."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from itertools import groupby
from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert.session import current, exchange_of
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.selftest import check_profiles
from fleet_train.selftest.check_profiles import Reference
from fleet_train.selftest.training import (
    BATCH_NORM,
    FEATURES,
    SAMPLES_PER_RANK,
    SPARSE,
    Network,
    Trained,
    batches,
    relative_difference,
    share,
)
from tests.parity.networks import NETWORKS
from tests.support.worker import digest, report

STEPS = 17
SELFTEST_STEPS = range(18, 61)
# ethernet_1g is streaming_diloco by another name.
PROFILES = [name for name in profile_names() if load_profile(name).use_local_sgd and name != "ethernet_1g"]

STREAMING = {
    "local_sgd_steps": 6,
    "local_sgd_fragments": 3,
    "local_sgd_overlap_steps": 1,
    "local_sgd_dtype": "int4",
    "outer_optimizer": "diloco",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 3, "local_sgd_steps": 4}


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9, weight_decay=1e-4)


def sgd() -> Any:
    # The only one of Paddle's optimizers on a CPU that takes float64 parameters beside float32 ones.
    return paddle.optimizer.SGD(0.05)


def adam() -> Any:
    return paddle.optimizer.Adam(0.01, epsilon=1e-3)


def adamw() -> Any:
    return paddle.optimizer.AdamW(0.01, epsilon=1e-3, weight_decay=0.02)


def decaying() -> Any:
    return paddle.optimizer.Momentum(paddle.optimizer.lr.ExponentialDecay(0.05, 0.9), 0.9)


def two_dtypes(features: Any) -> Any:
    wide = paddle.static.create_parameter([FEATURES, 12], "float64", name="wide")
    hidden = paddle.tanh(paddle.matmul(features.cast("float64"), wide)).cast("float32")
    return paddle.nn.Linear(12, 5)(hidden)


MLP = NETWORKS[0]
TWO_DTYPES = Network("two_dtypes", two_dtypes)
CASES: dict[str, tuple[Network, Any, dict[str, Any]]] = {
    "constant, keep": (MLP, momentum, {}),
    "two communicators, four buckets": (MLP, momentum, {"nccl_comm_num": 2, "fuse_parameter_groups_size": 2}),
    "adam": (MLP, adam, {}),
    "average momentum": (MLP, momentum, {"local_sgd_momentum": "average"}),
    "reset momentum": (MLP, momentum, {"local_sgd_momentum": "reset"}),
    "doubling": (MLP, momentum, {"local_sgd_schedule": "doubling"}),
    "adaptive": (MLP, decaying, {"local_sgd_schedule": "adaptive", "local_sgd_max_steps": 6}),
    "no warm-up": (MLP, adam, {"local_sgd_is_warm_steps": 0}),
    "slowmo": (MLP, momentum, {"outer_optimizer": "slowmo", "outer_momentum": 0.5}),
    "diloco": (MLP, adam, {"outer_optimizer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9}),
    "diloco without warm-up": (
        MLP,
        adam,
        {"outer_optimizer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9, "local_sgd_is_warm_steps": 0},
    ),
    "bfloat16 differences": (MLP, momentum, {"local_sgd_dtype": "bfloat16"}),
    "hierarchical": (MLP, momentum, {"use_hierarchical_allreduce": True, "nccl_comm_num": 2}),
    "hierarchical, diloco, bfloat16 differences": (
        MLP,
        adam,
        {
            "use_hierarchical_allreduce": True,
            "local_sgd_dtype": "bfloat16",
            "outer_optimizer": "diloco",
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
        },
    ),
    "hierarchical, bf16 warm-up": (
        MLP,
        momentum,
        {"use_hierarchical_allreduce": True, "compression": "bf16", "local_sgd_momentum": "average"},
    ),
    "batch norm": (BATCH_NORM, momentum, {"local_sgd_is_warm_steps": 0}),
    "overlap": (MLP, momentum, {"local_sgd_overlap_steps": 2}),
    "overlap, diloco": (
        MLP,
        adam,
        {"local_sgd_overlap_steps": 3, "outer_optimizer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    "overlap, batch norm, two micro-batches": (
        BATCH_NORM,
        momentum,
        {"local_sgd_overlap_steps": 1, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2, "accumulate_steps": 2},
    ),
    "two dtypes": (TWO_DTYPES, sgd, {}),
    "two dtypes, diloco": (TWO_DTYPES, sgd, {"outer_optimizer": "diloco", "outer_momentum": 0.9}),
    "two dtypes, slowmo, bfloat16 differences": (
        TWO_DTYPES,
        sgd,
        {"outer_optimizer": "slowmo", "outer_momentum": 0.5, "local_sgd_dtype": "bfloat16"},
    ),
    "two dtypes, overlap": (TWO_DTYPES, sgd, {"local_sgd_overlap_steps": 2}),
    "int8 differences": (MLP, momentum, {"local_sgd_dtype": "int8", "quantised_block_size": 64}),
    "int4 differences, stochastic": (
        MLP,
        adam,
        {"local_sgd_dtype": "int4", "quantised_rounding": "stochastic", "quantised_error_feedback": False},
    ),
    "int4 warm-up and differences": (MLP, momentum, {"compression": "int4", "local_sgd_dtype": "int4"}),
    "two dtypes, int8 differences": (TWO_DTYPES, sgd, {"local_sgd_dtype": "int8"}),
    "fragments": (MLP, momentum, {"local_sgd_fragments": 3}),
    "fragments, sequential, two dtypes": (
        TWO_DTYPES,
        sgd,
        {"local_sgd_fragments": 2, "local_sgd_fragment_pattern": "sequential", "outer_optimizer": "slowmo"},
    ),
    "fragments, batch norm, overlap": (
        BATCH_NORM,
        momentum,
        {"local_sgd_is_warm_steps": 0, "local_sgd_fragments": 2, "local_sgd_overlap_steps": 1},
    ),
    "streaming diloco": (MLP, adamw, STREAMING),
    "streaming diloco without warm-up": (MLP, momentum, STREAMING | {"local_sgd_is_warm_steps": 0}),
    "hierarchical, streaming diloco": (MLP, adamw, STREAMING | {"use_hierarchical_allreduce": True}),
}


class CountedAllReduce:
    """Counts the collectives of each step."""

    def __init__(self) -> None:
        self.calls = 0
        for name in ("all_reduce", "all_gather"):
            real = getattr(paddle.distributed.stream, name)
            setattr(paddle.distributed.stream, name, partial(self._call, real))

    def _call(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return real(*args, **kwargs)


def run(network: Network, make: Any, settings: dict[str, Any], seed: int, counted: CountedAllReduce) -> dict[str, Any]:
    rank, world = fleet.worker_index(), fleet.worker_num()
    profile = Profile(**LOCAL | settings)
    paddle.seed(seed * 10 + rank)
    real = Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)
    reference = Reference(network, make, real.state())
    worst, collectives, averagings, equal_at, before = 0.0, [], [], [], counted.calls
    for step, (features, labels) in enumerate(batches(STEPS, SAMPLES_PER_RANK * world, seed), 1):
        real.step(features[share(rank)], labels[share(rank)])
        # What a thread sends between two steps counts to the second: the simulation below takes its time.
        collectives.append(counted.calls - sum(collectives) - before)
        if reference.step(features, labels).averaged:
            averagings.append(step)
        expected = {name: value for name, value in reference.job.ranks[rank].items() if name in real.state()}
        held = {name: value for name, value in real.state().items() if name in expected}
        worst = max(worst, relative_difference(held, expected))
        equal_at.append(digest(real.parameters()))
    with paddle.static.scope_guard(real.scope):
        fleet.synchronize_parameters(real.main)
    reference.job.synchronise()
    expected = {name: reference.job.ranks[rank][name] for name in expected if name in real.parameters()}
    return {
        "difference": worst,
        "synchronised": relative_difference({name: real.parameters()[name] for name in expected}, expected),
        "collectives": collectives,
        "averagings": averagings,
        "digests": equal_at,
        "warm": profile.local_sgd_is_warm_steps,
        "overlap": profile.local_sgd_overlap_steps * profile.accumulate_steps,
        "fragments": profile.local_sgd_fragments,
    }


def run_profile(name: str) -> dict[str, Any]:
    """The profile as the selftest trains it with each of SELFTEST_STEPS, made equal at the end of each."""
    groups = groupby(SELFTEST_STEPS, lambda steps: check_profiles.fit(load_profile(name), steps).profile)
    ends = [end for profile, steps in groups for end in every_end(profile, list(steps))]
    checked = check_profiles._check_profile(current().job, name, 50, seed=0)
    return {"ends": ends, "check": checked.line}


def every_end(profile: Profile, ends: list[int]) -> list[dict[str, Any]]:
    """One run of the ranks and one of the simulator; after each of ``ends`` both are made equal, and put back."""
    rank, world = fleet.worker_index(), fleet.worker_num()
    # Of many elements: one that is rounded to the other side is a small share of the movement.
    real = Trained(SPARSE, lambda inner: fleet.distributed_optimizer(inner, profile), check_profiles._optimizer)
    exchange, start, found = exchange_of(real.main), real.state(), []
    reference = Reference(SPARSE, check_profiles._optimizer, start)
    for step, (features, labels) in enumerate(batches(ends[-1], SAMPLES_PER_RANK * world, seed=0), 1):
        real.step(features[share(rank)], labels[share(rank)])
        reference.step(features, labels)
        if step not in ends:
            continue
        held, underway, job = real.state(), exchange.averaging._underway, copy.deepcopy(reference.job)
        with paddle.static.scope_guard(real.scope):
            fleet.synchronize_parameters(real.main)
        job.synchronise()
        ended = check_profiles.Run(start, {}, real.parameters(), 0.0)
        found.append(
            {
                "steps": step,
                "difference": ended.difference(ended.end, job.ranks[rank]),
                "digest": digest(ended.end),
                "underway": underway is not None,
            }
        )
        real.start_from(held)
        exchange.averaging._underway = underway
    return found


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    counted = CountedAllReduce()
    chosen = json.loads(sys.argv[1])
    report(
        fleet.worker_index(),
        cases={name: run(*case, seed, counted) for seed, (name, case) in enumerate(CASES.items()) if name in chosen},
        profiles={name: run_profile(name) for name in PROFILES if name in chosen},
    )


if __name__ == "__main__":
    main()
