"""Every optimizer of paddle.optimizer, with every clip and regulariser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn, optimizer
from paddle.nn import functional as F
from paddle.optimizer import Adam, Momentum
from paddle.regularizer import L1Decay, L2Decay

from tests.programs.catalogue import floats, network, program
from tests.programs.script import Script

# Adam and its kin divide by the gradient's size: where it is rounding noise, an epsilon keeps the noise small.
_SMALL = {"epsilon": 1e-3}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizer.SGD(0.1),
    "momentum": lambda: Momentum(0.1, 0.9),
    "momentum_nesterov": lambda: Momentum(0.1, 0.9, use_nesterov=True, weight_decay=1e-2),
    "momentum_multi_tensor": lambda: Momentum(0.1, 0.9, use_multi_tensor=True),
    "momentum_rescaled": lambda: Momentum(0.1, 0.9, rescale_grad=0.5),
    "adam": lambda: Adam(0.01, **_SMALL),
    "adam_default_epsilon": lambda: Adam(0.01),
    "adam_amsgrad": lambda: Adam(0.01, **_SMALL, amsgrad=True),
    "adam_multi_tensor": lambda: Adam(0.01, **_SMALL, use_multi_tensor=True),
    "adam_lazy": lambda: Adam(0.01, **_SMALL, lazy_mode=True),
    "adamw": lambda: optimizer.AdamW(
        0.01, **_SMALL, weight_decay=0.1, apply_decay_param_fun=lambda name: ".w_" in name
    ),
    "adamax": lambda: optimizer.Adamax(0.01, **_SMALL),
    "adagrad": lambda: optimizer.Adagrad(0.1, initial_accumulator_value=0.1),
    "adadelta": lambda: optimizer.Adadelta(0.5, **_SMALL),
    "rmsprop": lambda: optimizer.RMSProp(0.01, **_SMALL, momentum=0.9, centered=True),
    "lamb": lambda: optimizer.Lamb(
        0.01, lamb_weight_decay=0.01, exclude_from_weight_decay_fn=lambda parameter: "b_" in parameter.name
    ),
    "nadam": lambda: optimizer.NAdam(0.01, **_SMALL),
    "radam": lambda: optimizer.RAdam(0.01, **_SMALL),
    "asgd": lambda: optimizer.ASGD(0.1, batch_num=3),
    "rprop": lambda: optimizer.Rprop(0.01, learning_rate_range=(1e-4, 1.0)),
    "clip_by_norm": lambda: Momentum(0.1, 0.9, grad_clip=nn.ClipGradByNorm(0.05)),
    "clip_by_global_norm": lambda: Adam(0.01, **_SMALL, grad_clip=nn.ClipGradByGlobalNorm(0.1)),
    "l1_decay": lambda: optimizer.SGD(0.1, weight_decay=L1Decay(0.01)),
    # Decay is added after clipping.
    "l2_decay": lambda: Momentum(0.1, 0.9, weight_decay=L2Decay(0.05), grad_clip=nn.ClipGradByGlobalNorm(0.1)),
}

_SIMULATED = ("sgd", "momentum_nesterov", "adam")
for _name, _make in OPTIMIZERS.items():

    @network(
        f"A tanh layer and {_name}.",
        steps=5,
        name=_name,
        simulated=_name in _SIMULATED,
    )
    def _(x: Any, y: Any, make: Callable[[], Any] = _make) -> Any:
        return F.cross_entropy(nn.Linear(12, 5)(F.tanh(nn.Linear(8, 12)(x))), y), make()


def _regression(script: Script) -> Any:
    x, y = script.inputs(x=floats(8), y=floats(1))
    return F.mse_loss(nn.Linear(8, 1)(F.tanh(nn.Linear(8, 8)(x))), y)


@program("backward() and apply_gradients() are called separately; gradients are halved in between.")
def backward_and_apply(script: Script) -> None:
    loss, wrapped = _regression(script), script.wrap(Adam(0.01, **_SMALL))
    wrapped.apply_gradients([(parameter, gradient * 0.5) for parameter, gradient in wrapped.backward(loss)])
    script.train(loss)


@program("backward() and apply_gradients() for weights only: the pairs omit the biases.")
def filtered_gradients(script: Script) -> None:
    loss, wrapped = _regression(script), script.wrap(optimizer.SGD(0.1))
    wrapped.apply_gradients([pair for pair in wrapped.backward(loss) if "b_" not in pair[0].name])
    script.train(loss)


@program("Gradients from paddle.static.gradients go to apply_gradients().")
def gradients_by_hand(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    layer = nn.Linear(8, 1)
    loss, weights = F.mse_loss(layer(x), y), layer.parameters()
    wrapped = script.wrap(optimizer.SGD(0.1))
    wrapped.apply_gradients(list(zip(weights, paddle.static.gradients([loss], weights), strict=True)))
    script.train(loss)


@program("Gradients that no backward pass computed: they come from fed data.")
def gradients_from_data(script: Script) -> None:
    (x,) = script.inputs(x=floats(8))
    weight = paddle.static.create_parameter([8], "float32", name="weight")
    loss = (weight * x).mean()
    script.wrap(Momentum(0.1, 0.9)).apply_gradients([(weight, x.mean(axis=0) + 0.1 * weight)])
    script.train(loss)


@program("A custom optimizer, derived from Paddle's.")
def own_optimizer(script: Script) -> None:
    class Sign(optimizer.SGD):
        def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
            del block
            parameter, gradient = param_and_grad
            rate = self._create_param_lr(param_and_grad)
            paddle.assign(parameter - rate * paddle.tanh(10 * gradient), parameter)

    loss = _regression(script)
    script.minimize(Sign(0.01, grad_clip=nn.ClipGradByNorm(10.0)), loss)
    script.train(loss)
