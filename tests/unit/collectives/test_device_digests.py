"""Digests of parameters on a device: equal to numpy's of the same bits, and sensitive to every change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.engine import HostDevice
from fleet_train.collectives.replica_check import FirstGradients, device_digests

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


def digest_of(bits: np.ndarray[Any, Any], dtype: str, shape: Sequence[int]) -> int:
    return int(device_digests([tensor_of(bits, dtype, shape)]).numpy()[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_those_of_the_reference(dtype: str, seed: int) -> None:
    everything = [random_bits(dtype, shape, seed) for shape in SHAPES]
    digests = device_digests([tensor_of(bits, dtype, shape) for bits, shape in zip(everything, SHAPES, strict=True)])
    assert digests.dtype == paddle.int64
    assert digests.numpy().tolist() == [reference(bits, dtype) for bits in everything]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 not in shape], ids=str)
def test_one_changed_bit_anywhere_changes_the_digest(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    bits, chance = random_bits(dtype, shape, seed), random.Random(seed)
    before = digest_of(bits, dtype, shape)
    for _ in range(20):
        changed = bits.copy()
        place, bit = chance.randrange(len(bits)), 0 if dtype == "bool" else chance.randrange(8)
        changed[place] ^= 1 << bit
        assert digest_of(changed, dtype, shape) != before, f"bit {bit} of byte {place}"


def test_every_bit_of_a_small_tensor_is_seen() -> None:
    bits = random_bits("float32", (9,), 1)
    changed = []
    for place in range(8 * len(bits)):
        other = bits.copy()
        other[place // 8] ^= 1 << place % 8
        changed.append(digest_of(other, "float32", (9,)))
    assert digest_of(bits, "float32", (9,)) not in changed


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1.0, np.nextafter(np.float32(1), np.float32(2)))])
def test_what_compares_as_equal_or_nearly_so_is_another_digest(one: float, other: float) -> None:
    first, second = (device_digests([paddle.full([4], value, "float32")]).numpy()[0] for value in (one, other))
    assert first != second


def test_elements_that_changed_places_are_another_digest() -> None:
    values = paddle.to_tensor([1.0, 2.0, 3.0])
    assert device_digests([values]).numpy()[0] != device_digests([values.flip([0])]).numpy()[0]


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


def test_of_a_large_gradient_the_first_values_are_compared() -> None:
    large = np.ones(1 << 19, "float32")
    changed = [large.copy() for _ in range(2)]
    changed[0][1000], changed[1][-1] = 2.0, 2.0
    assert [told([large], [one]) == told([large], [large]) for one in changed] == [False, True]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_gradients_of_other_dtypes_are_told(dtype: str) -> None:
    first = FirstGradients(HostDevice(), 1)
    for step, value in ((1, 1.5), (2, 2.5)):
        first.see([paddle.full([2, 3], value, dtype)], step)
    assert first.digest(3) is not None
