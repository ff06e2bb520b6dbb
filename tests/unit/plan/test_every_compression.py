"""What every compression has to do, on three ranks: each rank counts, nothing is lost, and no NaN stays.

Its description's two halves are tried, what ranks do (played in turn in this process) and its reference in numpy. What
is sent through sockets of its own, the quantised sums, is played by the reference alone, and by real ranks in
``tests/parallel/test_compression.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.engine import HostDevice
from fleet_train.collectives.methods.dense import FlatAllreduce
from fleet_train.collectives.methods.registry import Parts, read_state, write_state
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.simulate_methods import SimulatedParts, SimulatedWire
from fleet_train.profile import Profile
from fleet_train.profile.methods import COMPRESSIONS
from fleet_train.profile.methods.base import ITEM_BYTES, Bucket, CollectiveSpec, Compression
from tests.unit.collectives.played import Group, in_turn

RANKS = 3
SHAPES = {"w": (24, 16), "v": (20,), "u": (12, 18)}
# Of gradients as small as these; a new compression that sends small ones whole needs an entry.
COMPRESSED: dict[str, dict[str, Any]] = {
    "powersgd": {"powersgd_start_step": 0, "powersgd_rank": 2},
}
NEW = "new"
STEPS = 40
ROUNDED = 0.003
"""Of a gradient: what a rounding to 16 bits may lose in every step, and what others may on average."""
Step = Callable[[list[list[np.ndarray]]], list[np.ndarray]]


@pytest.fixture(autouse=True)
def dynamic_mode() -> None:
    paddle.disable_static()


def profile_of(name: str) -> Profile:
    if name == NEW:  # which the knob does not know
        return Profile().model_copy(update={"compression": name})
    return Profile(compression=name, **COMPRESSED.get(name, {}))


def references(profile: Profile) -> list[Any]:
    plan = plan_of(profile)
    wire = SimulatedWire(plan)
    parts = [SimulatedParts(bucket, plan, profile, wire) for bucket in plan.buckets]
    return [COMPRESSIONS[profile.compression].in_numpy(each) for each in parts]


def plan_of(profile: Profile) -> Any:
    specs = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]
    return build_plan(specs, Cluster.imagined(RANKS, 1), profile)


def in_numpy(profile: Profile) -> Step:
    plan, made = plan_of(profile), references(profile)
    order = list(SHAPES)

    def step(brought: list[list[np.ndarray]]) -> list[np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for bucket, reference in zip(plan.buckets, made, strict=True):
            names = [gradient.name for gradient in bucket.gradients]
            given = [[rank[order.index(name)] for name in names] for rank in brought]
            found |= dict(zip(names, reference.step(given), strict=True))
        return [np.asarray(found[name]).reshape(SHAPES[name]) for name in order]

    return step


class on_ranks:
    """Played: what all ranks get has to be the same bits."""

    def __init__(self, profile: Profile) -> None:
        self.plan, group = plan_of(profile), Group(0, range(RANKS))
        job: Any = SimpleNamespace(
            engine=SimpleNamespace(reads_values=True, device=HostDevice()),
            communicators=lambda number: [group] * number,
        )
        self.made = [
            [Parts(bucket, job, self.plan, profile, FlatAllreduce(group)).make() for bucket in self.plan.buckets]
            for _ in range(RANKS)
        ]
        self.sent: list[tuple[str, int]] = []
        """Of the last step, in turn: each collective and the bytes of a rank's buffer."""

    def __call__(self, brought: list[list[np.ndarray]]) -> list[np.ndarray]:
        order, found, self.sent = list(SHAPES), dict[str, np.ndarray](), []
        for number, bucket in enumerate(self.plan.buckets):
            names = [gradient.name for gradient in bucket.gradients]
            given = [[paddle.to_tensor(rank[order.index(name)]) for name in names] for rank in brought]
            results, sent = in_turn([self.made[rank][number].average(given[rank]) for rank in range(RANKS)])
            self.sent += [(each.kind.replace("_", ""), each.elements * ITEM_BYTES[each.dtype]) for each in sent]
            arrays = [[np.array(each.numpy()) for each in result] for result in results]
            for other in arrays[1:]:
                for one, another in zip(arrays[0], other, strict=True):
                    np.testing.assert_array_equal(one, another, err_msg="ranks go on with unlike gradients")
            found |= dict(zip(names, arrays[0], strict=True))
        return [found[name].reshape(SHAPES[name]) for name in order]

    def resumed(self, profile: Profile) -> on_ranks:
        """New ranks that load what these would save."""
        new = type(self)(profile)
        for old, one in zip(self.made, new.made, strict=True):
            alike, own = read_state([*zip(self.plan.buckets, old, strict=True)])
            unused = write_state([*zip(new.plan.buckets, one, strict=True)], {**alike, **own}, paddle.CPUPlace())
            assert unused == []
        return new


