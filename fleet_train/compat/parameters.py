"""Parameters with the names that Paddle 1.8 gave them, and the two layers that are little else.

``paddle.static.nn.fc`` and ``paddle.create_parameter`` of today count names per process. Here as in 1.8,
``paddle.utils.unique_name.guard`` starts the count again: two programs built by the same lines share their parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import paddle
from paddle.nn import functional
from paddle.utils import unique_name

from fleet_train.errors import ConversionError


def layer_name(kind: str, name: str | None) -> str:
    """The first part of a layer's parameters' names: ``name``, else ``fc_0``, ``fc_1``, ..."""
    return unique_name.generate(kind) if name is None else name


def parameter(
    layer: str, given: Any, shape: Sequence[int], dtype: str, default: Any = None, is_bias: bool = False
) -> Any:
    """A parameter of ``layer``, called ``layer.w_0`` or ``layer.b_0`` unless ``given`` names it; None for False.

    Args:
        given: what 1.8 took for attributes: None or True, a ParamAttr, a name, an initializer, a regularizer, False.
        default: the initializer where ``given`` has none; None: Xavier's uniform, zeros for a bias.
    """
    if isinstance(given, (list, tuple)):
        raise ConversionError(f"{layer}: {len(given)} attributes for one parameter; give one")
    attributes = copy.deepcopy(paddle.ParamAttr._to_attr(given))
    if attributes is False:
        return None
    if attributes.name is None:
        attributes.name = unique_name.generate(f"{layer}.{'b' if is_bias else 'w'}")
    sizes = [int(size) for size in shape]
    return paddle.create_parameter(sizes, dtype, attr=attributes, is_bias=is_bias, default_initializer=default)


def needed(layer: str, argument: str, given: Any) -> Any:
    """``given``, unless it is False: the layer cannot do without this parameter. Raises ConversionError."""
    if given is False:
        raise ConversionError(f"{layer}: {argument}=False: it has no form without this parameter; leave {argument} out")
    return given


def dtype_of(value: Any) -> str:
    """``"float32"`` for an input in single precision."""
    return str(value.dtype).rpartition(".")[2].lower()


def create_parameter(
    shape: Sequence[int],
    dtype: str,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Any = None,
) -> Any:
    """A parameter by itself: called ``name``, or ``create_parameter_0.w_0`` and so on."""
    layer = layer_name("create_parameter", name)
    given = paddle.ParamAttr(name=name) if attr is None else needed("create_parameter", "attr", attr)
    return parameter(layer, given, shape, dtype, default_initializer, is_bias)


def fc(
    input: Any,
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """A fully connected layer over the axes from ``num_flatten_dims`` on (-1: the last). A list of inputs gets a weight
    each, whose attributes ``param_attr`` may list, and the products are summed.
    """
    layer, products = layer_name("fc", name), []
    inputs = list(input) if isinstance(input, (list, tuple)) else [input]
    for value, given in zip(inputs, _of_each(param_attr, len(inputs)), strict=True):
        front = len(value.shape) - 1 if num_flatten_dims == -1 else num_flatten_dims
        flattened = [int(extent) for extent in value.shape[front:]]
        if min(flattened) < 0:
            raise ConversionError(f"{layer}: the input {list(value.shape)} is open behind axis {front}; fix its shape")
        weight = parameter(layer, needed(layer, "param_attr", given), [math.prod(flattened), size], dtype_of(value))
        products.append(paddle.matmul(value if len(flattened) == 1 else paddle.flatten(value, front), weight))
    total = products[0] if len(products) == 1 else paddle.add_n(products)
    bias = parameter(layer, bias_attr, [size], dtype_of(inputs[0]), is_bias=True)
    return activated(total if bias is None else total + bias, act)


def _of_each(given: Any, inputs: int) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * inputs
    if len(given) not in (1, inputs):
        raise ConversionError(f"fc: param_attr lists {len(given)} attributes for {inputs} inputs")
    return list(given) * (inputs if len(given) == 1 else 1)


# Embedding, one-hot and dropout with the arguments of Paddle 1.8.


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


# ``act="relu"``: the activation that layers of Paddle 1.x could bring along.


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "elu": functional.elu,
    "exp": paddle.exp,
    "gelu": functional.gelu,
    "hard_sigmoid": partial(functional.hardsigmoid, slope=0.2),
    "hard_swish": functional.hardswish,
    "leaky_relu": partial(functional.leaky_relu, negative_slope=0.02),
    "logsigmoid": functional.log_sigmoid,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "sigmoid": functional.sigmoid,
    "softmax": functional.softmax,
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "sqrt": paddle.sqrt,
    "square": paddle.square,
    "swish": functional.swish,
    "tanh": paddle.tanh,
}


def activated(value: Any, act: str | None) -> Any:
    """``act`` applied to ``value``; None: the value itself. Raises ConversionError for a name that is not known."""
    if act is None:
        return value
    if act not in ACTIVATIONS:
        raise ConversionError(f"act={act!r}: not supported; use one of {', '.join(sorted(ACTIVATIONS))}, or apply it")
    return ACTIVATIONS[act](value)
