"""Run as ranks with the names of cases: the norm by the facade, and by Paddle alone with the joint batch.

With and without the norm the same cases are trained; on one process with the joint batch each gradient is fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert.passes import pipeline
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile
from fleet_train.train import SkipNotFinite, WeightAverage
from fleet_train.train.config import TrainConfig
from fleet_train.train.programs import build_programs
from fleet_train.train.reference import open_data
from tests.support.worker import digest, report
from tests.unit.passes.training import Trained, batches

UPDATES, SAMPLES_PER_RANK, SEEDS, BROKEN = 6, 5, (1, 2), 2
CLIP, RATE = 0.05, 0.5
BUCKETS: dict[str, Any] = {"fuse_parameter_groups_size": 1}
LOCAL_SGD = Profile(use_local_sgd=True, local_sgd_steps=2)


@dataclass(frozen=True)
class Case:
    profile: Profile
    optimizer: Callable[[], Any]
    wraps: Sequence[Callable[[], Any]] = ()
    alone: Callable[[Any, Any], Any] | None = lambda inner, loss: inner.minimize(loss)
    """None: nothing of it is one process; expected is how far SGD has gone, over the learning rate."""
    is_scaled: bool = False
    """float16's loss scale, over a program that stays in float32, as CPUs have no product in float16."""
    overflows: bool = False
    """Rank 1 has an infinite feature in update ``BROKEN``, which is skipped."""


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.2, 0.9, weight_decay=0.01)


def clipped() -> Any:
    return paddle.optimizer.Momentum(0.2, 0.9, grad_clip=paddle.nn.ClipGradByGlobalNorm(CLIP))


def sgd() -> Any:
    return paddle.optimizer.SGD(RATE)


def in_bfloat16(inner: Any, loss: Any) -> Any:
    lower_precision(loss, Profile(amp_level="O1"), on_gpu=False)
    return inner.minimize(loss)


CASES = {
    "plain": Case(Profile(**BUCKETS), momentum),
    "clipped": Case(Profile(**BUCKETS), clipped),
    "merged": Case(Profile(accumulate_steps=3, **BUCKETS), momentum),
    "merged and clipped": Case(Profile(accumulate_steps=2, **BUCKETS), clipped),
    "averaged weights": Case(Profile(**BUCKETS), clipped, [lambda: WeightAverage(0.9).follow]),
    "skipping": Case(Profile(**BUCKETS), clipped, [lambda: SkipNotFinite().guard], overflows=True),
    "scaled": Case(Profile(amp_level="O1", amp_dtype="float16"), clipped, is_scaled=True, overflows=True),
    "bfloat16": Case(Profile(amp_level="O1", amp_dtype="bfloat16"), clipped, alone=in_bfloat16),
    "PowerSGD": Case(Profile(compression="powersgd", powersgd_rank=1, powersgd_min_compression=1.0), sgd, alone=None),
    "DGC": Case(
        Profile(compression="dgc", dgc_sparsity=0.75, dgc_min_elements=0),
        lambda: paddle.optimizer.Momentum(RATE, 0.9),
        alone=None,
    ),
    "int8": Case(Profile(compression="int8", **BUCKETS), sgd, alone=None),
}


def distributed(case: Case, with_norm: bool) -> Callable[[Any, Any], Any]:
    """Returns the norm's value, or the loss again without it."""

    def minimize(inner: Any, loss: Any) -> Any:
        optimizer = fleet.distributed_optimizer(inner, case.profile)
        for wrap in case.wraps:
            optimizer.around_update(wrap())
        optimizer.minimize(loss)
        return optimizer.gradient_norm() if with_norm else loss

    if not case.is_scaled:
        return minimize
    return mock.patch.object(pipeline, "lower_precision")(lambda inner, loss, _: minimize(inner, loss))  # type: ignore[return-value]


