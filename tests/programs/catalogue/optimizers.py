"""Every optimizer of paddle.optimizer, with every clip and regulariser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn, optimizer
from paddle.nn import functional as F
from paddle.regularizer import L1Decay, L2Decay

from tests.programs.catalogue.entry import DGC_AND_DECAY, program
from tests.programs.feeds import classes, floats
from tests.programs.script import Script

# Adam and its kin divide by the gradient's size: where it is rounding noise, an epsilon keeps the noise small.
_EPSILON = 1e-3

OPTIMIZERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "sgd": ("SGD.", lambda: optimizer.SGD(0.1)),
    "momentum": ("Momentum.", lambda: optimizer.Momentum(0.1, 0.9)),
    "momentum_nesterov": (
        "Nesterov's momentum, with a float as weight decay.",
        lambda: optimizer.Momentum(0.1, 0.9, use_nesterov=True, weight_decay=1e-2),
    ),
    "momentum_multi_tensor": (
        "Momentum that updates all parameters with one operator.",
        lambda: optimizer.Momentum(0.1, 0.9, use_multi_tensor=True),
    ),
    "momentum_rescaled": (
        "Momentum that scales the gradients itself.",
        lambda: optimizer.Momentum(0.1, 0.9, rescale_grad=0.5),
    ),
    "adam": ("Adam.", lambda: optimizer.Adam(0.01, epsilon=_EPSILON)),
    "adam_default_epsilon": (
        "Adam as it is usually called: with a learning rate and nothing else.",
        lambda: optimizer.Adam(0.01),
    ),
    "adam_amsgrad": ("Adam with amsgrad.", lambda: optimizer.Adam(0.01, epsilon=_EPSILON, amsgrad=True)),
    "adam_multi_tensor": (
        "Adam that updates all parameters with one operator.",
        lambda: optimizer.Adam(0.01, epsilon=_EPSILON, use_multi_tensor=True),
    ),
    "adam_lazy": ("Adam in lazy mode.", lambda: optimizer.Adam(0.01, epsilon=_EPSILON, lazy_mode=True)),
    "adamw": (
        "AdamW that decays weights but not biases.",
        lambda: optimizer.AdamW(
            0.01, epsilon=_EPSILON, weight_decay=0.1, apply_decay_param_fun=lambda name: ".w_" in name
        ),
    ),
    "adamax": ("Adamax.", lambda: optimizer.Adamax(0.01, epsilon=_EPSILON)),
    "adagrad": (
        "Adagrad with an initial accumulator value.",
        lambda: optimizer.Adagrad(0.1, initial_accumulator_value=0.1),
    ),
    "adadelta": ("Adadelta.", lambda: optimizer.Adadelta(0.5, epsilon=_EPSILON)),
    "rmsprop": (
        "RMSProp, centred, with momentum.",
        lambda: optimizer.RMSProp(0.01, epsilon=_EPSILON, momentum=0.9, centered=True),
    ),
    "lamb": (
        "Lamb with biases excluded from decay.",
        lambda: optimizer.Lamb(
            0.01, lamb_weight_decay=0.01, exclude_from_weight_decay_fn=lambda parameter: "b_" in parameter.name
        ),
    ),
    "nadam": ("NAdam.", lambda: optimizer.NAdam(0.01, epsilon=_EPSILON)),
    "radam": ("RAdam.", lambda: optimizer.RAdam(0.01, epsilon=_EPSILON)),
    "asgd": ("ASGD over three batches.", lambda: optimizer.ASGD(0.1, batch_num=3)),
    "rprop": (
        "Rprop, which uses the gradients' signs.",
        lambda: optimizer.Rprop(0.01, learning_rate_range=(1e-4, 1.0)),
    ),
    "clip_by_norm": (
        "Momentum, each gradient clipped by its norm.",
        lambda: optimizer.Momentum(0.1, 0.9, grad_clip=nn.ClipGradByNorm(0.05)),
    ),
    "clip_by_global_norm": (
        "Adam, gradients clipped by their global norm.",
        lambda: optimizer.Adam(0.01, epsilon=_EPSILON, grad_clip=nn.ClipGradByGlobalNorm(0.1)),
    ),
    "l1_decay": ("SGD with L1 decay.", lambda: optimizer.SGD(0.1, weight_decay=L1Decay(0.01))),
    "l2_decay": (
        "Momentum with L2 decay and a clip: decay is added after clipping.",
        lambda: optimizer.Momentum(0.1, 0.9, weight_decay=L2Decay(0.05), grad_clip=nn.ClipGradByGlobalNorm(0.1)),
    ),
}
# Classes of paddle.optimizer that no program can use: the class, and why.
NOT_STATIC = {
    "Optimizer": "the base class",
    "LBFGS": "takes a closure and works in dynamic mode only",
}


def _train_with(make: Callable[[], Any], script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.tanh(nn.Linear(8, 12)(x))
    loss = F.cross_entropy(nn.Linear(12, 5)(hidden), y)
    script.minimize(make(), loss)
    script.train(loss, steps=5)


_REFUSED = {
    "adam": {"dgc, late": "works with SGD and Momentum, not with Adam"},
    "lamb": {"dgc, late": "works with SGD and Momentum, not with Lamb"},
    "clip_by_norm": {"dgc, late": "which a gradient clip would cut"},
}
_WITHOUT = {"momentum_nesterov": DGC_AND_DECAY}
_SIMULATED = ("sgd", "momentum_nesterov", "adam")
for _name, (_sentence, _make) in OPTIMIZERS.items():

    @program(
        _sentence, name=_name, simulated=_name in _SIMULATED, without=_WITHOUT.get(_name), refused=_REFUSED.get(_name)
    )
    def _(script: Script, make: Callable[[], Any] = _make) -> None:
        _train_with(make, script)


@program("backward() and apply_gradients() are called separately; gradients are halved in between.")
def backward_and_apply(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    loss = F.mse_loss(nn.Linear(8, 1)(F.tanh(nn.Linear(8, 8)(x))), y)
    wrapped = script.wrap(optimizer.Adam(0.01, epsilon=_EPSILON))
    pairs = wrapped.backward(loss)
    wrapped.apply_gradients([(parameter, gradient * 0.5) for parameter, gradient in pairs])
    script.train(loss)


@program("backward() and apply_gradients() for weights only: the pairs omit the biases.")
def filtered_gradients(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    loss = F.mse_loss(nn.Linear(8, 1)(F.tanh(nn.Linear(8, 8)(x))), y)
    wrapped = script.wrap(optimizer.SGD(0.1))
    pairs = wrapped.backward(loss)
    wrapped.apply_gradients([pair for pair in pairs if "b_" not in pair[0].name])
    script.train(loss)


@program("Gradients from paddle.static.gradients go to apply_gradients().")
def gradients_by_hand(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    layer = nn.Linear(8, 1)
    loss = F.mse_loss(layer(x), y)
    wrapped = script.wrap(optimizer.SGD(0.1))
    weights = layer.parameters()
    gradients = paddle.static.gradients([loss], weights)
    wrapped.apply_gradients(list(zip(weights, gradients, strict=True)))
    script.train(loss)


@program("Gradients that no backward pass computed: they come from fed data.")
def gradients_from_data(script: Script) -> None:
    (x,) = script.inputs(x=floats(8))
    weight = paddle.static.create_parameter([8], "float32", name="weight")
    loss = (weight * x).mean()
    script.wrap(optimizer.Momentum(0.1, 0.9)).apply_gradients([(weight, x.mean(axis=0) + 0.1 * weight)])
    script.train(loss)


@program("A custom optimizer, derived from Paddle's.")
def own_optimizer(script: Script) -> None:
    class Sign(optimizer.SGD):
        def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
            del block
            parameter, gradient = param_and_grad
            rate = self._create_param_lr(param_and_grad)
            paddle.assign(parameter - rate * paddle.tanh(10 * gradient), parameter)

    x, y = script.inputs(x=floats(8), y=floats(1))
    loss = F.mse_loss(nn.Linear(8, 1)(F.tanh(nn.Linear(8, 8)(x))), y)
    script.minimize(Sign(0.01, grad_clip=nn.ClipGradByNorm(10.0)), loss)
    script.train(loss)
