"""Run as ranks by test_passes.py: trains on all ranks with a pass, and on one process with the joint batch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.collectives.sync_batch_norm import RankStatistics
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.convert.passes.pipeline import LossScaler, ProgramPasses, merge_gradients
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.convert.passes.sync_norm import Arithmetic, Composed, Kernels, synchronize_batch_norms
from fleet_train.profile import Profile
from tests.support.worker import digest, report
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, loss_scaling, relative_difference

STEPS, SAMPLES_PER_RANK, SEEDS = 10, 6, (0, 1, 2)
# A bias in front of a batch norm and its velocity hold rounding noise only.
FLOOR = 0.1
KERNELS = Kernels()


def normalised(features: Any) -> Any:
    """Two branches, so that the order of the exchanges is not given by the data alone."""
    image = features.reshape([-1, 1, 4, 4])
    left, right = nn.Conv2D(1, 4, 3, padding=1), nn.Conv2D(1, 4, 3, padding=1)
    joined = F.tanh(nn.BatchNorm2D(4)(left(image))) + F.tanh(nn.BatchNorm2D(4)(right(image)))
    joined = nn.BatchNorm2D(4, momentum=0.5)(joined)
    return nn.Linear(8, CLASSES)(nn.BatchNorm1D(8)(F.tanh(nn.Linear(64, 8)(joined.flatten(1)))))


def residual(features: Any) -> Any:
    """The norm of the shortcut shares its exchanges with the one at the end of the branch."""
    image = features.reshape([-1, 1, 4, 4])
    branch = F.tanh(nn.BatchNorm2D(3)(nn.Conv2D(1, 3, 3, padding=1)(image)))
    branch = nn.BatchNorm2D(4, data_format="NHWC")(nn.Conv2D(3, 4, 3, padding=1)(branch).transpose([0, 2, 3, 1]))
    shortcut = nn.BatchNorm2D(4, momentum=0.5)(nn.Conv2D(1, 4, 1)(image))
    return nn.Linear(64, CLASSES)(F.tanh(branch.transpose([0, 3, 1, 2]) + shortcut).flatten(1))


def unlike_batches(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Joint batches in which the ranks' parts differ in mean and spread."""
    world = fleet.worker_num()
    place = np.repeat(np.arange(world, dtype="float32"), SAMPLES_PER_RANK)[:, None]
    joint = batches(STEPS, SAMPLES_PER_RANK * world, seed)
    return [(features * (1 + place) + 2 * place, labels) for features, labels in joint]


