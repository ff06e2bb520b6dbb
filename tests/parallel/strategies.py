"""Run as several ranks: each strategy of a profile through the facade, beside the simulator of all ranks, and beside
one process with the joint batch, which the synchronous ones without compression equal.

The first argument names cases, as JSON. The networks and optimizers serve the other scripts of this folder as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.convert.passes.pipeline import merge_gradients
from fleet_train.profile import Profile
from fleet_train.selftest.check_profiles import Reference
from fleet_train.selftest.training import (
    BATCH_NORM,
    CLASSES,
    FEATURES,
    SAMPLES_PER_RANK,
    SEVERAL_BUCKETS,
    Trained,
    TriedNetwork,
    batches,
    relative_difference,
    share,
)
from tests.support.worker import digest, report
from tests.unit.passes.training import how_far_moved


def mlp(features: Any) -> Any:
    hidden = F.tanh(nn.Linear(FEATURES, 24)(features))
    return nn.Linear(12, CLASSES)(F.tanh(nn.Linear(24, 12)(hidden)))


def convolution_with_frozen_batch_norm(features: Any) -> Any:
    norm = nn.BatchNorm2D(6, use_global_stats=True)  # statistics are fixed, scale and shift are trained
    hidden = F.tanh(norm(nn.Conv2D(1, 6, 3, padding=1)(features.reshape([-1, 1, 4, 4]))))
    return nn.Linear(6 * 16, CLASSES)(hidden.flatten(1))


def shared_weights(features: Any) -> Any:
    shared = nn.Linear(FEATURES, FEATURES)  # its gradient is the sum over two uses
    return nn.Linear(FEATURES, CLASSES)(F.tanh(shared(F.tanh(shared(features)))))


def parameter_without_gradient(features: Any) -> Any:
    nn.Linear(FEATURES, 7)(features)  # not part of the loss
    frozen = nn.Linear(FEATURES, FEATURES)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    return nn.Linear(FEATURES, CLASSES)(F.tanh(frozen(features)))


def two_dtypes(features: Any) -> Any:
    wide = paddle.static.create_parameter([FEATURES, 12], "float64", name="wide")
    hidden = paddle.tanh(paddle.matmul(features.cast("float64"), wide)).cast("float32")
    return nn.Linear(12, CLASSES)(hidden)


# A bias in front of a batch norm would hold rounding noise only.
def two_norms(features: Any) -> Any:
    """Two branches that talk: the data alone does not say which of them talks first."""
    left, right = (nn.BatchNorm1D(9)(nn.Linear(FEATURES, 9, bias_attr=False)(features)) for _ in range(2))
    return nn.Linear(9, CLASSES)(F.tanh(left) + F.tanh(right))


def residual(features: Any) -> Any:
    """The norm of the shortcut shares its exchanges with the one at the end of the branch."""
    convolution = partial(nn.Conv2D, bias_attr=False)
    image = features.reshape([-1, 1, 4, 4])
    branch = F.tanh(nn.BatchNorm2D(3)(convolution(1, 3, 3, padding=1)(image)))
    branch = nn.BatchNorm2D(4, data_format="NHWC")(convolution(3, 4, 3, padding=1)(branch).transpose([0, 2, 3, 1]))
    shortcut = nn.BatchNorm2D(4, momentum=0.5)(convolution(1, 4, 1)(image))
    return nn.Linear(64, CLASSES)(F.tanh(branch.transpose([0, 3, 1, 2]) + shortcut).flatten(1))


def convolutions(features: Any) -> Any:
    """Of several kinds, above one another."""
    hidden = F.tanh(nn.Conv2D(1, 6, 3, padding=1)(features.reshape([-1, 1, 4, 4])))
    hidden = F.tanh(nn.Conv2D(6, 6, 3, padding=1, groups=6)(hidden))
    hidden = F.tanh(nn.Conv2D(6, 4, 3, stride=2, padding=1, bias_attr=False)(hidden))
    return nn.Linear(16, CLASSES)(hidden.flatten(1))


MLP, LARGE, TWO_DTYPES = TriedNetwork("mlp", mlp), SEVERAL_BUCKETS, TriedNetwork("two_dtypes", two_dtypes)
NORMS, RESIDUAL = TriedNetwork("two_norms", two_norms), TriedNetwork("residual", residual)
FROZEN_NORM = TriedNetwork("frozen_norm", convolution_with_frozen_batch_norm)
CONVOLUTIONS = TriedNetwork("convolutions", convolutions)
OTHERS = [TriedNetwork(build.__name__, build) for build in (shared_weights, parameter_without_gradient)]


def sgd() -> Any:
    # The only one of Paddle's optimizers on a CPU that takes float64 parameters beside float32 ones.
    return paddle.optimizer.SGD(0.05)


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9, weight_decay=1e-4)


def decaying() -> Any:
    return paddle.optimizer.Momentum(paddle.optimizer.lr.ExponentialDecay(0.05, 0.9), 0.9)


def adam() -> Any:
    return paddle.optimizer.Adam(0.01, epsilon=1e-3)


def adamw() -> Any:
    return paddle.optimizer.AdamW(0.01, epsilon=1e-3, weight_decay=0.02)


def clipped() -> Any:
    clip = nn.ClipGradByGlobalNorm(0.1)
    return paddle.optimizer.AdamW(0.01, epsilon=1e-3, weight_decay=0.05, grad_clip=clip)


Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    network: TriedNetwork
    make: Callable[[], Any]
    settings: Settings

    @property
    def is_simulated(self) -> bool:
        """Ranks that talk within their passes are not, and the simulator has no clip."""
        return not self.settings.get("sync_batch_norm") and self.make is not clipped

    @property
    def is_local(self) -> bool:
        return bool(self.settings.get("use_local_sgd"))

    @property
    def steps(self) -> int:
        return 17 if self.is_local else 12


LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 3, "local_sgd_steps": 4}
COLD = LOCAL | {"local_sgd_is_warm_steps": 0}
DILOCO = LOCAL | {"outer_optimizer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9}
SLOWMO = LOCAL | {"outer_optimizer": "slowmo", "outer_momentum": 0.5}
STREAMING = DILOCO | {
    "local_sgd_steps": 6,
    "local_sgd_fragments": 3,
    "local_sgd_overlap_steps": 1,
    "local_sgd_dtype": "int4",
}
SMALL = {"fuse_parameter_groups_size": 2, "nccl_comm_num": 2}
GROUPED = {"use_hierarchical_allreduce": True}
POWERSGD = {"compression": "powersgd", "powersgd_rank": 2}
INT4 = {"compression": "int4", "quantised_rounding": "stochastic", "quantised_error_feedback": False}
MERGED_INT8 = {"compression": "int8", "accumulate_steps": 2} | SMALL
ALL_PASSES = {"accumulate_steps": 2, "recompute_segments": 4, "sync_batch_norm": True, "num_threads": 4}

SHARDED = {"sharding": True}
CASES = {
    name: Case(*case)
    for name, case in {
        **{f"network {network.name}": (network, clipped, {}) for network in (MLP, *OTHERS)},
        "fused": (MLP, adam, {}),
        "unfused": (MLP, decaying, {"fuse_all_reduce_ops": False}),
        "four communicators": (LARGE, momentum, SMALL | {"nccl_comm_num": 4}),
        "waiting": (MLP, momentum, {"sync_nccl_allreduce": True, "fuse_parameter_groups_size": 1}),
        "merge": (MLP, adam, {"accumulate_steps": 3}),
        "merge, clipped": (MLP, clipped, {"accumulate_steps": 3}),
        "merge, executor's threads": (LARGE, momentum, {"accumulate_steps": 2, "num_threads": 4}),
        "recompute": (LARGE, sgd, {"recompute_segments": 3}),
        "sync batch norm": (BATCH_NORM, momentum, {"sync_batch_norm": True}),
        # On the executor's threads only the chain of tokens keeps the exchanges of the two branches in order.
        "sync batch norm, two branches": (
            NORMS,
            momentum,
            {"sync_batch_norm": True, "num_threads": 4, "fuse_all_reduce_ops": False, "nccl_comm_num": 2},
        ),
        "sync batch norm, shortcut": (RESIDUAL, momentum, {"sync_batch_norm": True}),
        "sync batch norm, all passes": (NORMS, momentum, ALL_PASSES),
        "bf16": (MLP, momentum, {"compression": "bf16"}),
        "int8": (MLP, momentum, {"compression": "int8"}),
        # Small networks: of many thousand elements one is now and then rounded to the other side of a middle.
        "int8, merge, two communicators": (MLP, momentum, MERGED_INT8),
        "int4": (MLP, momentum, {"compression": "int4", "quantised_block_size": 64}),
        "int4, stochastic": (MLP, momentum, INT4),
        "powersgd": (LARGE, sgd, POWERSGD),
        "amp O1": (MLP, momentum, {"amp_level": "O1"}),
        "amp O2, merge": (FROZEN_NORM, momentum, {"amp_level": "O2", "accumulate_steps": 2}),
        "hierarchical": (LARGE, momentum, GROUPED | SMALL),
        "hierarchical, bf16": (MLP, momentum, GROUPED | {"compression": "bf16"}),
        "hierarchical, int4": (MLP, momentum, GROUPED | {"compression": "int4", "nccl_comm_num": 2}),
        "hierarchical, powersgd": (LARGE, sgd, GROUPED | POWERSGD),
        # On one node: left to a launch of its own.
        "local groups of two": (LARGE, momentum, GROUPED | {"hierarchical_allreduce_inter_nranks": 2}),
        "local sgd": (MLP, momentum, LOCAL),
        "local sgd, merge": (MLP, momentum, LOCAL | {"accumulate_steps": 2, "local_sgd_steps": 2}),
        "local sgd, two communicators, four buckets": (MLP, momentum, LOCAL | SMALL),
        "local sgd, average momentum": (MLP, momentum, LOCAL | {"local_sgd_momentum": "average"}),
        "local sgd, reset momentum": (MLP, momentum, LOCAL | {"local_sgd_momentum": "reset"}),
        "local sgd, doubling": (MLP, momentum, LOCAL | {"local_sgd_schedule": "doubling"}),
        "local sgd, adaptive": (MLP, decaying, LOCAL | {"local_sgd_schedule": "adaptive", "local_sgd_max_steps": 6}),
        "slowmo": (MLP, momentum, SLOWMO),
        "diloco": (MLP, adam, DILOCO),
        "local sgd, bfloat16 differences": (MLP, momentum, LOCAL | {"local_sgd_dtype": "bfloat16"}),
        "local sgd, batch norm": (BATCH_NORM, momentum, COLD),
        "local sgd, overlap": (MLP, momentum, LOCAL | {"local_sgd_overlap_steps": 2}),
        "diloco, overlap": (MLP, adam, DILOCO | {"local_sgd_overlap_steps": 3}),
        "local sgd, overlap, batch norm, two micro-batches": (
            BATCH_NORM,
            momentum,
            COLD | {"local_sgd_overlap_steps": 1, "local_sgd_steps": 2, "accumulate_steps": 2},
        ),
        "slowmo, two dtypes, bfloat16 differences": (TWO_DTYPES, sgd, SLOWMO | {"local_sgd_dtype": "bfloat16"}),
        "local sgd, int8 differences": (MLP, momentum, LOCAL | {"local_sgd_dtype": "int8", "quantised_block_size": 64}),
        "local sgd, int4 differences, stochastic": (
            MLP,
            momentum,
            LOCAL | INT4 | {"compression": "none", "local_sgd_dtype": "int4"},
        ),
        "local sgd, int4 warm-up and differences": (
            MLP,
            momentum,
            LOCAL | {"compression": "int4", "local_sgd_dtype": "int4"},
        ),
        "local sgd, two dtypes, int8 differences": (TWO_DTYPES, sgd, LOCAL | {"local_sgd_dtype": "int8"}),
        "local sgd, fragments": (MLP, momentum, LOCAL | {"local_sgd_fragments": 3}),
        "slowmo, fragments, sequential, two dtypes": (
            TWO_DTYPES,
            sgd,
            SLOWMO | {"local_sgd_fragments": 2, "local_sgd_fragment_pattern": "sequential"},
        ),
        "local sgd, fragments, batch norm, overlap": (
            BATCH_NORM,
            momentum,
            COLD | {"local_sgd_fragments": 2, "local_sgd_overlap_steps": 1},
        ),
        "streaming diloco": (MLP, adamw, STREAMING),
        "streaming diloco without warm-up": (MLP, momentum, STREAMING | {"local_sgd_is_warm_steps": 0}),
        "hierarchical, local sgd": (MLP, momentum, LOCAL | GROUPED | {"nccl_comm_num": 2}),
        "hierarchical, local sgd, bf16 warm-up": (
            MLP,
            momentum,
            LOCAL | GROUPED | {"compression": "bf16", "local_sgd_momentum": "average"},
        ),
        "hierarchical, streaming diloco": (MLP, adamw, STREAMING | GROUPED),
        "sharded": (MLP, adam, SHARDED),
        "sharded, unfused": (MLP, decaying, SHARDED | {"fuse_all_reduce_ops": False}),
        "sharded, clipped": (MLP, clipped, SHARDED | SMALL),
        "sharded, merge, clipped, executor's threads": (
            LARGE,
            clipped,
            SHARDED | SMALL | {"accumulate_steps": 2, "num_threads": 4},
        ),
        "sharded, two dtypes": (TWO_DTYPES, sgd, SHARDED | {"sharding_stage": 1, "num_threads": 4}),
        "sharded, batch norm, recompute": (NORMS, momentum, SHARDED | ALL_PASSES),
        "sharded, bf16": (MLP, momentum, SHARDED | {"compression": "bf16"}),
        "sharded, int8": (MLP, momentum, SHARDED | MERGED_INT8),
        "sharded, int4": (MLP, momentum, SHARDED | INT4),
        "sharded, amp O2": (FROZEN_NORM, momentum, SHARDED | {"amp_level": "O2", "accumulate_steps": 2}),
        "sharded in two copies": (LARGE, adam, SHARDED | SMALL | {"sharding_degree": 2}),
        "sharded in two copies, int8, clipped": (
            MLP,
            clipped,
            SHARDED | MERGED_INT8 | {"sharding_degree": 2},
        ),
        "gradients of parameters first": (CONVOLUTIONS, momentum, SMALL),
    }.items()
}


class CountedAllReduce:
    """Counts the collectives."""

    def __init__(self) -> None:
        self.calls = 0
        for name in ("all_reduce", "all_gather"):
            real = getattr(paddle.distributed.stream, name)
            setattr(paddle.distributed.stream, name, partial(self._call, real))

    def _call(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return real(*args, **kwargs)


def joint_batches(case: Case, seed: int) -> list[tuple[Any, Any]]:
    """For synchronised batch norm the ranks' parts differ in mean and spread."""
    world = fleet.worker_num()
    data = batches(case.steps, SAMPLES_PER_RANK * world, seed)
    if not case.settings.get("sync_batch_norm"):
        return data
    place = np.repeat(np.arange(world, dtype="float32"), SAMPLES_PER_RANK)[:, None]
    return [(features * (1 + place) + 2 * place, labels) for features, labels in data]


