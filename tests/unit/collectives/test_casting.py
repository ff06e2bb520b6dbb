from __future__ import annotations

import paddle
import pytest

from fleet_train.collectives.paddle_compat import as_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_tensor_of_a_dtype_is_cast_to_others_only(dtype: str) -> None:
    tensor = paddle.ones([2], dtype)
    assert as_dtype(tensor, dtype) is tensor
    other = as_dtype(tensor, "float64")
    assert (str(other.dtype), other.tolist()) == ("paddle.float64", [1.0, 1.0])
