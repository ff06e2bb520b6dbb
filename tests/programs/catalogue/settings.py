"""Settings of single parameters, and an optimizer's parameter lists."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum
from paddle.regularizer import L1Decay, L2Decay

from tests.programs.catalogue.entry import DGC_AND_DECAY, program
from tests.programs.feeds import classes, floats
from tests.programs.script import Script


@program("ParamAttr(learning_rate=) of two layers.")
def rates_of_parameters(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    slow, fast = paddle.ParamAttr(learning_rate=0.1), paddle.ParamAttr(learning_rate=3.0)
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=slow, bias_attr=slow)(x))
    loss = F.cross_entropy(nn.Linear(8, 5, weight_attr=fast)(hidden), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("ParamAttr(learning_rate=) with Adam and a schedule.")
def rates_and_schedule(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=paddle.ParamAttr(learning_rate=0.2))(x))
    loss = F.cross_entropy(nn.Linear(8, 5)(hidden), y)
    schedule = paddle.optimizer.lr.ExponentialDecay(0.02, 0.8)
    script.minimize(Adam(schedule, epsilon=1e-3), loss)
    script.train(loss, scheduler=schedule)


@program("ParamAttr(regularizer=) of single parameters in addition to the optimizer's decay.")
def decay_of_parameters(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    first = nn.Linear(8, 8, weight_attr=paddle.ParamAttr(regularizer=L2Decay(0.1)))
    second = nn.Linear(8, 5, weight_attr=paddle.ParamAttr(regularizer=L1Decay(0.05)), bias_attr=False)
    loss = F.cross_entropy(second(F.tanh(first(x))), y)
    script.minimize(SGD(0.1, weight_decay=0.01), loss)
    script.train(loss)


@program("ParamAttr(need_clip=False) excludes a parameter from the global norm.")
def need_clip(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=paddle.ParamAttr(need_clip=False))(x))
    loss = F.cross_entropy(nn.Linear(8, 5)(hidden), y)
    script.minimize(SGD(0.1, grad_clip=nn.ClipGradByGlobalNorm(0.05)), loss)
    script.train(loss)


@program("A layer with ParamAttr(trainable=False).", without=DGC_AND_DECAY)
def not_trainable(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    fixed = paddle.ParamAttr(trainable=False)
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=fixed, bias_attr=fixed)(x))
    loss = F.cross_entropy(nn.Linear(8, 5)(hidden), y)
    script.minimize(Momentum(0.1, 0.9, weight_decay=0.01), loss)
    script.train(loss)


@program("The first layers are frozen by stop_gradient on their output.", simulated=True)
def stopped_gradient(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.tanh(nn.Linear(8, 8)(x)).detach()
    loss = F.cross_entropy(nn.Linear(8, 5)(hidden), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("Layers that the loss does not depend on keep their initial values.")
def unused_parameters(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    nn.Linear(8, 3)(x)
    nn.Linear(4, 3)
    loss = F.cross_entropy(nn.Linear(8, 5)(x), y)
    script.minimize(Adam(0.01, epsilon=1e-3, weight_decay=0.1), loss)
    script.train(loss)


@program("Only the head is trained, by minimize(parameters=) and Optimizer(parameters=).")
def list_of_parameters(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    body, head = nn.Linear(8, 8), nn.Linear(8, 5)
    loss = F.cross_entropy(head(F.tanh(body(x))), y)
    script.minimize(Momentum(0.1, 0.9, parameters=head.parameters()), loss, parameters=head.parameters())
    script.train(loss)


@program("minimize(no_grad_set=) leaves one weight unchanged.")
def no_grad_set(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    body, head = nn.Linear(8, 8), nn.Linear(8, 5)
    loss = F.cross_entropy(head(F.tanh(body(x))), y)
    script.minimize(SGD(0.1), loss, no_grad_set={body.weight})
    script.train(loss)


@program("Names with blanks, slashes, at signs and Chinese characters.")
def odd_names(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    names = ["模型/第一层 w", "a@GRAD", "rank 0/b", "w.w_0@x"]
    attrs = [paddle.ParamAttr(name=name) for name in names]
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=attrs[0], bias_attr=attrs[1])(x))
    loss = F.cross_entropy(nn.Linear(8, 5, weight_attr=attrs[2], bias_attr=attrs[3])(hidden), y)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("Initializers of every kind: constant, Xavier, Kaiming, normal, an array.")
def start_values(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    kinds = [
        nn.initializer.Constant(0.1),
        nn.initializer.XavierNormal(),
        nn.initializer.KaimingUniform(),
        nn.initializer.TruncatedNormal(std=0.2),
        nn.initializer.Orthogonal(),
        nn.initializer.Assign([[0.1 * row - 0.05 * column for column in range(8)] for row in range(8)]),
    ]
    hidden = x
    for kind in kinds:
        hidden = F.tanh(nn.Linear(8, 8, weight_attr=paddle.ParamAttr(initializer=kind))(hidden))
    loss = F.cross_entropy(nn.Linear(8, 5)(hidden), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)
