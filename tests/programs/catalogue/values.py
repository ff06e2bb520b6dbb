"""Shapes, sizes and dtypes of parameters, losses and state; schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum, lr

from tests.programs.catalogue import classes, floats, network, program
from tests.programs.script import Script


def _parameter(shape: list[int], name: str, value: float = 0.5, dtype: str = "float32"):
    start = nn.initializer.Constant(value)
    return paddle.static.create_parameter(shape, dtype, name=name, default_initializer=start)


@network("Parameters without dimensions and with one element.", simulated=True, x=floats(8), y=floats(1))
def scalars(x, y):
    hidden = nn.Linear(8, 1)(x) * _parameter([], "scale") + _parameter([1], "shift") + _parameter([1, 1], "more")
    return F.mse_loss(hidden, y), Momentum(0.1, 0.9)


@network("A network in float64.", x=floats(6, dtype="float64"), y=floats(1, dtype="float64"))
def float64(x, y):
    weight, bias = _parameter([6, 1], "weight", 0.1, "float64"), _parameter([1], "bias", 0.0, "float64")
    return F.mse_loss(paddle.matmul(x, weight) + bias, y), Adam(0.01, epsilon=1e-3)


@network("Parameters in float32 and in float64 in one program.", simulated=True, x=floats(6), y=floats(4))
def two_dtypes(x, y):
    hidden = F.tanh(nn.Linear(6, 4)(x)).cast("float64")
    weight = _parameter([4, 4], "wide", 0.3, "float64")
    return F.mse_loss(paddle.matmul(hidden, weight).cast("float32"), y), SGD(0.1)


@network(
    "Parameters in bfloat16 beside float32 ones.",
    tolerance=2e-2,
    reason="bfloat16 has 8 bits of precision, and a sum over two ranks rounds once more",
    x=floats(6),
    y=floats(4),
)
def bfloat16(x, y):
    weight = _parameter([4, 4], "short", 0.25, "bfloat16")
    hidden = paddle.matmul(F.tanh(nn.Linear(6, 4)(x)).cast("bfloat16"), weight).cast("float32")
    return F.mse_loss(hidden, y), SGD(0.125)


@network("A complex parameter.", x=floats(6), y=floats(6))
def complex_numbers(x, y):
    weight = _parameter([2, 6], "parts", 0.3)
    turned = paddle.fft.ifft(paddle.fft.fft(x.cast("complex64")) * paddle.complex(weight[0], weight[1])).real()
    return F.mse_loss(turned, y), SGD(0.1)


@network("The loss is a sum over the batch, divided by the batch that was fed.", simulated=True)
def summed_loss(x, y):
    loss = F.cross_entropy(nn.Linear(8, 5)(x), y, reduction="sum") / paddle.shape(x)[0].cast("float32")
    return loss, Adam(0.01, epsilon=1e-3)


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


@network(
    "The loss is scaled by a fed number, the same on every rank, and by a constant.",
    x=floats(8),
    y=classes(5),
    weight=floats(1),
)
def scaled_loss(x, y, weight):
    losses = F.cross_entropy(nn.Linear(8, 5)(x), y, reduction="none")
    return 3.0 * (losses * paddle.abs(weight)).mean(), SGD(0.1)


@program("A batch of one sample per rank and micro-batch.")
def smallest_batch(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    loss = F.mse_loss(nn.Linear(8, 1)(F.tanh(nn.Linear(8, 8)(x))), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss, samples=4)


@network(
    "The script itself uses paddle.amp.auto_cast around the forward pass.",
    tolerance=2e-2,
    reason="products are rounded to bfloat16, for a share of the batch as for the whole batch",
    x=floats(8),
    y=floats(4),
)
def own_auto_cast(x, y):
    x.stop_gradient = False
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        hidden = nn.Linear(8, 4)(x)
    return F.mse_loss(hidden.cast("float32"), y), SGD(0.1)


for _name, _make in {
    "NoamDecay": lambda: lr.NoamDecay(8, 3, 0.5),
    "LinearWarmup": lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 5), 3, 0.0, 0.1),
    "CyclicLR": lambda: lr.CyclicLR(0.01, 0.1, 2),
}.items():

    @network(
        f"The rate follows {_name}.",
        name=_name,
        only=("multi_node", "merge"),
        reason="a schedule runs on the host and only affects the update, of which there are these two kinds",
        steps=5,
        x=floats(8),
        y=floats(1),
    )
    def _(x: Any, y: Any, make: Callable[[], Any] = _make) -> Any:
        return F.mse_loss(nn.Linear(8, 1)(x), y), Momentum(make(), 0.9)
