"""Comparing replicas: digests of parameters and first gradients, and which parameter of which rank differs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import replica_check
from fleet_train.collectives.engine import HostDevice
from fleet_train.collectives.replica_check import FirstGradients, device_digests
from fleet_train.convert import replicas
from fleet_train.convert.program_state import OPTIMIZER, PARAMETER, PASS, ProgramState
from fleet_train.errors import ScheduleMismatch

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
SHAPES: Sequence[tuple[int, ...]] = ((), (1,), (0,), (3, 0, 2), (7,), (5, 3, 2), (2, 1000))
SEEDS = range(3)


def tensor_of(bits: np.ndarray[Any, Any], dtype: str, shape: Sequence[int]) -> Any:
    """Any bits at all, NaN among them. bfloat16 has no numpy dtype: its bits are viewed."""
    if dtype == "bfloat16":
        return paddle.view(paddle.to_tensor(bits.view(np.int16)), "bfloat16").reshape(shape)
    return paddle.to_tensor(bits.view(dtype)).reshape(shape)


def random_bits(dtype: str, shape: Sequence[int], seed: int) -> np.ndarray[Any, Any]:
    """uint8 of all elements' bytes, flat."""
    size = {"bfloat16": 2}.get(dtype) or np.dtype(dtype).itemsize
    elements = int(np.prod(shape, dtype=int))
    high = 2 if dtype == "bool" else 256
    return np.random.default_rng([seed, elements, size]).integers(0, high, elements * size, dtype=np.uint8)