def run(case: Case, seed: int, counted: CountedAllReduce) -> dict[str, Any]:
    settings = {"average_over": "ranks", **case.settings}  # which sends nothing but gradients
    rank, profile, data = fleet.worker_index(), Profile(**settings), joint_batches(case, seed)
    paddle.seed(seed * 10 + rank)  # another start on every rank: rank 0's must win
    many = Trained(case.network, lambda inner: fleet.distributed_optimizer(inner, profile), case.make)
    start, before = many.state(), counted.calls
    precision = None if profile.amp_level == "O0" else Profile(amp_level=profile.amp_level, amp_dtype=profile.amp_dtype)
    reference = Reference(case.network, case.make, start, precision) if case.is_simulated else None
    trained = {one.name for one in many.main.global_block().all_parameters() if not one.stop_gradient}
    worst, sent, averagings, digests = 0.0, [], [], []
    for step, (features, labels) in enumerate(data, 1):
        many.step(features[share(rank)], labels[share(rank)])
        # What a thread sends between two steps counts to the second: the simulation below takes its time.
        sent.append(counted.calls - sum(sent) - before)
        digests.append(digest({name: value for name, value in many.parameters().items() if name in trained}))
        if reference is not None:
            if reference.step(features, labels).averaged:
                averagings.append(step)
            worst = max(worst, difference_from(reference, many.state()))
    found = {
        "from one process": None if case.is_local else from_one_process(case, start, data, many.parameters()),
        "moved": how_far_moved({name: value for name, value in many.parameters().items() if name in trained}, start),
    }
    with paddle.static.scope_guard(many.scope):
        fleet.synchronize_parameters(many.main)
    if reference is not None:
        reference.job.synchronise()
        worst = max(worst, difference_from(reference, many.parameters()))
    heard = {"sent": sent, "averagings": averagings, "digests": digests, "from simulation": worst}
    return found | heard | {"start": digest({name: start[name] for name in many.parameters()})}


