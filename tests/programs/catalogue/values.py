"""Shapes, sizes and dtypes of parameters, losses and state."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum

from tests.programs.catalogue.entry import program
from tests.programs.feeds import classes, floats
from tests.programs.script import Script


def _parameter(shape: list[int], name: str, value: float = 0.5, dtype: str = "float32"):
    start = nn.initializer.Constant(value)
    return paddle.static.create_parameter(shape, dtype, name=name, default_initializer=start)


@program("Parameters without dimensions and with one element.", simulated=True)
def scalars(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    hidden = nn.Linear(8, 1)(x) * _parameter([], "scale") + _parameter([1], "shift") + _parameter([1, 1], "more")
    loss = F.mse_loss(hidden, y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("A parameter of 100 MB next to tiny ones.", only=("multi_node", "unfused"), reason="it is slow")
def hundred_megabytes(script: Script) -> None:
    x, y = script.inputs(x=floats(5), y=floats(1))
    large = _parameter([26_214_400], "large", 0.1)
    loss = F.mse_loss(nn.Linear(5, 1)(x) * (large[:4].sum() + large[-4:].mean()), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss, steps=2)


@program("A hundred small parameters.")
def many_parameters(script: Script) -> None:
    x, y = script.inputs(x=floats(4), y=floats(4))
    hidden = x
    for number in range(50):
        hidden = hidden * _parameter([4], f"scale_{number}", 1.0) + _parameter([4], f"shift_{number}", 0.01)
    loss = F.mse_loss(F.tanh(hidden), y)
    script.minimize(SGD(0.01), loss)
    script.train(loss, steps=2)


@program("A network in float64.")
def float64(script: Script) -> None:
    x, y = script.inputs(x=floats(6, dtype="float64"), y=floats(1, dtype="float64"))
    weight, bias = _parameter([6, 1], "weight", 0.1, "float64"), _parameter([1], "bias", 0.0, "float64")
    loss = F.mse_loss(paddle.matmul(x, weight) + bias, y)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("Parameters in float32 and in float64 in one program.", simulated=True)
def two_dtypes(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=floats(4))
    hidden = F.tanh(nn.Linear(6, 4)(x)).cast("float64")
    weight = _parameter([4, 4], "wide", 0.3, "float64")
    loss = F.mse_loss(paddle.matmul(hidden, weight).cast("float32"), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program(
    "Parameters in bfloat16 beside float32 ones.",
    tolerance=2e-2,
    reason="bfloat16 has 8 bits of precision, and a sum over two ranks rounds once more",
)
def bfloat16(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=floats(4))
    weight = _parameter([4, 4], "short", 0.25, "bfloat16")
    hidden = paddle.matmul(F.tanh(nn.Linear(6, 4)(x)).cast("bfloat16"), weight).cast("float32")
    loss = F.mse_loss(hidden, y)
    script.minimize(SGD(0.125), loss)
    script.train(loss)


@program("A complex parameter.")
def complex_numbers(script: Script) -> None:
    x, y = script.inputs(x=floats(6), y=floats(6))
    weight = _parameter([2, 6], "parts", 0.3)
    turned = paddle.fft.ifft(paddle.fft.fft(x.cast("complex64")) * paddle.complex(weight[0], weight[1])).real()
    loss = F.mse_loss(turned, y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("The loss has the shape [1], as in old scripts.")
def loss_of_one_element(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    loss = F.cross_entropy(nn.Linear(8, 5)(x), y).reshape([1])
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("The loss is a sum over the batch, divided by the batch that was fed.", simulated=True)
def summed_loss(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    loss = F.cross_entropy(nn.Linear(8, 5)(x), y, reduction="sum") / paddle.shape(x)[0].cast("float32")
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("The loss is scaled by a fed number, the same on every rank, and by a constant.")
def scaled_loss(script: Script) -> None:
    x, y, weight = script.inputs(x=floats(8), y=classes(5), weight=floats(1))
    losses = F.cross_entropy(nn.Linear(8, 5)(x), y, reduction="none")
    loss = 3.0 * (losses * paddle.abs(weight)).mean()
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program(
    "The program assigns a moving average of the weights.",
    without={"merge": "it averages after each run, which is a micro-batch"},
)
def assigned_average(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    layer = nn.Linear(8, 1)
    average = paddle.pir.core.create_persistable_value(
        paddle.float32, [8, 1], "average_of_the_weight", initializer=nn.initializer.Constant(0.0)
    )
    loss = F.mse_loss(layer(x), y)
    script.minimize(SGD(0.1), loss)
    paddle.assign(0.9 * average + 0.1 * layer.weight, average)
    script.train(loss)


@program(
    "The program counts in a buffer: register_buffer and assign.",
    without={"merge": "it counts runs of the program, which are micro-batches"},
)
def counting_buffer(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    steps = paddle.pir.core.create_persistable_value(
        paddle.float32, [1], "steps_so_far", initializer=nn.initializer.Constant(0.0)
    )
    paddle.assign(steps + 1, steps)
    loss = F.mse_loss(nn.Linear(8, 1)(x), y) / (1 + steps.mean().detach())
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("A batch of one sample per rank and micro-batch.")
def smallest_batch(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    loss = F.mse_loss(nn.Linear(8, 1)(F.tanh(nn.Linear(8, 8)(x))), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss, samples=4)


@program("The loss includes a constant array, which gets no gradient.")
def constant_array(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(4))
    table = paddle.assign(np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4))
    loss = F.mse_loss(paddle.matmul(nn.Linear(8, 4)(x), table), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program(
    "The script itself uses paddle.amp.auto_cast around the forward pass.",
    tolerance=2e-2,
    reason="products are rounded to bfloat16, for a share of the batch as for the whole batch",
)
def own_auto_cast(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(4))
    x.stop_gradient = False
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        hidden = nn.Linear(8, 4)(x)
    loss = F.mse_loss(hidden.cast("float32"), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)
