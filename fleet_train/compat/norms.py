"""Normalisations with the arguments of ``paddle.fluid.layers`` 1.8."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn import functional

from fleet_train.compat.activation import activated


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
    del in_place, name
    layer = paddle.nn.BatchNorm(
        channels(input, data_layout),
        is_test=is_test,
        momentum=momentum,
        epsilon=epsilon,
        param_attr=param_attr,
        bias_attr=bias_attr,
        data_layout=data_layout,
        moving_mean_name=moving_mean_name,
        moving_variance_name=moving_variance_name,
        do_model_average_for_mean_and_var=do_model_average_for_mean_and_var,
        use_global_stats=use_global_stats,
    )
    if is_test:
        layer.eval()
    return activated(layer(input), act)


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
    shape = [int(size) for size in input.shape[begin_norm_axis:]]
    attributes = {
        "weight_attr": param_attr if scale and param_attr is not False else False,
        "bias_attr": bias_attr if shift and bias_attr is not False else False,
    }
    layer = paddle.nn.LayerNorm(shape, epsilon, name=name, **attributes)
    return activated(layer(input), act)


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
    """Normalise over groups of channels, with new scale and bias."""
    del name
    size = channels(input, data_layout)
    weight, bias = (
        None
        if given is False
        else paddle.create_parameter(
            [size], "float32", attr=given, default_initializer=paddle.nn.initializer.Constant(start)
        )
        for given, start in ((param_attr, 1.0), (bias_attr, 0.0))
    )
    return activated(functional.group_norm(input, groups, epsilon, weight, bias, data_layout), act)
