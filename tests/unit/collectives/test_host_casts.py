from __future__ import annotations

import numpy as np
import paddle
import pytest

from fleet_train.collectives.methods.dense import cast_for, cast_on_host

SPECIAL = [0x7FC00000, 0x7F800001, 0xFFC00000, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]  # not a number
SPECIAL += [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000000, 0x80000000, 0x00000001, 0x80008000]
SPECIAL += [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0x007FFFFF]  # ties, and beside them


def bits_of(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint16 if tensor.dtype == paddle.bfloat16 else np.uint32)


@pytest.mark.parametrize("elements", [1, 1 << 16, 200_001])
@pytest.mark.parametrize("seed", range(3))
def test_casts_have_the_bits_of_paddles(seed: int, elements: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, elements + len(SPECIAL), np.uint32)
    bits[-len(SPECIAL) :] = SPECIAL
    wide = paddle.to_tensor(bits.view(np.float32))
    narrow = cast_on_host(wide, "bfloat16")
    assert narrow.dtype == paddle.bfloat16
    np.testing.assert_array_equal(bits_of(narrow), bits_of(wide.cast("bfloat16")))
    back = cast_on_host(narrow, "float32")
    np.testing.assert_array_equal(bits_of(back), bits_of(narrow.cast("float32")))
    np.testing.assert_array_equal(bits_of(wide), bits)


def test_memory_that_is_given_is_used() -> None:
    wide, given = paddle.to_tensor([1.0, 3.0]), paddle.zeros([2])
    assert cast_on_host(cast_on_host(wide, "bfloat16"), "float32", given) is given
    assert given.tolist() == [1.0, 3.0]


def test_other_dtypes_are_paddles() -> None:
    found = cast_on_host(paddle.to_tensor([1.5, -2.5]), "float64")
    assert found.dtype == paddle.float64
    assert found.tolist() == [1.5, -2.5]
    assert cast_on_host(paddle.to_tensor([1.5], "float64"), "bfloat16").dtype == paddle.bfloat16


def test_the_host_reads_nothing_of_a_device() -> None:
    assert cast_for(True) is cast_on_host
    assert cast_for(False) is not cast_on_host
    assert cast_for(False)(paddle.to_tensor([1.0]), "bfloat16").dtype == paddle.bfloat16


def test_views_that_are_not_contiguous_are_taken() -> None:
    square = paddle.arange(6, dtype="float32").reshape([2, 3]).t()
    assert cast_on_host(square, "bfloat16").cast("float32").tolist() == [[0, 3], [1, 4], [2, 5]]
