"""Settings of single parameters, lists of parameters; control flow, second derivatives, custom gradients."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum
from paddle.regularizer import L1Decay, L2Decay

from tests.programs.catalogue import classes, floats, network, program
from tests.programs.script import Script


@network("ParamAttr(learning_rate=) of two layers.")
def rates_of_parameters(x, y):
    slow, fast = paddle.ParamAttr(learning_rate=0.1), paddle.ParamAttr(learning_rate=3.0)
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=slow, bias_attr=slow)(x))
    return F.cross_entropy(nn.Linear(8, 5, weight_attr=fast)(hidden), y), Momentum(0.1, 0.9)


@network("ParamAttr(regularizer=) of single parameters in addition to the optimizer's decay.")
def decay_of_parameters(x, y):
    first = nn.Linear(8, 8, weight_attr=paddle.ParamAttr(regularizer=L2Decay(0.1)))
    second = nn.Linear(8, 5, weight_attr=paddle.ParamAttr(regularizer=L1Decay(0.05)), bias_attr=False)
    return F.cross_entropy(second(F.tanh(first(x))), y), SGD(0.1, weight_decay=0.01)


@network("ParamAttr(need_clip=False) excludes a parameter from the global norm.")
def need_clip(x, y):
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=paddle.ParamAttr(need_clip=False))(x))
    return F.cross_entropy(nn.Linear(8, 5)(hidden), y), SGD(0.1, grad_clip=nn.ClipGradByGlobalNorm(0.05))


@network("A layer with ParamAttr(trainable=False).")
def not_trainable(x, y):
    fixed = paddle.ParamAttr(trainable=False)
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=fixed, bias_attr=fixed)(x))
    return F.cross_entropy(nn.Linear(8, 5)(hidden), y), Momentum(0.1, 0.9, weight_decay=0.01)


@network("The first layers are frozen by stop_gradient on their output.", simulated=True)
def stopped_gradient(x, y):
    hidden = F.tanh(nn.Linear(8, 8)(x)).detach()
    return F.cross_entropy(nn.Linear(8, 5)(hidden), y), SGD(0.1)


@network("Layers that the loss does not depend on keep their initial values.")
def unused_parameters(x, y):
    nn.Linear(8, 3)(x)
    nn.Linear(4, 3)
    return F.cross_entropy(nn.Linear(8, 5)(x), y), Adam(0.01, epsilon=1e-3, weight_decay=0.1)


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


@network("Names with blanks, slashes, at signs and Chinese characters.")
def odd_names(x, y):
    names = ["模型/第一层 w", "a@GRAD", "rank 0/b", "w.w_0@x"]
    attrs = [paddle.ParamAttr(name=name) for name in names]
    hidden = F.tanh(nn.Linear(8, 8, weight_attr=attrs[0], bias_attr=attrs[1])(x))
    loss = F.cross_entropy(nn.Linear(8, 5, weight_attr=attrs[2], bias_attr=attrs[3])(hidden), y)
    return loss, Adam(0.01, epsilon=1e-3)


@network("Initializers of every kind: constant, Xavier, Kaiming, normal, an array.")
def start_values(x, y):
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
    return F.cross_entropy(nn.Linear(8, 5)(hidden), y), Momentum(0.1, 0.9)


@network(
    "static.nn.cond chooses between two functions; the parameters are used outside of it.",
    simulated=True,
    x=floats(8),
    y=floats(4),
    switch=floats(),
)
def cond(x, y, switch):
    hidden = nn.Linear(8, 4)(x)
    chosen = paddle.static.nn.cond((switch * 0).sum() < 1, lambda: F.tanh(hidden), lambda: F.relu(hidden))
    return F.mse_loss(chosen, y), SGD(0.1)


@network(
    "static.nn.cond whose branches share a layer that is also used after it.",
    x=floats(4),
    y=floats(4),
)
def cond_sharing_a_layer(x, y):
    layer = nn.Linear(4, 4)
    chosen = paddle.static.nn.cond((x * 0).sum() < 1, lambda: F.tanh(layer(x)), lambda: layer(x))
    return F.mse_loss(layer(chosen), y), Momentum(0.1, 0.9)


@network("A while loop applies a layer three times.", x=floats(4), y=floats(4))
def while_loop(x, y):
    layer = nn.Linear(4, 4)

    def body(step, hidden):
        return step + 1, F.tanh(layer(hidden))

    start = paddle.full([1], 0, "int64")
    _, hidden = paddle.static.nn.while_loop(lambda step, _: step < 3, body, [start, layer(x)])
    return F.mse_loss(hidden, y), SGD(0.1)


@network("A while loop without parameters between two layers.", x=floats(4), y=floats(4))
def while_loop_between_layers(x, y):
    start = paddle.full([1], 0, "int64")
    _, hidden = paddle.static.nn.while_loop(
        lambda step, _: step < 3, lambda step, hidden: (step + 1, F.tanh(hidden)), [start, nn.Linear(4, 4)(x)]
    )
    return F.mse_loss(nn.Linear(4, 4)(hidden), y), Adam(0.01, epsilon=1e-3)


@network("static.nn.switch_case over three functions of one hidden layer.", x=floats(4), y=floats(4))
def switch_case(x, y):
    hidden = nn.Linear(4, 4)(x)
    which = paddle.full([1], 1, "int32")
    chosen = paddle.static.nn.switch_case(
        which, {0: lambda: F.relu(hidden), 1: lambda: F.tanh(hidden), 2: lambda: hidden * 2}
    )
    return F.mse_loss(chosen, y), SGD(0.1)


@network("A gradient penalty by paddle.static.gradients.", x=floats(6), y=floats(1))
def static_gradient_penalty(x, y):
    x.stop_gradient = False
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    made = network(x)
    (slope,) = paddle.static.gradients([made], [x])
    return F.mse_loss(made, y) + 0.1 * (slope**2).sum(axis=1).mean(), SGD(0.1)


@network("static_pylayer: a function with a custom backward.", x=floats(6), y=floats(4))
def static_pylayer(x, y):
    hidden = nn.Linear(6, 4)(x)
    rounded = paddle.static.nn.static_pylayer(
        lambda value: paddle.round(value * 4) / 4, [hidden], lambda gradient: gradient * 0.9
    )
    return F.mse_loss(nn.Linear(4, 4)(rounded), y), Momentum(0.05, 0.9)


@program("A custom host operator, registered by the script, in the forward pass.")
def own_host_operator(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=floats(4))
    double = paddle.static.register_op(
        lambda value: value * 2,
        name=paddle.utils.unique_name.generate("double_of_the_script") + f"_{id(script)}",
        infer_meta=lambda meta: paddle.static.MetaTensor(dtype=meta.dtype, shape=meta.shape),
        input_names=["value"],
        output_names=["out"],
    )
    loss = F.mse_loss(nn.Linear(6, 4)(double(x)), y)
    script.minimize(SGD(0.05), loss)
    script.train(loss)
