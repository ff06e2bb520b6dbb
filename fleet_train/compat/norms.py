"""Normalisations with the arguments of ``paddle.fluid.layers`` 1.8."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle.nn import functional

from fleet_train.compat.activation import activated
from fleet_train.compat.parameters import dtype_of, layer_name, needed, parameter


def channels(value: Any, data_format: str) -> int:
    """Channels of a batch of images."""
    return int(value.shape[1 if data_format.startswith("NC") else -1])


def batch_norm(
    input: Any,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Any:
    """Batch norm with new scale, bias and running statistics (statistics = momentum * old + (1 - momentum) * batch)."""
    del in_place
    layer, size = layer_name("batch_norm", name), [channels(input, data_layout)]
    dtype = "float32" if dtype_of(input) == "float16" else dtype_of(input)
    one, zero = paddle.nn.initializer.Constant(1.0), paddle.nn.initializer.Constant(0.0)
    scale = parameter(layer, needed(layer, "param_attr", param_attr), size, dtype, one)
    bias = parameter(layer, needed(layer, "bias_attr", bias_attr), size, dtype, is_bias=True)
    statistics = []
    for given, start in ((moving_mean_name, zero), (moving_variance_name, one)):
        attributes = paddle.ParamAttr(given, start, trainable=False, do_model_average=do_model_average_for_mean_and_var)
        statistics.append(parameter(layer, attributes, size, dtype))
        statistics[-1].stop_gradient = True
    value = functional.batch_norm(
        input,
        *statistics,
        scale,
        bias,
        training=not is_test,
        momentum=momentum,
        epsilon=epsilon,
        data_format=data_layout,
        use_global_stats=use_global_stats or None,
    )
    return activated(value, act)


def layer_norm(
    input: Any,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Normalise over all axes from ``begin_norm_axis`` on, with new scale and shift unless switched off."""
    layer, shape = layer_name("layer_norm", name), [int(size) for size in input.shape[begin_norm_axis:]]
    size, dtype, one = [math.prod(shape)], dtype_of(input), paddle.nn.initializer.Constant(1.0)
    weight = parameter(layer, param_attr if scale else False, size, dtype, one)
    bias = parameter(layer, bias_attr if shift else False, size, dtype, is_bias=True)
    return activated(functional.layer_norm(input, shape, weight, bias, epsilon), act)


def group_norm(
    input: Any,
    groups: int,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    data_layout: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Normalise over groups of channels. As in 1.8 there is a scale only where ``param_attr`` is given, the same for
    the bias: by default this layer has no parameters.
    """
    layer, size = layer_name("group_norm", name), [channels(input, data_layout)]
    one = paddle.nn.initializer.Constant(1.0)
    weight = parameter(layer, param_attr or False, size, dtype_of(input), one)
    bias = parameter(layer, bias_attr or False, size, dtype_of(input), is_bias=True)
    return activated(functional.group_norm(input, groups, epsilon, weight, bias, data_layout), act)
