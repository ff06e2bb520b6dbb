"""Embedding, one-hot and dropout with the arguments of Paddle 1.8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.nn import functional

from fleet_train.compat.parameters import layer_name, needed, parameter
from fleet_train.errors import ConversionError

_DROPOUT_MODES = {"downgrade_in_infer": "downscale_in_infer", "upscale_in_train": "upscale_in_train"}


def embedding(
    input: Any,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """``fluid.layers.embedding``: indices [..., 1] become rows [..., size[1]] of a new table (Xavier's uniform).

    ``is_distributed`` asked for a table on parameter servers and is refused.
    """
    _refuse_distributed(is_distributed)
    return embedding_v2(
        _without_last(input, "embedding"), size, is_sparse, padding_idx=padding_idx, param_attr=param_attr, dtype=dtype
    )


def embedding_v2(
    input: Any,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """``fluid.embedding``: indices [...] become rows [..., size[1]] of a new table (Xavier's uniform).

    ``padding_idx`` gives zeros and is never learned; a negative one counts from the end.
    """
    _refuse_distributed(is_distributed)
    table = parameter(layer_name("embedding", None), needed("embedding", "param_attr", param_attr), size, dtype)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += int(size[0])
    return functional.embedding(input, table, padding_idx=padding_idx, sparse=is_sparse)


def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """``fluid.layers.one_hot``: indices [..., 1] become [..., depth] in float32."""
    if allow_out_of_range:
        raise ConversionError("one_hot: allow_out_of_range=True no longer exists; clip the indices first")
    return functional.one_hot(_without_last(input, "one_hot"), depth)


def dropout(
    x: Any,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Any:
    """Set values to zero with ``dropout_prob``; by default what is left is not scaled in training but in testing."""
    del name
    if seed:
        raise ConversionError(f"dropout: seed={seed} for one layer no longer exists; use paddle.seed")
    if dropout_implementation not in _DROPOUT_MODES:
        raise ConversionError(f"dropout_implementation={dropout_implementation!r}; use {' or '.join(_DROPOUT_MODES)}")
    mode = _DROPOUT_MODES[dropout_implementation]
    return functional.dropout(x, dropout_prob, training=not is_test, mode=mode)


def _refuse_distributed(is_distributed: bool) -> None:
    if is_distributed:
        raise ConversionError(
            "embedding: is_distributed=True needs parameter servers; only collective training is supported"
        )


def _without_last(indices: Any, layer: str) -> Any:
    if not indices.shape or indices.shape[-1] != 1:
        raise ConversionError(f"{layer}: the last dimension of the indices must be 1, given {list(indices.shape)}")
    return paddle.squeeze(indices, axis=-1)
