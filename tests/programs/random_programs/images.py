"""Blocks that take an image."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from tests.programs.random_programs.blocks import IMAGE, SEQUENCE, VECTOR, Builder, block


def _channels(h: Any) -> int:
    return int(h.shape[1])


def _conv(g: Builder, h: Any, filters: int, size: int = 3, **given: Any) -> Any:
    return nn.Conv2D(_channels(h), filters, size, padding=size // 2, **({"bias_attr": g.bias} | given))(h)


@block(IMAGE)
def convolution(g: Builder, h: Any) -> Any:
    return F.relu(_conv(g, h, g.pick(2, 4)))


@block(IMAGE)
def dilated_convolution(g: Builder, h: Any) -> Any:
    return paddle.tanh(nn.Conv2D(_channels(h), 4, 3, padding=2, dilation=2, bias_attr=g.bias)(h))


@block(IMAGE)
def depthwise_convolution(g: Builder, h: Any) -> Any:
    return _conv(g, paddle.tanh(_conv(g, h, _channels(h), groups=_channels(h))), 4, 1)


@block(IMAGE)
def grouped_convolution(g: Builder, h: Any) -> Any:
    return paddle.tanh(_conv(g, _conv(g, h, 4, 1), 4, groups=2))


@block(IMAGE)
def transposed_convolution(g: Builder, h: Any) -> Any:
    return paddle.tanh(nn.Conv2DTranspose(_channels(h), 2, 3, padding=1, bias_attr=g.bias)(h))


@block(IMAGE)
def residual_convolution(g: Builder, h: Any) -> Any:
    return h + _conv(g, F.silu(_conv(g, h, 4)), _channels(h))


@block(IMAGE)
def largest_pixels(g: Builder, h: Any) -> Any:
    return F.max_pool2d(_conv(g, h, 3), 2) if int(h.shape[2]) >= 4 else _conv(g, h, 3)


@block(IMAGE)
def mean_pixels(g: Builder, h: Any) -> Any:
    return F.avg_pool2d(h, 3, stride=1, padding=1) * g.parameter([1, _channels(h), 1, 1], 1.0)


@block(IMAGE)
def norm_of_groups(g: Builder, h: Any) -> Any:
    return nn.GroupNorm(2, 4)(_conv(g, h, 4))


@block(IMAGE)
def norm_of_instances(g: Builder, h: Any) -> Any:
    return nn.InstanceNorm2D(_channels(h), epsilon=g.pick(1e-5, 1e-3))(h)


@block(IMAGE, "sync")
def batch_norm_of_channels(g: Builder, h: Any) -> Any:
    return F.relu(nn.BatchNorm2D(4)(_conv(g, h, 4)))


@block(IMAGE)
def squeezed_and_excited(g: Builder, h: Any) -> Any:
    pooled = h.mean(axis=[2, 3])
    return h * F.sigmoid(g.linear(_channels(h), _channels(h))(pooled)).unsqueeze([2, 3])


@block(IMAGE)
def pixels_shuffled(g: Builder, h: Any) -> Any:
    return F.pixel_shuffle(_conv(g, h, 8), 2)[:, :, ::2, ::2]


@block(IMAGE)
def enlarged(g: Builder, h: Any) -> Any:
    larger = F.interpolate(h, scale_factor=2, mode=g.pick("nearest", "bilinear"))
    return F.avg_pool2d(larger, 2) * g.parameter([1], 0.9)


@block(IMAGE)
def channels_joined(g: Builder, h: Any) -> Any:
    return paddle.concat([_conv(g, h, 2, 1), _conv(g, h, 2, 3), h], axis=1)


@block(IMAGE)
def patches(g: Builder, h: Any) -> Any:
    return h.flatten(2).transpose([0, 2, 1])[:, :6] * g.parameter([_channels(h)], 1.0)


@block(IMAGE)
def mean_of_pixels(g: Builder, h: Any) -> Any:
    return g.linear(4, 6)(_conv(g, h, 4).mean(axis=[2, 3]))


@block(IMAGE)
def pixels_in_a_row(g: Builder, h: Any) -> Any:
    h = F.adaptive_avg_pool2d(h, 2)
    return paddle.tanh(g.linear(4 * _channels(h), 6)(h.flatten(1)))


LEADS_TO = {"patches": SEQUENCE, "mean_of_pixels": VECTOR, "pixels_in_a_row": VECTOR}
