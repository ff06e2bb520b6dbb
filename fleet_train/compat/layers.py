"""Convolution, pooling and response normalisation with the arguments of ``paddle.fluid.layers`` 1.8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle.nn import functional

from fleet_train.compat.parameters import activated, dropout, dtype_of, layer_name, needed, parameter
from fleet_train.errors import ConversionError

_POOLS = {
    "max": (functional.max_pool2d, functional.adaptive_max_pool2d),
    "avg": (functional.avg_pool2d, functional.adaptive_avg_pool2d),
}


def pair(value: Any) -> list[int]:
    """A size for height and width, given as one number or as two."""
    return [int(size) for size in value] if isinstance(value, Sequence) else [int(value)] * 2


def conv2d(
    input: Any,
    num_filters: int,
    filter_size: int | Sequence[int],
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """A convolution with a new filter. Filters start as Normal(0, sqrt(2 / (height * width * input channels)))."""
    inputs, size = channels(input, data_format), pair(filter_size)
    alone = inputs == groups and num_filters % inputs == 0 and not use_cudnn
    layer = layer_name("depthwise_conv2d" if alone else "conv2d", name)
    start = paddle.nn.initializer.Normal(0.0, math.sqrt(2.0 / (size[0] * size[1] * inputs)))
    shape = [num_filters, inputs // (groups or 1), *size]
    weight = parameter(layer, needed(layer, "param_attr", param_attr), shape, dtype_of(input), start)
    bias = parameter(layer, bias_attr, [num_filters], dtype_of(input), is_bias=True)
    value = functional.conv2d(input, weight, bias, stride, padding, dilation, groups or 1, data_format=data_format)
    return activated(value, act)


def conv2d_transpose(
    input: Any,
    num_filters: int,
    output_size: Any = None,
    filter_size: Any = None,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """A transposed convolution with a new filter, which starts as Xavier's uniform. ``filter_size`` is needed here."""
    if filter_size is None:
        raise ConversionError("conv2d_transpose: give filter_size; it is not derived from output_size here")
    inputs = channels(input, data_format)
    alone = inputs == groups == num_filters and not use_cudnn
    layer = layer_name("depthwise_conv2d_transpose" if alone else "conv2d_transpose", name)
    shape = [inputs, num_filters // (groups or 1), *pair(filter_size)]
    weight = parameter(layer, needed(layer, "param_attr", param_attr), shape, dtype_of(input))
    bias = parameter(layer, bias_attr, [num_filters], dtype_of(input), is_bias=True)
    value = functional.conv2d_transpose(
        input,
        weight,
        bias,
        stride,
        padding,
        groups=groups or 1,
        dilation=dilation,
        output_size=output_size,
        data_format=data_format,
    )
    return activated(value, act)


def pool2d(
    input: Any,
    pool_size: Any = -1,
    pool_type: str = "max",
    pool_stride: Any = 1,
    pool_padding: Any = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCHW",
) -> Any:
    """Max or average pooling; ``global_pooling`` over the whole image, whatever the size. The stride's default is 1."""
    del use_cudnn, name
    if pool_type not in _POOLS:
        raise ConversionError(f"pool2d: pool_type={pool_type!r}; use 'max' or 'avg'")
    pool, whole = _POOLS[pool_type]
    if global_pooling:
        if data_format != "NCHW":
            axes = [1, 2]
            return (paddle.max if pool_type == "max" else paddle.mean)(input, axis=axes, keepdim=True)
        return whole(input, 1)
    more = {"exclusive": exclusive} if pool_type == "avg" else {}
    return pool(input, pool_size, pool_stride, pool_padding, ceil_mode=ceil_mode, data_format=data_format, **more)


def lrn(
    input: Any,
    n: int = 5,
    k: float = 1.0,
    alpha: float = 1e-4,
    beta: float = 0.75,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """Local response normalisation: the sum of squares over ``n`` channels, where today's takes their mean."""
    del name
    return functional.local_response_norm(input, n, alpha=alpha * n, beta=beta, k=k, data_format=data_format)


def simple_img_conv_pool(
    input: Any,
    num_filters: int,
    filter_size: Any,
    pool_size: Any,
    pool_stride: Any,
    pool_padding: Any = 0,
    pool_type: str = "max",
    global_pooling: bool = False,
    conv_stride: Any = 1,
    conv_padding: Any = 0,
    conv_dilation: Any = 1,
    conv_groups: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    use_cudnn: bool = True,
) -> Any:
    """One convolution and one pooling (``fluid.nets``)."""
    del use_cudnn
    convolved = conv2d(
        input,
        num_filters,
        filter_size,
        conv_stride,
        conv_padding,
        conv_dilation,
        conv_groups,
        param_attr,
        bias_attr,
        act=act,
    )
    return pool2d(convolved, pool_size, pool_type, pool_stride, pool_padding, global_pooling)


def img_conv_group(
    input: Any,
    conv_num_filter: Sequence[int],
    pool_size: Any,
    conv_padding: Any = 1,
    conv_filter_size: Any = 3,
    conv_act: str | None = None,
    param_attr: Any = None,
    conv_with_batchnorm: Any = False,
    conv_batchnorm_drop_rate: Any = 0.0,
    pool_stride: Any = 1,
    pool_type: str = "max",
    use_cudnn: bool = True,
) -> Any:
    """Several convolutions, each with batch norm and dropout if asked, and one pooling (``fluid.nets``)."""
    del use_cudnn
    value, count = input, len(conv_num_filter)

    def each(given: Any) -> list[Any]:
        return list(given) if isinstance(given, (list, tuple)) else [given] * count

    settings = map(each, (conv_padding, conv_filter_size, param_attr, conv_with_batchnorm, conv_batchnorm_drop_rate))
    for filters, padding, size, attr, normed, rate in zip(conv_num_filter, *settings, strict=True):
        act = None if normed else conv_act
        value = conv2d(value, filters, size, padding=padding, param_attr=attr, act=act)
        if normed:
            value = batch_norm(value, act=conv_act)
            value = dropout(value, rate) if abs(rate) > 1e-5 else value
    return pool2d(value, pool_size, pool_type, pool_stride)


# Arithmetic with the arguments of ``paddle.fluid.layers`` 1.8: ``axis`` says where the second shape begins.


def _along(y: Any, x: Any, axis: int) -> Any:
    """``y`` with ones behind its shape, so that it begins at ``axis`` of ``x``; -1: it ends where ``x`` ends."""
    behind = 0 if axis == -1 else len(x.shape) - axis - len(y.shape)
    if behind <= 0:
        return y
    return paddle.unsqueeze(y, axis=list(range(len(y.shape), len(y.shape) + behind)))


def _operation(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def elementwise(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
        del name
        return activated(function(x, _along(y, x, axis)), act)

    elementwise.__name__ = elementwise.__qualname__ = f"elementwise_{name}"
    elementwise.__doc__ = (
        f"``{name}`` of two values of one dtype; the shape of ``y`` is that of ``x`` from ``axis`` on."
    )
    return elementwise


elementwise_add = _operation("add", paddle.add)
elementwise_sub = _operation("sub", paddle.subtract)
elementwise_mul = _operation("mul", paddle.multiply)
elementwise_div = _operation("div", paddle.divide)
elementwise_max = _operation("max", paddle.maximum)
elementwise_min = _operation("min", paddle.minimum)
elementwise_pow = _operation("pow", paddle.pow)


def flatten(x: Any, axis: int = 1, name: str | None = None) -> Any:
    """The values in two dimensions: the first ``axis`` of ``x`` as one, the others as one."""
    del name
    if axis == 0:
        return paddle.reshape(x, [1, -1])
    inner = [int(size) for size in x.shape[axis:]]
    if -1 not in inner:
        return paddle.reshape(x, [-1, math.prod(inner)])
    front = x if axis == 1 else paddle.flatten(x, 0, axis - 1)
    return front if len(front.shape) == 2 else paddle.flatten(front, 1)


def mul(x: Any, y: Any, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Any:
    """Matrix product of ``x`` and ``y``, each flattened to a matrix; the result has the outer dimensions of both."""
    del name
    outer_x = [int(size) for size in x.shape[:x_num_col_dims]]
    outer_y = [int(size) for size in y.shape[y_num_col_dims:]]
    product = paddle.matmul(flatten(x, x_num_col_dims), flatten(y, y_num_col_dims))
    if len(outer_x) == len(outer_y) == 1:
        return product
    return paddle.reshape(product, [*outer_x, *outer_y])


def cos_sim(X: Any, Y: Any) -> Any:
    """Cosine of the angle between the rows of ``X`` and those of ``Y`` (or its one row), as a column [rows, 1]."""
    x, y = flatten(X), flatten(Y)

    def over_rows(value: Any) -> Any:
        return paddle.sum(value, axis=1, keepdim=True)

    return over_rows(x * y) / (paddle.sqrt(over_rows(x * x)) * paddle.sqrt(over_rows(y * y)))


# Normalisations with the arguments of ``paddle.fluid.layers`` 1.8.


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
    ones, zeros = paddle.nn.initializer.Constant(1.0), paddle.nn.initializer.Constant(0.0)
    scale = parameter(layer, needed(layer, "param_attr", param_attr), size, dtype, ones)
    bias = parameter(layer, needed(layer, "bias_attr", bias_attr), size, dtype, is_bias=True)
    statistics = []
    for given, start in ((moving_mean_name, zeros), (moving_variance_name, ones)):
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
    size, dtype, ones = [math.prod(shape)], dtype_of(input), paddle.nn.initializer.Constant(1.0)
    weight = parameter(layer, param_attr if scale else False, size, dtype, ones)
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
    ones = paddle.nn.initializer.Constant(1.0)
    weight = parameter(layer, param_attr or False, size, dtype_of(input), ones)
    bias = parameter(layer, bias_attr or False, size, dtype_of(input), is_bias=True)
    return activated(functional.group_norm(input, groups, epsilon, weight, bias, data_layout), act)


def fill_constant_batch_size_like(
    input: Any,
    shape: Sequence[int],
    dtype: str,
    value: float,
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    force_cpu: bool = False,
) -> Any:
    """``value`` in ``shape``, of which one size is that of ``input``, such as the batch."""
    del force_cpu
    sizes: list[Any] = [int(size) for size in shape]
    sizes[output_dim_idx] = paddle.shape(input)[input_dim_idx]
    return paddle.full(sizes, value, dtype)