def reference(bits: np.ndarray[Any, Any], dtype: str) -> int:
    """In Python's whole numbers, cut to 64 bits with a sign."""
    size = {"bfloat16": 2}.get(dtype) or np.dtype(dtype).itemsize
    kind = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[size]
    total = sum(int(value) * (2 * index + 1) for index, value in enumerate(bits.view(kind))) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("piece", [1 << 22, 7], ids=["whole", "in pieces"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_those_of_the_reference(dtype: str, seed: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_check, "_PIECE", piece)
    everything = [random_bits(dtype, shape, seed) for shape in SHAPES]
    digests = device_digests([tensor_of(bits, dtype, shape) for bits, shape in zip(everything, SHAPES, strict=True)])
    assert digests.dtype == paddle.int64
    assert digests.numpy().tolist() == [reference(bits, dtype) for bits in everything]


def test_tensors_of_several_dtypes_are_digested_in_their_order_and_left_as_they_are() -> None:
    tensors = [tensor_of(random_bits(dtype, (5, 3), 2), dtype, (5, 3)) for dtype in DTYPES]
    copies = [tensor.clone() for tensor in tensors]
    together = device_digests(tensors).numpy().tolist()
    assert together == [int(device_digests([tensor]).numpy()[0]) for tensor in tensors]
    assert together == device_digests(copies).numpy().tolist()
    assert [tensor.shape for tensor in tensors] == [[5, 3]] * len(DTYPES)


def told(*updates: Sequence[Any], buckets: int = 1) -> int | None:
    """What is told after updates with these gradients, a tensor for each bucket."""
    first = FirstGradients(HostDevice(), buckets)
    for step, gradients in enumerate(updates, start=1):
        for gradient in gradients:
            first.see([paddle.to_tensor(np.asarray(gradient, "float32"))], step)
        assert step > 2 or first.digest(step) is None, "the copies of this step have not ended"
    digest = first.digest(len(updates) + 1)
    assert first.digest(len(updates) + 2) is None, "once"
    return digest


def test_the_first_two_updates_are_told_and_no_later_one() -> None:
    one, two, three = [[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]
    assert told(one) is None
    assert told(one, two) == told(one, two, three) is not None
    assert len({told(one, two), told(one, three), told(two, one), told(three, two)}) == 4
    assert told([[1.0], [2.0]], [[3.0], [4.0]], buckets=2) != told([[1.0], [2.0]], [[3.0], [5.0]], buckets=2)
    assert told([[1.0], [2.0]], [[3.0]], buckets=2) is None, "the second update lacks a bucket"


@pytest.mark.parametrize("nothing", [0.0, -0.0, np.nan, np.inf])
def test_gradients_without_a_value_are_equal_by_nature_and_not_told(nothing: float) -> None:
    assert told([[nothing] * 3], [[1.0, 2.0, 3.0]]) is None
    assert told([[nothing, 1.0]], [[1.0, nothing]]) == told([[0.0, 1.0]], [[1.0, 0.0]]) is not None


CLUSTER = Cluster.imagined(4, 1)
NAMES = ["w0", "w1"]


def job_of(details: dict[int, list[int]], world_size: int = 4) -> Any:
    """A job whose ranks bring these digests; this one is rank 0."""
    told: list[tuple[str, Any]] = []

    def compare(name: str, value: Any) -> list[Any]:
        told.append((name, value))
        wholes = {zlib.crc32(np.asarray(one, np.int64).tobytes()) for one in details.values()}
        return [] if len(wholes) == 1 else [([(0, 0)], value)]

    def all_gather(name: str, value: Any) -> dict[int, Any]:
        told.append((name, value))
        return details

    return SimpleNamespace(cluster=CLUSTER, world_size=world_size, compare=compare, all_gather=all_gather, told=told)


@pytest.mark.parametrize(
    ("details", "name", "odd"),
    [
        ([[1, 2], [1, 2], [1, 3], [1, 2]], "w1", [2]),
        ([[5, 2], [1, 2], [1, 2], [1, 2]], "w0", [0]),
        ([[1, 2], [1, 3], [4, 2], [1, 2]], "w0", [2]),  # the first parameter that differs
        ([[1], [2], [1], [3], [1]], "w0", [1, 3]),
    ],
)
def test_the_first_parameter_that_differs_and_the_ranks_outside_the_majority_are_named(
    details: list[list[int]], name: str, odd: list[int]
) -> None:
    ranks = len(details)
    told = replica_check.explain_drift(job_of({}, ranks), "step 7", NAMES, dict(enumerate(details)))
    whose = ", ".join(CLUSTER.describe(rank) for rank in odd)
    others = f"differs from that of the other {ranks - len(odd)} ranks, which agree. "
    assert told.startswith(f"replicas have diverged at step 7: '{name}' of {whose} {others}")
    assert told.endswith("(divergence_check_steps)")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([2, 3, 3, 2], "cannot be told (ranks 0+3, ranks 1+2). "),
        ([2, 3, 4, 2], "cannot be told (ranks 0+3, rank 1, rank 2). "),  # the most frequent, but not a majority
        ([2, 3, 4], "has 3 different values, and none of them on more than half of the 3 ranks"),
        ([*range(9), 8], "rank 6, rank 7, ...). "),
        ([*[1] * 9, *[2] * 9], "(ranks 0+1+2+3+4+5+6+7+..., ranks 9+"),
    ],
)
def test_without_a_majority_that_is_said(values: list[int], told: str) -> None:
    found = {rank: [value] for rank, value in enumerate(values)}
    assert told in replica_check.explain_drift(job_of({}, len(values)), "step 7", NAMES, found)


def test_equal_ranks_need_one_barrier_and_unequal_ones_send_their_digests() -> None:
    tensors = [paddle.to_tensor([1.0, 2.0]), paddle.to_tensor([[3]], dtype="int64")]
    mine = [zlib.crc32(np.array([1.0, 2.0], "<f4").tobytes()), zlib.crc32(np.array([3], "<i8").tobytes())]
    assert replica_check.digests(tensor.numpy() for tensor in tensors) == mine
    whole = zlib.crc32(np.asarray(mine, np.int64).tobytes())
    equal = job_of(dict.fromkeys(range(4), mine))
    replica_check.compare(equal, "step 1", NAMES, tensors)
    assert equal.told == [("digest at step 1", whole)]
    unequal = job_of({0: mine, 1: mine, 2: mine, 3: [mine[0], 0]})
    with pytest.raises(ScheduleMismatch, match="'w1' of ") as raised:
        replica_check.compare(unequal, "step 2", NAMES, tensors)
    assert raised.value.failed_rank == 3
    assert unequal.told == [("digest at step 2", whole), ("digests at step 2", mine)]


KINDS = {
    "w": PARAMETER,
    "w_1": PARAMETER,
    "mean": PARAMETER,  # of a batch norm
    "w_moment1_0": OPTIMIZER,
    "w_1_moment1_0": OPTIMIZER,
    "w@average": PASS,
    "w@gradient_merge": PASS,  # each rank's own
    "seen_by_this_rank": OPTIMIZER,  # a script's own value
    "loss_scaling_0": PASS,
}


@pytest.mark.parametrize(
    ("every", "averager", "with_optimizer", "copied", "others"),
    [
        (100, None, True, False, True),
        (100, None, True, True, True),
        (100, None, False, False, False),
        (100, "in local steps", True, False, False),
        (100, "before them", True, False, True),
        (0, None, True, False, None),
    ],
)
def test_before_a_save_what_the_ranks_must_hold_alike_is_compared(
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    averager: str | None,
    with_optimizer: bool,
    copied: bool,
    others: bool | None,
) -> None:
    """The trained parameters, and ``others``. What rank 0 has ``copied`` for the save is not copied again."""
    told: list[Any] = []
    values = {name: np.full(2, number, "float32") for number, name in enumerate(KINDS)}
    monkeypatch.setattr(replicas, "borrowed", lambda variable: pytest.fail("copied again") if copied else variable)
    state = ProgramState.__new__(ProgramState)
    state.kinds, state.variables = KINDS, values
    schedule = SimpleNamespace(is_synchronous=lambda _: averager == "before them")
    exchange: Any = SimpleNamespace(
        trained=["w", "w_1"],
        owners=0,
        kept={},
        averager=averager and SimpleNamespace(schedule=schedule),
        step=8,
        check=SimpleNamespace(is_asked_for=every > 0),
        compare_saved=lambda names, digests: told.append((names, digests)),
    )
    replicas.compare_replicas(state, exchange, with_optimizer, *([values] if copied else []))
    names = ["w", "w_1", *(["w_moment1_0", "w_1_moment1_0", "w@average"] if others else [])]
    assert told == ([] if others is None else [(names, [zlib.crc32(values[name].data) for name in names])])


def test_without_a_rank_to_blame_that_is_said() -> None:
    told = replica_check.explain_drift(job_of({}, 2), "step 7", NAMES, {0: [1, 2], 1: [1, 3]})
    both = f"{CLUSTER.describe(0)} and {CLUSTER.describe(1)}"
    assert f"'w1' differs between {both}: one of the two was changed, and which one cannot be told. " in told
    told = replica_check.explain_drift(job_of({}), "step 7", NAMES, {rank: [1, 2] for rank in range(4)})
    assert told == "replicas have diverged at step 7"