def brought(seed: int) -> list[list[np.ndarray]]:
    """What the ranks bring is unlike, and the last one's is as large as all others' together."""
    random = np.random.default_rng(seed)
    return [
        [random.standard_normal(shape).astype("float32") * (1 + rank) for shape in SHAPES.values()]
        for rank in range(RANKS)
    ]


HALVES = [
    pytest.param(name, half, id=f"{name}-{half.__name__}")
    for name, each in COMPRESSIONS.items()
    for half in (in_numpy, on_ranks)
    if half is in_numpy or not any(bucket.is_quantised for bucket in plan_of(profile_of(name)).buckets)
]
EACH = pytest.mark.parametrize(("name", "half"), HALVES)
PLAYED = [each.values[0] for each in HALVES if each.values[1] is on_ranks]
# A reference need not have NaN as ranks have it, where those can be played.
AS_ON_RANKS = [each for each in HALVES if each.values[1] is on_ranks or each.values[0] not in PLAYED]


@EACH
def test_every_rank_counts_and_what_is_not_sent_at_once_is_sent_later(
    name: str, half: Callable[[Profile], Step]
) -> None:
    """The same gradients in every step: the sum of the results follows that of the means, and does not drift away."""
    step, given = half(profile_of(name)), brought(1)
    mean = np.concatenate([np.mean(each, axis=0).ravel() for each in zip(*given, strict=True)])
    total, behind = np.zeros_like(mean), []
    for number in range(1, 2 * STEPS + 1):
        total += np.concatenate([each.ravel() for each in step(given)])
        behind.append(np.linalg.norm(total - number * mean) / np.linalg.norm(mean))
    drift = (np.mean(behind[-20:]) - np.mean(behind[STEPS - 20 : STEPS])) / STEPS
    assert drift < ROUNDED, f"{name}: {behind[::20]} gradients are missing"


@pytest.mark.parametrize(("name", "half"), AS_ON_RANKS)
def test_a_nan_of_the_last_rank_reaches_all_and_does_not_stay(name: str, half: Callable[[Profile], Step]) -> None:
    step = half(profile_of(name))
    for bad in (np.nan, np.inf):
        step(brought(2))
        given = brought(3)
        given[-1][0][5, 3] = bad
        with np.errstate(all="ignore"):
            found = step(given)
        assert not np.isfinite(found[0]).all(), f"{name}: nobody sees the {bad}"
        for number in range(4):
            for each in step(brought(4 + number)):
                assert np.isfinite(each).all(), f"{name}: {bad} is kept"


@pytest.mark.parametrize("name", PLAYED)
def test_ranks_compute_what_the_reference_says(name: str) -> None:
    ranks, reference = on_ranks(profile_of(name)), in_numpy(profile_of(name))
    for seed in range(5):
        for one, other in zip(ranks(brought(seed)), reference(brought(seed)), strict=True):
            bound = ROUNDED if COMPRESSIONS[name].wire_dtype else 1e-5
            assert np.abs(one - other).max() <= bound * RANKS * np.abs(other).max(), f"{name}, step {seed}"


