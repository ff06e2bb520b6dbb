"""Control flow, gradients of gradients, layers with custom gradients."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum

from tests.programs.catalogue.entry import program
from tests.programs.feeds import classes, floats
from tests.programs.script import Script


@program("static.nn.cond chooses between two functions; the parameters are used outside of it.", simulated=True)
def cond(script: Script) -> None:
    x, y, switch = script.inputs(x=floats(8), y=floats(4), switch=floats())
    hidden = nn.Linear(8, 4)(x)
    chosen = paddle.static.nn.cond((switch * 0).sum() < 1, lambda: F.tanh(hidden), lambda: F.relu(hidden))
    loss = F.mse_loss(chosen, y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("static.nn.cond with a layer in each branch; all ranks take the same branch.")
def cond_with_parameters(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(4))
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    chosen = paddle.static.nn.cond((x * 0).sum() < 1, lambda: first(x), lambda: second(x))
    loss = F.mse_loss(chosen, y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("static.nn.cond whose branches share a layer that is also used after it.")
def cond_sharing_a_layer(script: Script) -> None:
    x, y = script.inputs(x=floats(4), y=floats(4))
    layer = nn.Linear(4, 4)
    chosen = paddle.static.nn.cond((x * 0).sum() < 1, lambda: F.tanh(layer(x)), lambda: layer(x))
    loss = F.mse_loss(layer(chosen), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("A while loop applies a layer three times.")
def while_loop(script: Script) -> None:
    x, y = script.inputs(x=floats(4), y=floats(4))
    layer = nn.Linear(4, 4)

    def body(step, hidden):
        return step + 1, F.tanh(layer(hidden))

    start = paddle.full([1], 0, "int64")
    _, hidden = paddle.static.nn.while_loop(lambda step, _: step < 3, body, [start, layer(x)])
    loss = F.mse_loss(hidden, y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("A while loop without parameters between two layers.")
def while_loop_between_layers(script: Script) -> None:
    x, y = script.inputs(x=floats(4), y=floats(4))
    start = paddle.full([1], 0, "int64")
    _, hidden = paddle.static.nn.while_loop(
        lambda step, _: step < 3, lambda step, hidden: (step + 1, F.tanh(hidden)), [start, nn.Linear(4, 4)(x)]
    )
    loss = F.mse_loss(nn.Linear(4, 4)(hidden), y)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("static.nn.switch_case over three functions of one hidden layer.")
def switch_case(script: Script) -> None:
    x, y = script.inputs(x=floats(4), y=floats(4))
    hidden = nn.Linear(4, 4)(x)
    which = paddle.full([1], 1, "int32")
    chosen = paddle.static.nn.switch_case(
        which, {0: lambda: F.relu(hidden), 1: lambda: F.tanh(hidden), 2: lambda: hidden * 2}
    )
    loss = F.mse_loss(chosen, y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("static.nn.case with a layer in its branches.")
def case(script: Script) -> None:
    x, y = script.inputs(x=floats(4), y=floats(4))
    layers = [nn.Linear(4, 4) for _ in range(2)]
    zero = (x * 0).sum()
    chosen = paddle.static.nn.case([(zero > 1, lambda: layers[0](x))], default=lambda: layers[1](x))
    loss = F.mse_loss(chosen, y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("A gradient penalty by paddle.static.gradients.")
def static_gradient_penalty(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=floats(1))
    x.stop_gradient = False
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    made = network(x)
    (slope,) = paddle.static.gradients([made], [x])
    loss = F.mse_loss(made, y) + 0.1 * (slope**2).sum(axis=1).mean()
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("Adversarial examples: inside the program the input is moved along the sign of its gradient.")
def adversarial(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=classes(4))
    x.stop_gradient = False
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    (slope,) = paddle.static.gradients([F.cross_entropy(network(x), y)], [x])
    moved = (x + 0.1 * paddle.sign(slope)).detach()
    loss = F.cross_entropy(network(moved), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("static_pylayer: a function with a custom backward.")
def static_pylayer(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=floats(4))
    hidden = nn.Linear(6, 4)(x)
    rounded = paddle.static.nn.static_pylayer(
        lambda value: paddle.round(value * 4) / 4, [hidden], lambda gradient: gradient * 0.9
    )
    loss = F.mse_loss(nn.Linear(4, 4)(rounded), y)
    script.minimize(Momentum(0.05, 0.9), loss)
    script.train(loss)


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
