"""Whether an optimizer updates each parameter separately, so that some can be updated while other gradients are
sent."""

from __future__ import annotations

from typing import Any

from paddle import nn, optimizer

# Exactly these classes, not subclasses, which may read all gradients at once.
_EACH_ALONE = (
    optimizer.SGD,
    optimizer.Momentum,
    optimizer.Adam,
    optimizer.AdamW,
    optimizer.Adamax,
    optimizer.Adagrad,
    optimizer.Adadelta,
    optimizer.RMSProp,
    optimizer.Lamb,
)
_CLIPS_EACH_ALONE = (type(None), nn.ClipGradByValue, nn.ClipGradByNorm)


def updates_each_alone(inner: Any) -> bool:
    """True if ``apply_gradients`` may be called several times, each for a part of the parameters, with equal bits.

    Not with a clip by the global norm, which needs all gradients first, nor with Paddle's multi-tensor updates.
    """
    return (
        type(inner) in _EACH_ALONE
        and type(inner._grad_clip) in _CLIPS_EACH_ALONE
        and not getattr(inner, "_use_multi_tensor", False)
    )