def difference_from(reference: Reference, state: dict[str, np.ndarray]) -> float:
    simulated = reference.job.ranks[fleet.worker_index()]
    names = state.keys() & simulated.keys()
    return relative_difference({name: state[name] for name in names}, {name: simulated[name] for name in names})


class Merged:
    """Gradient merge in one process."""

    def __init__(self, inner: Any, size: int) -> None:
        self._inner, self._size, self._learning_rate = inner, size, inner._learning_rate

    def minimize(self, loss: Any, _: Any) -> None:
        found = merge_gradients(self._inner.backward(loss), self._size)
        found.apply(lambda: self._inner.apply_gradients(found.pairs))


def from_one_process(case: Case, start: Any, data: list[tuple[Any, Any]], ended: Any) -> float:
    size = case.settings.get("accumulate_steps", 1)
    is_normed = bool(case.settings.get("sync_batch_norm"))  # over each micro-batch, which must not be joined
    one = Trained(case.network, (lambda inner: Merged(inner, size)) if is_normed else lambda inner: inner, case.make)
    one.start_from(one.state() | {name: value for name, value in start.items() if name in one.state()})
    joined = 1 if is_normed else size
    for first in range(0, len(data), joined):
        features, labels = zip(*data[first : first + joined], strict=True)
        one.step(np.concatenate(features), np.concatenate(labels))
    return relative_difference(ended, one.parameters())


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    counted, chosen = CountedAllReduce(), json.loads(sys.argv[1])
    # By name: another case more or less gives no other data to those that are there.
    seeds = {name: crc32(name.encode()) % 1000 * 10 + fleet.worker_num() for name in CASES}
    report(fleet.worker_index(), cases={name: run(CASES[name], seeds[name], counted) for name in chosen})


if __name__ == "__main__":
    main()