@pytest.mark.parametrize("name", PLAYED)
def test_ranks_send_what_is_planned(name: str) -> None:
    ranks = on_ranks(profile_of(name))
    ranks(brought(1))
    planned = [(each.kind, each.nbytes) for bucket in ranks.plan.buckets for each in bucket.sent]
    assert ranks.sent == planned, name


@pytest.mark.parametrize("name", PLAYED)
def test_ranks_that_resume_go_on_bit_by_bit(name: str) -> None:
    ranks, profile = on_ranks(profile_of(name)), profile_of(name)
    for seed in range(5):
        ranks(brought(seed))
    resumed = ranks.resumed(profile)
    for seed in range(5, 8):
        for one, other in zip(ranks(brought(seed)), resumed(brought(seed)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{name}: something that is kept is not saved")


class Largest(Compression):
    """The larger half of what a rank has, whole numbers of it by an allreduce; it may be wrong in one of three ways."""

    fault = ""

    def sent(self, bucket: Bucket, *_: Any) -> tuple[CollectiveSpec, ...]:
        return (CollectiveSpec("allreduce", bucket.nbytes, 4),)

    def on_ranks(self, parts: Any) -> Any:
        kept = paddle.zeros([parts.bucket.elements])

        def average(gradients: Any) -> Any:
            nonlocal kept
            whole = parts.flatten(gradients) + kept
            chosen = paddle.where(whole.abs() < whole.abs().median(), paddle.zeros_like(whole), whole)
            kept = paddle.zeros_like(whole) if self.fault == "forgets" else whole - chosen
            if self.fault == "keeps NaN":
                kept = kept + 0 * whole
            else:
                kept = paddle.where(paddle.isfinite(whole), kept, paddle.zeros_like(kept))
            every = yield from parts.all_gather(chosen)
            every = every[:2] if self.fault == "ignores the third rank" else every
            return parts.split(every.mean(axis=0))

        return parts.stateless(average)

    def in_numpy(self, parts: Any) -> Any:
        kept = [np.zeros(parts.bucket.elements, "float32") for _ in range(RANKS)]

        def step(given: Any) -> list[np.ndarray]:
            wholes = [each + error for each, error in zip(parts.joined(given), kept, strict=True)]
            sent = [np.where(np.abs(each) < np.median(np.abs(each)), 0, each).astype("float32") for each in wholes]
            for error, whole, chosen in zip(kept, wholes, sent, strict=True):
                error[:] = 0 if self.fault == "forgets" else np.where(np.isfinite(whole), whole - chosen, 0)
            counted = sent[:2] if self.fault == "ignores the third rank" else sent
            total: list[np.ndarray] = parts.split(np.mean(counted, axis=0, dtype="float32"))
            return total

        return SimpleNamespace(step=step)


@pytest.mark.parametrize(
    ("fault", "notices"),
    [
        ("", None),
        ("forgets", test_every_rank_counts_and_what_is_not_sent_at_once_is_sent_later),
        ("ignores the third rank", test_every_rank_counts_and_what_is_not_sent_at_once_is_sent_later),
        ("keeps NaN", test_a_nan_of_the_last_rank_reaches_all_and_does_not_stay),
    ],
)
def test_a_new_compression_with_a_fault_does_not_pass(
    fault: str, notices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Largest(NEW, "the larger half")
    object.__setattr__(new, "fault", fault)
    monkeypatch.setitem(COMPRESSIONS, NEW, new)
    seen = []
    for tried in (
        test_every_rank_counts_and_what_is_not_sent_at_once_is_sent_later,
        test_a_nan_of_the_last_rank_reaches_all_and_does_not_stay,
    ):
        try:
            tried(NEW, on_ranks)
        except AssertionError:
            seen.append(tried)
    assert notices in seen if fault else seen == []
