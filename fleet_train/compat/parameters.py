"""Parameters with the names that Paddle 1.8 gave them, and the two layers that are little else.

``paddle.static.nn.fc`` and ``paddle.create_parameter`` of today count names per process. Here as in 1.8,
``paddle.utils.unique_name.guard`` starts the count again: two programs built by the same lines share their parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle.utils import unique_name

from fleet_train.compat.activation import activated
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
        flattened = [int(one) for one in value.shape[front:]]
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
