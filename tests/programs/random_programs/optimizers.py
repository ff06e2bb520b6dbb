"""The optimizers, schedules, clips and decays that random programs draw from. Imports Paddle, not fleet_train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import nn, optimizer
from paddle.incubate import LookAhead
from paddle.incubate.optimizer import LarsMomentumOptimizer
from paddle.optimizer import lr
from paddle.regularizer import L1Decay, L2Decay

# Adam and its kin divide by the gradient's size: where it is rounding noise, an epsilon keeps the noise small.
_SMALL = {"epsilon": 1e-3}

Make = Callable[..., Any]
OPTIMIZERS: dict[str, Make] = {
    "sgd": optimizer.SGD,
    "momentum": lambda rate, **more: optimizer.Momentum(rate, 0.9, **more),
    "nesterov": lambda rate, **more: optimizer.Momentum(rate, 0.8, use_nesterov=True, **more),
    "momentum_rescaled": lambda rate, **more: optimizer.Momentum(rate, 0.9, rescale_grad=0.5, **more),
    "momentum_multi_tensor": lambda rate, **more: optimizer.Momentum(rate, 0.9, use_multi_tensor=True, **more),
    "adam": lambda rate, **more: optimizer.Adam(rate, **_SMALL, **more),
    "amsgrad": lambda rate, **more: optimizer.Adam(rate, **_SMALL, amsgrad=True, **more),
    "adam_lazy": lambda rate, **more: optimizer.Adam(rate, **_SMALL, lazy_mode=True, **more),
    "adam_multi_tensor": lambda rate, **more: optimizer.Adam(rate, **_SMALL, use_multi_tensor=True, **more),
    "adamw": lambda rate, **more: optimizer.AdamW(rate, **_SMALL, **{"weight_decay": 0.1, **more}),
    "adamw_in_part": lambda rate, **more: optimizer.AdamW(
        rate, **_SMALL, **{"weight_decay": 0.1, **more}, apply_decay_param_fun=lambda name: ".w_" in name
    ),
    "adamax": lambda rate, **more: optimizer.Adamax(rate, **_SMALL, **more),
    "adagrad": lambda rate, **more: optimizer.Adagrad(rate, initial_accumulator_value=0.1, **more),
    "adadelta": lambda rate, **more: optimizer.Adadelta(rate, **_SMALL, **more),
    "rmsprop": lambda rate, **more: optimizer.RMSProp(rate, **_SMALL, **more),
    "rmsprop_centered": lambda rate, **more: optimizer.RMSProp(rate, epsilon=1e-2, momentum=0.9, centered=True, **more),
    "lamb": lambda rate, grad_clip=None: optimizer.Lamb(rate, grad_clip=grad_clip, epsilon=1e-3),
    "nadam": lambda rate, **more: optimizer.NAdam(rate, **_SMALL, **more),
    "radam": lambda rate, **more: optimizer.RAdam(rate, **_SMALL, **more),
    "asgd": lambda rate, **more: optimizer.ASGD(rate, batch_num=3, **more),
    "rprop": lambda _, grad_clip=None: optimizer.Rprop(0.01, learning_rate_range=(1e-4, 0.5), grad_clip=grad_clip),
    "lars": lambda rate, grad_clip=None: LarsMomentumOptimizer(rate, 0.9, grad_clip=grad_clip, epsilon=1e-6),
    "look_ahead": lambda rate, **more: LookAhead(optimizer.SGD(rate, **more), alpha=0.5, k=2),
}
RATES = {"sgd": 0.1, "momentum": 0.1, "nesterov": 0.1, "momentum_rescaled": 0.1, "momentum_multi_tensor": 0.1}
RATES |= {"adagrad": 0.1, "adadelta": 0.5, "asgd": 0.1, "lars": 1.0, "look_ahead": 0.1}
"""0.01 for the others."""
WITHOUT_DECAY = ("lamb", "rprop", "lars")
WITHOUT_SCHEDULE = ("rprop",)
ADAMW = ("adamw", "adamw_in_part")
WITHOUT_BIAS = ("rprop", "lamb", "lars")
"""Their update can be as large for rounding noise as for a gradient: by the gradient's sign, or by the norm of a
parameter that began as zero. Programs get no parameter whose gradient may be zero."""
WRAPS = ("look_ahead",)
AT_ONCE = ("momentum_multi_tensor", "adam_multi_tensor")
"""Their parameters cannot have owners."""
LINEAR = ("sgd", "momentum", "nesterov")

CLIPS: dict[str, Make] = {
    "": lambda: None,
    "by_global_norm": lambda: nn.ClipGradByGlobalNorm(0.5),
    "by_norm": lambda: nn.ClipGradByNorm(0.2),
}
FLOAT32_CLIPS = ("by_norm",)
"""Paddle 3.3.1 has no kernel of it for float64."""
DECAYS: dict[str, Make] = {"": lambda: None, "l2": lambda: L2Decay(0.02), "l1": lambda: L1Decay(0.005), "float": float}

SCHEDULES: dict[str, Make] = {
    "": float,
    "noam": lambda rate: lr.NoamDecay(16, 3, 5 * rate),
    "piecewise": lambda rate: lr.PiecewiseDecay([1, 3], [rate, rate / 2, rate / 4]),
    "natural_exp": lambda rate: lr.NaturalExpDecay(rate, 0.3),
    "inverse_time": lambda rate: lr.InverseTimeDecay(rate, 0.5),
    "polynomial": lambda rate: lr.PolynomialDecay(rate, 5, 0.001, 2.0),
    "warmup": lambda rate: lr.LinearWarmup(lr.CosineAnnealingDecay(rate, 5), 2, 0.0, rate),
    "exponential": lambda rate: lr.ExponentialDecay(rate, 0.7),
    "multi_step": lambda rate: lr.MultiStepDecay(rate, [1, 2], 0.3),
    "step": lambda rate: lr.StepDecay(rate, 2, 0.5),
    "lambda": lambda rate: lr.LambdaDecay(rate, lambda epoch: 0.8**epoch),
    "cosine": lambda rate: lr.CosineAnnealingDecay(rate, 4),
    "multiplicative": lambda rate: lr.MultiplicativeDecay(rate, lambda _: 0.9),
    "one_cycle": lambda rate: lr.OneCycleLR(2 * rate, 6),
    "cyclic": lambda rate: lr.CyclicLR(rate / 5, rate, 2),
    "linear": lambda rate: lr.LinearLR(rate, 4),
    "restarts": lambda rate: lr.CosineAnnealingWarmRestarts(rate, 2),
}


def make(name: str, schedule: str, clip: str, decay: str) -> tuple[Any, Any]:
    """The optimizer, and its schedule or None."""
    rate = SCHEDULES[schedule](RATES.get(name, 0.01))
    more: dict[str, Any] = {"grad_clip": CLIPS[clip]()}
    if decay and name not in WITHOUT_DECAY:
        more["weight_decay"] = 0.02 if decay == "float" or name in ADAMW else DECAYS[decay]()
    return OPTIMIZERS[name](rate, **more), rate if schedule else None