def mine(batch: tuple[np.ndarray, np.ndarray], is_broken: bool) -> tuple[np.ndarray, np.ndarray]:
    own = slice(fleet.worker_index() * SAMPLES_PER_RANK, (fleet.worker_index() + 1) * SAMPLES_PER_RANK)
    features, labels = batch[0][own].copy(), batch[1][own]
    if is_broken and fleet.worker_index() == 1:
        features[0, 0] = np.inf
    return features, labels


def norm_alone(one: Trained, batch: tuple[np.ndarray, np.ndarray]) -> float:
    gradients = one.step(batch, fetch=[gradient for _, gradient in one.result[1]])
    return norm_of(gradients)


def norm_of(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum((each.astype("float64") ** 2).sum() for each in arrays)))


def run(case: Case, seed: int) -> dict[str, Any]:
    paddle.seed(seed)
    many, plain = Trained(case.optimizer, distributed(case, True)), Trained(case.optimizer, distributed(case, False))
    one = None if case.alone is None else Trained(case.optimizer, case.alone)
    start = many.state()
    for other in filter(None, (plain, one)):
        other.start_from(start)
    merged = case.profile.accumulate_steps
    found: list[float] = []
    expected: list[float] = []
    for update in range(UPDATES):
        micro = batches(merged, SAMPLES_PER_RANK * fleet.worker_num(), 100 * seed + update)
        is_broken = case.overflows and update == BROKEN
        norms = [many.step(mine(each, is_broken), fetch=[many.loss, many.result])[1].item() for each in micro]
        before = plain.parameters()
        for each in micro:
            plain.step(mine(each, is_broken))
        found += norms
        expected += [0.0] * (merged - 1)
        if one is None:
            expected.append(norm_of([(now - before[name]) / RATE for name, now in plain.parameters().items()]))
        else:
            joint = (np.concatenate([x for x, _ in micro]), np.concatenate([y for _, y in micro]))
            expected.append(float("nan") if is_broken else norm_alone(one, joint))
    return {
        "found": found,
        "expected": expected,
        "bits": [digest(many.state()), digest(plain.state())],
        "moved": digest(start) != digest(many.state()),
        "squares": [trained.operators().count("pd_op.squared_l2_norm") for trained in (many, plain)],
        "order": [order(trained) for trained in (many, plain)],
    }


def order(trained: Trained) -> str:
    """Waits and updates as they stand in the main block: ``w`` and ``u``."""
    names = trained.operators()
    return "".join("w" if "fleet_train_wait_" in name else "u" if name == "pd_op.momentum_" else "" for name in names)


def refused() -> str:
    optimizer = fleet.distributed_optimizer(momentum(), LOCAL_SGD)
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        optimizer.minimize(paddle.mean(paddle.nn.Linear(2, 2)(paddle.static.data("x", [4, 2], "float32"))))
        try:
            optimizer.gradient_norm()
        except ProfileError as error:
            return str(error)
    return "not refused"


def recorded(strategy: Profile | None, **settings: Any) -> bool | str:
    """Whether the reference trainer records the norm with these settings, or why it refuses to."""
    config = TrainConfig(model="mlp", **settings)
    try:
        programs = build_programs(config, open_data(config).train, config.schedule(1), fleet.worker_num(), strategy)
    except ProfileError as error:
        return str(error)
    return programs.gradient_norm is not None


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    cases = {name: [run(case, seed) for seed in SEEDS] for name, case in CASES.items() if name in sys.argv}
    records = {
        "nothing asked": recorded(None),
        "--gradient_norm": recorded(None, gradient_norm=True),
        "--clip_norm": recorded(None, clip_norm=1.0),
        "--clip_norm, LocalSGD": recorded(LOCAL_SGD, clip_norm=1.0),
        "--gradient_norm, LocalSGD": recorded(LOCAL_SGD, gradient_norm=True),
    }
    report(fleet.worker_index(), cases=cases, refused=refused(), records=records)


if __name__ == "__main__":
    main()
