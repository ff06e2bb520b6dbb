"""Loss scaling for float16: a larger loss preserves small gradients, and an update with an overflow is skipped.

The gradients are checked after averaging over the ranks: an overflow on one rank is then an overflow on every rank, so
all ranks skip the same updates and keep the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.convert.passes.conditional import run_if
from fleet_train.errors import ConversionError

Pairs = list[tuple[Any, Any]]


@dataclass(frozen=True)
class LossScaling:
    """Fleet's names and defaults. With ``use_dynamic_loss_scaling`` false the scale stays ``init_loss_scaling``.

    The scale is multiplied by ``incr_ratio`` after ``incr_every_n_steps`` updates without overflow in a row, by
    ``decr_ratio`` after ``decr_every_n_nan_or_inf`` overflows in a row (never below 1).
    """

    init_loss_scaling: float = 32768.0
    use_dynamic_loss_scaling: bool = True
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8

    def __post_init__(self) -> None:
        rules = {
            "init_loss_scaling": (self.init_loss_scaling >= 1, "1 or more"),
            "incr_every_n_steps": (self.incr_every_n_steps >= 1, "1 or more"),
            "decr_every_n_nan_or_inf": (self.decr_every_n_nan_or_inf >= 1, "1 or more"),
            "incr_ratio": (self.incr_ratio > 1, "more than 1"),
            "decr_ratio": (0 < self.decr_ratio < 1, "between 0 and 1"),
        }
        for field in fields(self):
            holds, rule = rules.get(field.name, (True, ""))
            if not holds:
                raise ConversionError(f"{field.name}={getattr(self, field.name)}: must be {rule}")


class LossScaler:
    """The scale of one program and its counters: persistable, so that a checkpoint holds them."""

    def __init__(self, settings: LossScaling) -> None:
        """Append the scale to the current program. Make it before the backward pass."""
        self._settings = settings
        self.scale = _persistable("loss_scaling", paddle.float32, settings.init_loss_scaling)
        self._good_steps = _persistable("loss_scaling_good_steps", paddle.int32, 0)
        self._bad_steps = _persistable("loss_scaling_bad_steps", paddle.int32, 0)

    def scaled(self, loss: Any) -> Any:
        """The value to derive gradients from; ``loss`` itself is still fetched."""
        return loss * self.scale.reshape([1] * len(loss.shape))

    def apply(self, pairs: Sequence[tuple[Any, Any]], update: Callable[[Pairs], Any]) -> Any:
        """Append the part after the exchange of gradients; returns the result of ``update``.

        ``update(unscaled pairs)`` creates the optimizer's operators, which run unless a gradient is infinite or NaN.
        The optimizer's ``found_inf`` is not used: Paddle's Momentum updates its velocity anyway.
        """
        present = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        values, found = _C_ops.check_finite_and_unscale_([gradient for _, gradient in present], self.scale)
        settings = self._settings
        if settings.use_dynamic_loss_scaling:
            _C_ops.update_loss_scaling_(
                values,
                found,
                self.scale,
                self._good_steps,
                self._bad_steps,
                settings.incr_every_n_steps,
                settings.decr_every_n_nan_or_inf,
                settings.incr_ratio,
                settings.decr_ratio,
                False,
            )
        unscaled = [(parameter, value) for (parameter, _), value in zip(present, values, strict=True)]
        return run_if(paddle.logical_not(found), lambda: update(unscaled))


def _persistable(name: str, dtype: Any, value: float) -> Any:
    start = paddle.nn.initializer.Constant(float(value))
    unique = paddle.utils.unique_name.generate(name)
    return paddle.pir.core.create_persistable_value(dtype, [1], unique, initializer=start)
