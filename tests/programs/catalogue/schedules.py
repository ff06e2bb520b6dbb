"""Every schedule of paddle.optimizer.lr, stepped by the script after each update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import Momentum, lr

from tests.programs.catalogue.entry import program
from tests.programs.feeds import floats
from tests.programs.script import Script

SCHEDULES: dict[str, Callable[[], Any]] = {
    "NoamDecay": lambda: lr.NoamDecay(8, 3, 0.5),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([2, 4], [0.1, 0.05, 0.01]),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.1, 0.3),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.1, 0.5),
    "PolynomialDecay": lambda: lr.PolynomialDecay(0.1, 4, 0.01, cycle=True),
    "LinearWarmup": lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 5), 3, 0.0, 0.1),
    "ExponentialDecay": lambda: lr.ExponentialDecay(0.1, 0.7),
    "MultiStepDecay": lambda: lr.MultiStepDecay(0.1, [2, 3]),
    "StepDecay": lambda: lr.StepDecay(0.1, 2),
    "LambdaDecay": lambda: lr.LambdaDecay(0.1, lambda step: 0.9**step),
    "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(0.1, 5),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.1, lambda step: 1 - 0.1 * step),
    "OneCycleLR": lambda: lr.OneCycleLR(0.1, 6),
    "CyclicLR": lambda: lr.CyclicLR(0.01, 0.1, 2),
    "LinearLR": lambda: lr.LinearLR(0.1, 4),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.1, 2),
}
NOT_HERE = {"LRScheduler": "the base class", "ReduceOnPlateau": "steps by the loss: the program reduce_on_plateau"}

for _name, _make in SCHEDULES.items():

    @program(
        f"The rate follows {_name}.",
        name=_name,
        only=("multi_node", "merge"),
        reason="a schedule runs on the host and only affects the update, of which there are these two kinds",
    )
    def _(script: Script, make: Callable[[], Any] = _make) -> None:
        x, y = script.inputs(x=floats(8), y=floats(1))
        loss = F.mse_loss(nn.Linear(8, 1)(x), y)
        schedule = make()
        script.minimize(Momentum(schedule, 0.9), loss)
        script.train(loss, steps=5, scheduler=schedule)
