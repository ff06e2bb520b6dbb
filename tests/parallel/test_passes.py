"""Passes and what stands around an update, on ranks of their own, beside one process with the joint batch.

Synchronised batch norm counts each value of uneven batches once. The gradient norm is that of one process, and reading
it changes nothing. A NaN on one rank lets all ranks skip the same update, and the weights' average follows the updates
that were made. The ranks run this file, too, with the names of cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.convert.passes import pipeline
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.convert.passes.sync_norm import Composed
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile
from fleet_train.train import SkipNotFinite, WeightAverage
from fleet_train.train.config import TrainConfig
from fleet_train.train.programs import build_programs
from fleet_train.train.reference import open_data
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report
from tests.unit.passes.training import FEATURES, Trained, batches, relative_difference

SAMPLES_PER_RANK, SEED = 6, 1
Batch = tuple[np.ndarray, np.ndarray]


def normed(features: Any) -> Any:
    # No bias: batch norm would remove it, and its gradient is rounding noise.
    hidden = nn.BatchNorm1D(24)(nn.Linear(FEATURES, 24, bias_attr=False)(features))
    return nn.Linear(24, 5)(nn.functional.relu(hidden))


def uneven(make: Any) -> dict[str, Any]:
    """Ranks whose batches differ in size, from step to step, too, down to one sample; in mean and spread as well."""

    def minimize(inner: Any, loss: Any) -> None:
        # Ranks' gradients are averaged alike, so the loss of a larger batch has to weigh more.
        block = paddle.static.default_main_program().global_block()
        features = next(operator for operator in block.ops if operator.name() == "pd_op.data").result(0)
        weighted = loss * (paddle.shape(features)[0].cast("float32") / SAMPLES_PER_RANK)
        fleet.distributed_optimizer(inner, Profile(sync_batch_norm=True)).minimize(weighted)

    paddle.seed(100 * SEED + fleet.worker_index())
    with mock.patch.object(pipeline, "Kernels", make):
        many = Trained(momentum, minimize, normed)
    one, start = Trained(momentum, network=normed), many.state()
    one.start_from(start)
    world, rank = fleet.worker_num(), fleet.worker_index()
    place = np.repeat(np.arange(world, dtype="float32"), SAMPLES_PER_RANK)[:, None]
    for step, (features, labels) in enumerate(batches(10, SAMPLES_PER_RANK * world, SEED)):
        features, first = features * (1 + place) + 2 * place, (1, SAMPLES_PER_RANK + 2)[step % 2]
        edges = [0, first, *range(2 * SAMPLES_PER_RANK, SAMPLES_PER_RANK * world + 1, SAMPLES_PER_RANK)]
        part = slice(edges[rank], edges[rank + 1])
        many.step((features[part], labels[part]))
        one.step((features, labels))
    return {
        "state": digest(many.state()),
        "difference": relative_difference(many.state(), one.state(), 0.1),
        "moved": relative_difference(many.state(), start, 0.1),
    }


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


UPDATES, BROKEN, CLIP, RATE = 6, 2, 0.05, 0.5
BUCKETS: dict[str, Any] = {"fuse_parameter_groups_size": 1}
LOCAL_SGD = Profile(use_local_sgd=True, local_sgd_steps=2)


@dataclass(frozen=True)
class Normed:
    """``alone``: one process; without, the norm is how far SGD has gone, over the learning rate. ``is_scaled``:
    float16's loss scale, over a program that stays in float32, as CPUs have no product in float16. ``overflows``: rank
    1 has an infinite feature in update ``BROKEN``, which is skipped.
    """

    profile: Profile
    optimizer: Callable[[], Any]
    wraps: Sequence[Callable[[], Any]] = ()
    alone: Callable[[Any, Any], Any] | None = lambda inner, loss: inner.minimize(loss)
    is_scaled: bool = False
    overflows: bool = False
    tolerance: float = 1e-5


def decayed() -> Any:
    return paddle.optimizer.Momentum(0.2, 0.9, weight_decay=0.01)


def clipped() -> Any:
    return paddle.optimizer.Momentum(0.2, 0.9, grad_clip=nn.ClipGradByGlobalNorm(CLIP))


def sgd() -> Any:
    return paddle.optimizer.SGD(RATE)


def in_bfloat16(inner: Any, loss: Any) -> Any:
    lower_precision(loss, Profile(amp_level="O1"), on_gpu=False)
    return inner.minimize(loss)


POWERSGD = Profile(compression="powersgd", powersgd_rank=1, powersgd_min_compression=1.0)
NORMS = {
    "plain": Normed(Profile(**BUCKETS), decayed),
    "clipped": Normed(Profile(**BUCKETS), clipped),
    "merged": Normed(Profile(accumulate_steps=3, **BUCKETS), decayed),
    "scaled": Normed(Profile(amp_level="O1", amp_dtype="float16"), clipped, is_scaled=True, overflows=True),
    "averaged weights": Normed(Profile(**BUCKETS), clipped, [lambda: WeightAverage(0.9).follow]),
    "skipping": Normed(Profile(**BUCKETS), clipped, [lambda: SkipNotFinite().guard], overflows=True),
    "bfloat16": Normed(Profile(amp_level="O1"), clipped, alone=in_bfloat16, tolerance=1e-2),
    "PowerSGD": Normed(POWERSGD, sgd, alone=None, tolerance=1e-4),
}
FEW = ("plain", "clipped", "merged", "scaled")


def distributed(case: Normed, with_norm: bool) -> Callable[[Any, Any], Any]:
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


def mine(batch: Batch, is_broken: bool) -> Batch:
    own = slice(fleet.worker_index() * SAMPLES_PER_RANK, (fleet.worker_index() + 1) * SAMPLES_PER_RANK)
    features, labels = batch[0][own].copy(), batch[1][own]
    if is_broken and fleet.worker_index() == 1:
        features[0, 0] = np.inf
    return features, labels


def norm_of(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum((each.astype("float64") ** 2).sum() for each in arrays)))


def norms(case: Normed) -> dict[str, Any]:
    paddle.seed(SEED)
    many, plain = Trained(case.optimizer, distributed(case, True)), Trained(case.optimizer, distributed(case, False))
    one = None if case.alone is None else Trained(case.optimizer, case.alone)
    start = many.state()
    for other in filter(None, (plain, one)):
        other.start_from(start)
    merged, found, expected = case.profile.accumulate_steps, [], []
    for update in range(UPDATES):
        micro = batches(merged, SAMPLES_PER_RANK * fleet.worker_num(), 100 * SEED + update)
        is_broken = case.overflows and update == BROKEN
        found += [many.step(mine(each, is_broken), fetch=[many.loss, many.result])[1].item() for each in micro]
        before = plain.parameters()
        for each in micro:
            plain.step(mine(each, is_broken))
        expected += [0.0] * (merged - 1)
        if one is None:
            expected.append(norm_of([(now - before[name]) / RATE for name, now in plain.parameters().items()]))
        elif is_broken:
            expected.append(float("nan"))
        else:
            joint = tuple(np.concatenate(parts) for parts in zip(*micro, strict=True))
            expected.append(norm_of(one.step(joint, fetch=[gradient for _, gradient in one.result[1]])))
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


def recorded(strategy: Profile | None, **settings: Any) -> bool | str:
    """Whether the reference trainer records the norm with these settings, or why it refuses to."""
    config = TrainConfig(model="mlp", **settings)
    try:
        programs = build_programs(config, open_data(config).train, config.schedule(1), fleet.worker_num(), strategy)
    except ProfileError as error:
        return str(error)
    return programs.gradient_norm is not None


DECAY = 0.8
PAIRS: dict[str, Any] = {"fuse_parameter_groups_size": 2}
# With the updates that are made of seven steps, when rank 1 has a NaN in the third.
AROUND = {
    "synchronous": (Profile(**PAIRS), 6),
    "synchronised batch norm": (Profile(sync_batch_norm=True, **PAIRS), 6),
    "gradient merge": (Profile(accumulate_steps=2, **PAIRS), 2),
    "LocalSGD": (Profile(use_local_sgd=True, local_sgd_is_warm_steps=1, local_sgd_steps=3, **PAIRS), 6),
}


def around_update(profile: Profile) -> dict[str, Any]:
    """What the trainer adds around an update, over several buckets."""
    paddle.seed(0)
    average, skipping = WeightAverage(DECAY), SkipNotFinite()

    def minimize(optimizer: Any, loss: Any) -> None:
        distributed = fleet.distributed_optimizer(optimizer, profile)
        distributed.around_update(average.follow)
        distributed.around_update(skipping.guard)
        distributed.minimize(loss)

    trained = Trained(momentum, minimize, normed)

    def count() -> int:
        with paddle.static.scope_guard(trained.scope):
            return skipping.count()

    weights = [one.name for one in trained.main.global_block().all_parameters() if not one.stop_gradient]
    expected = {name: np.zeros_like(trained.parameters()[name], np.float64) for name in weights}
    updates = 0
    for step, (features, labels) in enumerate(batches(7, 8, seed=fleet.worker_index())):
        if step == 2 and fleet.worker_index() == 1:
            features[0, 0] = np.nan
        skipped = count()
        trained.step((features, labels))
        if (step + 1) % profile.accumulate_steps == 0 and count() == skipped:
            updates += 1
            now = trained.parameters()
            expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] for name in weights}
    mean = {name: fleet.all_reduce(value, op="mean") for name, value in expected.items()}
    with paddle.static.scope_guard(trained.scope):
        averaged = average.weights()
    errors = [np.abs(averaged[name] - mean[name] / (1 - DECAY**updates)).max() for name in averaged]
    return {
        "made": [count(), updates, all(np.isfinite(value).all() for value in trained.state().values())],
        "average_error": float(max(errors)),
        "averaged": len(averaged) == len(weights),
        "average_digest": digest(averaged),
        "weights_digest": digest({name: trained.parameters()[name] for name in weights}),
    }


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    kinds = {"kernels": pipeline.Kernels, "composed": Composed}
    report(
        fleet.worker_index(),
        uneven={name: uneven(make) for name, make in kinds.items()},
        norms={name: norms(NORMS[name]) for name in sys.argv[1:]},
        around={name: around_update(profile) for name, (profile, _) in AROUND.items()},
        records={
            "nothing asked": recorded(None),
            "--gradient_norm": recorded(None, gradient_norm=True),
            "--clip_norm": recorded(None, clip_norm=1.0),
            "--clip_norm, LocalSGD": recorded(LOCAL_SGD, clip_norm=1.0),
            "--gradient_norm, LocalSGD": recorded(LOCAL_SGD, gradient_norm=True),
        },
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, FEW, False), id="2"),
        pytest.param((3, tuple(NORMS), True), id="3, streams", marks=pytest.mark.long),
    ],
)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    size, names, late = request.param
    folder = tmp_path_factory.mktemp("passes")
    script = Path(__file__)
    return run_ranks(script, size, folder=folder, nodes=size, args=names, timeout_seconds=200, late_streams=late)


def test_each_value_of_uneven_batches_counts_once(ended: RanksResult) -> None:
    ranks = ended.of_all("uneven")
    for case, first in ranks[0].items():
        assert first["moved"] > 1e-2, case
        assert first["difference"] < 1e-5, case
        assert len({rank[case]["state"] for rank in ranks}) == 1, f"{case}: replicas differ"


def test_the_norm_is_that_of_one_process_before_clipping_and_changes_nothing(ended: RanksResult) -> None:
    all_ranks = ended.of_all("norms")
    for name, rank in [found for ranks in all_ranks for found in ranks.items()]:
        found, expected = np.array(rank["found"]), np.array(rank["expected"])
        usable = np.isfinite(expected)
        assert np.isfinite(found).tolist() == usable.tolist(), name
        assert (expected[usable] > CLIP).sum() == UPDATES - NORMS[name].overflows, name
        np.testing.assert_allclose(found[usable], expected[usable], rtol=NORMS[name].tolerance, err_msg=name)
        assert rank["moved"], name
        assert rank["bits"][0] == rank["bits"][1], f"{name}: the run has other bits with it"
        assert rank["order"][0] == rank["order"][1], f"{name}: a bucket is waited for earlier"
        assert rank["order"][0] == "wu" * 4 or name != "plain"
    for name in all_ranks[0]:
        found = np.array([ranks[name]["found"] for ranks in all_ranks])
        np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape), err_msg=name)


def test_the_sums_of_the_clip_are_taken_where_it_makes_them_in_every_step(ended: RanksResult) -> None:
    expected = {name: [4, 4] for name in ("clipped", "averaged weights", "bfloat16")}
    expected |= {name: [4, 0] for name in ("plain", "skipping", "scaled", "PowerSGD")}
    for name, found in ended.values[0]["norms"].items():
        assert found["squares"] == expected.get(name, [0, 0]), name


def test_the_reference_trainer_records_it_when_asked_and_with_a_clip(ended: RanksResult) -> None:
    for records in ended.of_all("records"):
        refused = records.pop("--gradient_norm, LocalSGD")
        assert "local steps average no gradient" in refused
        assert "leave one of the two out" in refused
        asked = {"--gradient_norm": True, "--clip_norm": True, "--clip_norm, LocalSGD": False}
        assert records == {"nothing asked": False, **asked}


@pytest.mark.parametrize("name", AROUND)
def test_all_ranks_skip_the_same_update_and_the_average_follows_those_that_were_made(
    ended: RanksResult, name: str
) -> None:
    found, updates = [rank[name] for rank in ended.of_all("around")], AROUND[name][1]
    assert len({each["average_digest"] for each in found}) == 1
    assert [each["made"] for each in found] == [[1, updates, True]] * len(found)
    assert name == "LocalSGD" or len({each["weights_digest"] for each in found}) == 1
    assert all(each["averaged"] and each["average_error"] < 1e-6 for each in found)


if __name__ == "__main__":
    main()
