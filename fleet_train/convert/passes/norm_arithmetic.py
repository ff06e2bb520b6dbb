"""The local arithmetic of a synchronised batch norm: local sums, and normalisation with the global ones.

On CPUs it uses Paddle's batch norm kernels, which read the values once, while composed operators allocate and broadcast
at each step: there a broadcast costs five times a pass of the kernel. On GPUs, whose kernels differ (an unbiased
running variance, a reserved space that a backward pass must be given), it is composed of single operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import paddle

from fleet_train.collectives.sync_batch_norm import Local, Statistics


@dataclass(frozen=True)
class Norm:
    """A batch norm of the program: ``x`` [...], ``scale`` and ``bias`` [channels], and its attributes."""

    x: Any
    scale: Any
    bias: Any
    epsilon: float
    data_format: str

    @property
    def channels(self) -> int:
        return int(self.scale.shape[0])

    @property
    def axes(self) -> list[int]:
        """The axes that are summed over."""
        return [axis for axis in range(len(self.x.shape)) if axis != self._channel]

    def spread(self, values: Any) -> Any:
        """``values`` [channels], reshaped to broadcast against ``x``."""
        shape = [1] * len(self.x.shape)
        shape[self._channel] = self.channels
        return values.reshape(shape)

    @property
    def _channel(self) -> int:
        return 1 if self.data_format.startswith("NC") else len(self.x.shape) - 1


class Arithmetic(Protocol):
    """Emits operators at the current insertion point. Statistics are float32, or float64 where ``x`` is."""

    def local(self, norm: Norm) -> Local:
        """The statistics of this rank's ``x``."""
        ...

    def normalised(self, norm: Norm, found: Statistics) -> Any:
        """``x`` with the mean and variance ``found``, scaled and shifted; its shape and dtype."""
        ...

    def gradients(self, norm: Norm, found: Statistics, incoming: Any) -> tuple[Any, Any, Any]:
        """The sums of ``incoming`` and of its products with the normalised ``x`` ([channels] each: this rank's own
        gradients of bias and scale); and the values that ``x_gradient`` needs."""
        ...

    def x_gradient(self, norm: Norm, found: Statistics, begun: Any, means: tuple[Any, Any]) -> Any:
        """The gradient of ``x``. ``means``: the two sums of all ranks, over the count of all values."""
        ...


class Composed:
    """Composed of single operators, in float32."""

    def local(self, norm: Norm) -> Local:
        values = norm.x.cast("float32")
        mean = values.mean(norm.axes)
        variance = (values - norm.spread(mean)).square().mean(norm.axes)
        return Local(norm.x, mean, variance)

    def normalised(self, norm: Norm, found: Statistics) -> Any:
        centred = norm.x.cast("float32") - norm.spread(found.mean)
        factor = paddle.rsqrt(found.variance + norm.epsilon) * norm.scale
        return (centred * norm.spread(factor) + norm.spread(norm.bias)).cast(norm.x.dtype)

    def gradients(self, norm: Norm, found: Statistics, incoming: Any) -> tuple[Any, Any, Any]:
        factor = norm.spread(paddle.rsqrt(found.variance + norm.epsilon))
        normalised = (norm.x.cast("float32") - norm.spread(found.mean)) * factor
        incoming = incoming.cast("float32")
        begun = (incoming, normalised, factor)
        return incoming.sum(norm.axes), (incoming * normalised).sum(norm.axes), begun

    def x_gradient(self, norm: Norm, found: Statistics, begun: Any, means: tuple[Any, Any]) -> Any:
        del found
        incoming, normalised, factor = begun
        mean_gradient, mean_product = (norm.spread(mean) for mean in means)
        gradient = (incoming - mean_gradient - normalised * mean_product) * factor * norm.spread(norm.scale)
        return gradient.cast(norm.x.dtype)


class Kernels:
    """With Paddle's CPU kernels, in the dtype of ``x`` (float32 or float64, the only ones they have)."""

    def local(self, norm: Norm) -> Local:
        """The running statistics of a batch norm with a momentum of 0.

        It overwrites its running statistics inputs (as views, even ``pd_op.batch_norm`` without an underscore), so
        these are created only for it.
        """
        dtype, channels = norm.x.dtype, [norm.channels]
        old = paddle.zeros(channels, dtype), paddle.zeros(channels, dtype)
        # trainable_statistics: even in a clone for testing, these are the statistics of the batch.
        made = paddle._C_ops.batch_norm(
            norm.x, *old, norm.scale, norm.bias, False, 0.0, norm.epsilon, norm.data_format, False, True
        )
        # For a single value the kernel computes nothing and leaves zeros, which is correct for the variance.
        mean = norm.x.mean(norm.axes) if _may_be_one(norm) else made[1]
        return Local(norm.x, mean, made[2])

    def normalised(self, norm: Norm, found: Statistics) -> Any:
        return _normalised(norm, found, norm.scale, norm.bias)

    def gradients(self, norm: Norm, found: Statistics, incoming: Any) -> tuple[Any, Any, Any]:
        """The gradient with given statistics: its sums are the ones needed, and its gradient of ``x`` is
        ``incoming`` * scale / deviation."""
        mean, variance = found.mean, found.variance
        x_gradient, scale_gradient, bias_gradient = paddle._C_ops.batch_norm_grad(
            norm.x, norm.scale, norm.bias, mean, variance, mean, variance, None, incoming,
            0.0, norm.epsilon, norm.data_format, False, True, False,
        )  # fmt: skip
        return bias_gradient, scale_gradient, x_gradient

    def x_gradient(self, norm: Norm, found: Statistics, begun: Any, means: tuple[Any, Any]) -> Any:
        """Minus (mean gradient + normalised * mean product) * scale / deviation, which is also a batch norm."""
        factor = paddle.rsqrt(found.variance + norm.epsilon) * norm.scale
        mean_gradient, mean_product = means
        return begun - _normalised(norm, found, factor * mean_product, factor * mean_gradient)


def _normalised(norm: Norm, found: Statistics, scale: Any, bias: Any) -> Any:
    return paddle._C_ops.batch_norm(
        norm.x, found.mean, found.variance, scale, bias, False, 0.0, norm.epsilon, norm.data_format, True, False
    )[0]


def _may_be_one(norm: Norm) -> bool:
    """Whether a batch may hold a single value per channel."""
    return all(norm.x.shape[axis] in (-1, 1) for axis in norm.axes)