def mine(batch: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    first = fleet.worker_index() * SAMPLES_PER_RANK
    return batch[0][first : first + SAMPLES_PER_RANK], batch[1][first : first + SAMPLES_PER_RANK]


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


def distributed(
    synchronized: bool, profile: Profile, arithmetic: Arithmetic
) -> Callable[[Any, Any], DistributedOptimizer]:
    def minimize(inner: Any, loss: Any) -> DistributedOptimizer:
        optimizer = fleet.distributed_optimizer(inner, profile)
        pairs = optimizer.backward(loss)
        if synchronized:
            statistics = RankStatistics(optimizer._job)
            pairs = synchronize_batch_norms(pairs, statistics, arithmetic)
            statistics.connect()
        optimizer.apply_gradients(pairs)
        return optimizer

    return minimize


def train_both(
    synchronized: bool, profile: Profile, seed: int, arithmetic: Arithmetic = KERNELS, network: Any = normalised
) -> dict[str, Any]:
    paddle.seed(100 * seed + fleet.worker_index())
    many = Trained(momentum, distributed(synchronized, profile, arithmetic), network)
    start = many.state()
    one = Trained(momentum, network=network)
    one.start_from(start)
    for batch in unlike_batches(seed):
        many.step(mine(batch))
        one.step(batch)
    return {
        "state": digest(many.state()),
        "difference": relative_difference(many.state(), one.state(), FLOOR),
        "parameter_difference": relative_difference(many.parameters(), one.parameters(), FLOOR),
        "moved": relative_difference(many.state(), start, FLOOR),
    }


def synchronized_batch_norm() -> dict[str, Any]:
    profiles = {"fused": Profile(), "unfused, two communicators": Profile(fuse_all_reduce_ops=False, nccl_comm_num=2)}
    cases = {
        f"{name}, seed {seed}": train_both(True, profile, seed) for name, profile in profiles.items() for seed in SEEDS
    }
    return cases | {"composed": train_both(True, Profile(), SEEDS[0], Composed())} | shared_exchanges()


def shared_exchanges() -> dict[str, Any]:
    return {f"shortcut, seed {seed}": train_both(True, Profile(), seed, network=residual) for seed in SEEDS}


def uneven_batches() -> dict[str, Any]:
    """Ranks whose batches differ in size, from step to step, too, down to one sample: each value counts once."""
    results = {}
    for name, arithmetic in (("kernels", KERNELS), ("composed", Composed())):
        for seed in SEEDS:
            paddle.seed(100 * seed + fleet.worker_index())
            many = Trained(momentum, each_sample_alike(distributed(True, Profile(), arithmetic)), normalised)
            start = many.state()
            one = Trained(momentum, network=normalised)
            one.start_from(start)
            for step, (features, labels) in enumerate(unlike_batches(seed)):
                part = slice(*uneven_part(step))
                many.step((features[part], labels[part]))
                one.step((features, labels))
            results[f"{name}, seed {seed}"] = {
                "state": digest(many.state()),
                "difference": relative_difference(many.state(), one.state(), FLOOR),
                "moved": relative_difference(many.state(), start, FLOOR),
            }
    return results


def uneven_part(step: int) -> tuple[int, int]:
    """Where this rank's part of a joint batch begins and ends: rank 0 has 1 or 8 samples, rank 1 what is missing."""
    rank, first = fleet.worker_index(), (1, SAMPLES_PER_RANK + 2)[step % 2]
    edges = [0, first, *range(2 * SAMPLES_PER_RANK, SAMPLES_PER_RANK * fleet.worker_num() + 1, SAMPLES_PER_RANK)]
    return edges[rank], edges[rank + 1]


def each_sample_alike(minimize: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Ranks' gradients are averaged alike, so the loss of a larger batch has to weigh more."""

    def minimize_weighted(inner: Any, loss: Any) -> Any:
        block = paddle.static.default_main_program().global_block()
        features = next(operator for operator in block.ops if operator.name() == "pd_op.data").result(0)
        return minimize(inner, loss * (paddle.shape(features)[0].cast("float32") / SAMPLES_PER_RANK))

    return minimize_weighted


def local_batch_norm() -> dict[str, Any]:
    return {"fused": train_both(False, Profile(), seed=0)}


class Inner:
    """A Paddle optimizer whose update is made by ``apply``: what the facade will call once passes are knobs."""

    def __init__(self, optimizer: Any, apply: Callable[[Any], Any]) -> None:
        self._optimizer, self.apply_gradients = optimizer, apply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def scaled(inner: Any, loss: Any) -> None:
    scaler = LossScaler(loss_scaling(decr_every_n_nan_or_inf=1, decr_ratio=0.5))
    wrapped = Inner(inner, lambda pairs: scaler.apply(pairs, inner.apply_gradients))
    optimizer = fleet.distributed_optimizer(wrapped, Profile())
    optimizer.apply_gradients(optimizer.backward(scaler.scaled(loss)))


def overflow_on_one_rank() -> dict[str, Any]:
    paddle.seed(fleet.worker_index())
    trained = Trained(momentum, scaled)
    states = [trained.state()]
    for step, batch in enumerate(batches(4, SAMPLES_PER_RANK * fleet.worker_num(), seed=0)):
        features, labels = mine(batch)
        if step == 1 and fleet.worker_index() == 1:
            features = np.full_like(features, np.inf)
        trained.step((features, labels))
        states.append(trained.state())
    return {
        "changed": [
            sorted(name for name in a if not np.array_equal(a[name], b[name])) for a, b in itertools.pairwise(states)
        ],
        "scales": [float(state["loss_scaling_0"].item()) for state in states],
        "state": digest(states[-1]),
    }


def merged(accumulate_steps: int) -> Callable[[Any, Any], None]:
    def minimize(inner: Any, loss: Any) -> None:
        found = merge_gradients(inner.backward(loss), accumulate_steps)
        wrapped = Inner(inner, lambda pairs: found.apply(lambda: inner.apply_gradients(pairs)))
        fleet.distributed_optimizer(wrapped, Profile()).apply_gradients(found.pairs)

    return minimize


def gradient_merge() -> dict[str, Any]:
    return {f"seed {seed}": merge_and_compare(seed, accumulate_steps=3) for seed in SEEDS}


def merge_and_compare(seed: int, accumulate_steps: int) -> dict[str, Any]:
    paddle.seed(100 * seed + fleet.worker_index())
    many = Trained(clipped_adamw, merged(accumulate_steps))
    one = Trained(clipped_adamw)
    start = many.state()
    one.start_from(start)
    data = batches(STEPS * accumulate_steps, SAMPLES_PER_RANK * fleet.worker_num(), seed)
    for first in range(0, len(data), accumulate_steps):
        micro = data[first : first + accumulate_steps]
        for batch in micro:
            many.step(mine(batch))
        one.step((np.concatenate([x for x, _ in micro]), np.concatenate([y for _, y in micro])))
    return {
        "state": digest(many.state()) if not _buffers(many) else "buffers are not empty",
        "difference": relative_difference(many.parameters(), one.parameters()),
        "moved": relative_difference(many.parameters(), {name: start[name] for name in many.parameters()}),
    }


def _buffers(trained: Trained) -> list[str]:
    return [name for name, value in trained.state().items() if name.endswith("@gradient_merge") and value.any()]


def clipped_adamw() -> Any:
    clip = nn.ClipGradByGlobalNorm(0.1)
    return paddle.optimizer.AdamW(0.01, epsilon=1e-3, weight_decay=0.05, grad_clip=clip)


def lowered(inner: Any, loss: Any) -> None:
    lower_precision(loss, Profile(amp_level="O2"), on_gpu=False)
    fleet.distributed_optimizer(inner, Profile()).minimize(loss)


def low_precision() -> dict[str, Any]:
    paddle.seed(fleet.worker_index())
    many = Trained(momentum, lowered, normalised_locally)
    data = batches(2, SAMPLES_PER_RANK * fleet.worker_num(), seed=0) * 15
    losses = [many.step(mine(batch)) for batch in data]
    trained = [one.name for one in many.main.global_block().all_parameters() if not one.stop_gradient]
    parameters = {name: value for name, value in many.parameters().items() if name in trained}
    return {"parameters": digest(parameters), "first": losses[0], "last": losses[-1]}


class WithPasses(DistributedOptimizer):
    """The facade's optimizer as it will be, on a program that takes every pass (float16's scale in float32)."""

    def backward(self, loss: Any, *_: Any) -> Any:
        profile = Profile(accumulate_steps=2, recompute_segments=4, sync_batch_norm=True)
        self.passes = ProgramPasses(profile, self._job)
        self.passes._scaler = LossScaler(Profile())
        return self.passes.backward(loss, lambda _: self._inner.backward(self.passes._scaler.scaled(loss)))

    def apply_gradients(self, params_grads: Any) -> Any:
        merged = self.passes.merge(params_grads)
        inner = self._inner
        self._inner = Inner(inner, lambda pairs: self.passes.update(merged, pairs, inner.apply_gradients))
        return super().apply_gradients(merged.pairs)


def all_passes(inner: Any, loss: Any) -> None:
    optimizer = fleet.distributed_optimizer(inner, Profile())
    optimizer.__class__ = WithPasses
    optimizer.minimize(loss)


def together() -> dict[str, Any]:
    """Every pass on all ranks, against gradient merge alone in one process with the joint micro-batches."""
    results = {}
    for seed in SEEDS:
        paddle.seed(100 * seed + fleet.worker_index())
        many = Trained(momentum, all_passes, normalised)
        reference = Trained(momentum, merged_alone, normalised)
        start = many.state()
        reference.start_from(start)
        for batch in unlike_batches(seed):
            many.step(mine(batch))
            reference.step(batch)
        ours, expected = many.state(), reference.state()
        trained = [one.name for one in many.main.global_block().all_parameters()]
        results[f"seed {seed}"] = {
            "state": digest({name: ours[name] for name in ours if "@gradient_merge" not in name}),
            "difference": relative_difference({n: ours[n] for n in trained}, {n: expected[n] for n in trained}, FLOOR),
            "moved": relative_difference({n: ours[n] for n in trained}, {n: start[n] for n in trained}, FLOOR),
        }
    return results


def merged_alone(inner: Any, loss: Any) -> None:
    found = merge_gradients(inner.backward(loss), 2)
    found.apply(lambda: inner.apply_gradients(found.pairs))


def normalised_locally(features: Any) -> Any:
    """Its statistics are each rank's own; its parameters are not."""
    return nn.Linear(24, CLASSES)(nn.BatchNorm1D(24)(F.tanh(nn.Linear(FEATURES, 24)(features))))


CASES = {
    "synchronized": synchronized_batch_norm,
    "shortcut": shared_exchanges,
    "uneven": uneven_batches,
    "local": local_batch_norm,
    "overflow": overflow_on_one_rank,
    "merged": gradient_merge,
    "lowered": low_precision,
    "together": together,
}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    report(fleet.worker_index(), cases=CASES[sys.argv[1]]())


main()
