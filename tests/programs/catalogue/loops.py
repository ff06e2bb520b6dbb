"""How scripts feed, fetch, evaluate, save and resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum

from tests.programs.catalogue import classes, floats, program
from tests.programs.script import Script


def _classifier(script: Script, *hidden: int) -> Any:
    """The loss of a network with tanh layers of these widths, new in the current program."""
    x, y = script.inputs(x=floats(8), y=classes(5))
    for width in hidden:
        x = F.tanh(nn.Linear(8, width)(x))
    return F.cross_entropy(nn.Linear(8, 5)(x), y)


def _minimized(script: Script, optimizer: Any, *hidden: int) -> Any:
    loss = _classifier(script, *hidden)
    script.minimize(optimizer, loss)
    return loss


@program("The batch size differs in each step.")
def changing_batches(script: Script) -> None:
    loss = _minimized(script, Momentum(0.1, 0.9), 8)
    script.start()
    for step, samples in enumerate((8, 4, 16, 12, 4)):
        script.run(script.batch(step, samples=samples), [loss])


@program("The fetch list changes from step to step: nothing, the loss, logits, parameters.")
def changing_fetches(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    layer = nn.Linear(8, 5)
    logits = layer(x)
    loss = F.cross_entropy(logits, y)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.start()
    for step, fetch in enumerate(([], [loss], [loss, logits], [layer.weight], [loss, layer.bias], [])):
        script.run(script.batch(step), fetch)


@program("A gradient is fetched with the loss: the script gets this rank's own gradient.")
def fetched_gradients(script: Script) -> None:
    loss = _classifier(script)
    _, pairs = script.wrap(SGD(0.1)).minimize(loss)
    script.start()
    for batch in script.batches():
        script.run(batch, [loss, *(gradient for _, gradient in pairs)])


def _evaluated(script: Script, loss: Any, judging: Any, judged: Any) -> None:
    script.start()
    for step, batch in enumerate(script.batches()):
        script.run(batch, [loss])
        script.evaluate(script.batch(50 + step, judging), [judged], judging)


@program("Evaluation between steps by a second program with the same parameters.")
def evaluation(script: Script) -> None:
    with paddle.utils.unique_name.guard():
        loss = _minimized(script, Adam(0.01, epsilon=1e-3), 8)
    judging = paddle.static.Program()
    with paddle.static.program_guard(judging, paddle.static.Program()), paddle.utils.unique_name.guard():
        judged = _classifier(script, 8)
    _evaluated(script, loss, judging, judged)


@program("State is saved in the middle, changed by more steps and loaded with its schedule; training continues.")
def save_and_load(script: Script) -> None:
    schedule = paddle.optimizer.lr.NoamDecay(8, 3)
    loss = _minimized(script, Adam(schedule, epsilon=1e-3), 8)
    script.start()
    for steps, then in (((0, 1), script.save), ((7, 8), script.load), ((2, 3), None)):
        for step in steps:
            script.run(script.batch(step), [loss])
            schedule.step()
        if then:
            then(schedule)


@program("The schedule is stepped with the loss: ReduceOnPlateau on the mean over ranks.")
def reduce_on_plateau(script: Script) -> None:
    schedule = paddle.optimizer.lr.ReduceOnPlateau(0.1, factor=0.5, patience=0)
    loss = _minimized(script, SGD(schedule))
    script.start()
    for batch in script.batches(6):
        (found,) = script.run(batch, [loss])
        schedule.step(script.mean_over_ranks(float(found)))


@program("The default programs and the script's own programs are trained in turn with different batches.")
def own_and_default_program(script: Script) -> None:
    own, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(own, startup):
        first = _classifier(script)
        script.minimize(SGD(0.1), first, startup_program=startup)
    (z,) = script.inputs(z=floats(3))
    second = (nn.Linear(3, 1)(z) ** 2).mean()
    script.minimize(Adam(0.01, epsilon=1e-3), second)
    script.start(startup)
    script.start()
    for step in range(4):
        script.run(script.batch(step, own), [first], own)
        if step % 2:
            script.run(script.batch(step), [second])


@program(
    "Gradients are accumulated manually: two backward passes over halves of the batch, one apply_gradients().",
    without={"amp, merge": "oneDNN's gradient of a sum raises in bfloat16 for the one sample of a micro-batch's half"},
    said="samples are taken by their places",
)
def accumulated_by_hand(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(1))
    layer = nn.Linear(8, 1)
    losses = [F.mse_loss(layer(part), goal) for part, goal in zip(paddle.split(x, 2), paddle.split(y, 2), strict=True)]
    wrapped = script.wrap(SGD(0.1))
    pairs = [wrapped.backward(loss) for loss in losses]
    wrapped.apply_gradients([(one[0], (one[1] + two[1]) / 2) for one, two in zip(*pairs, strict=True)])
    script.train((losses[0] + losses[1]) / 2)


@program("The learning rate's variable is a float that is set in the scope between steps.")
def rate_in_the_scope(script: Script) -> None:
    loss = _minimized(script, SGD(0.1))
    script.start()
    for step, batch in enumerate(script.batches()):
        rate = paddle.static.global_scope().find_var("learning_rate_0").get_tensor()
        rate.set(np.array(0.1 / (1 + step), "float32").reshape(rate.shape()), script.place)
        script.run(batch, [loss])


@program("The optimizer's state and the network have separate startup programs.")
def two_startup_programs(script: Script) -> None:
    own, loss = paddle.static.Program(), _classifier(script, 8)
    script.minimize(Momentum(0.1, 0.9), loss, startup_program=own)
    script.start()
    script.start(own)
    for batch in script.batches():
        script.run(batch, [loss])


@program("The startup program runs twice: training starts again.")
def started_twice(script: Script) -> None:
    loss = _minimized(script, Adam(0.01, epsilon=1e-3))
    script.train(loss, steps=2)
    script.train(loss)


@program("The network is initialized before minimize; what minimize adds is then initialized alone.")
def minimize_after_start(script: Script) -> None:
    later, loss = paddle.static.Program(), _classifier(script)
    script.start()
    with paddle.static.program_guard(paddle.static.default_main_program(), later):
        script.minimize(Adam(0.01, epsilon=1e-3), loss, startup_program=later)
    script.start(later)
    for batch in script.batches():
        script.run(batch, [loss])
