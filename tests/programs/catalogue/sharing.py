"""Programs that use a parameter, an optimizer or a name more than once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum

from tests.programs.catalogue import classes, floats, network, program, tokens
from tests.programs.script import Script


@network(
    "One layer is applied to two inputs: its gradient is the sum over both uses.",
    simulated=True,
    left=floats(12),
    right=floats(12),
    same=floats(1),
)
def siamese(left, right, same):
    tower = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
    distance = ((tower(left) - tower(right)) ** 2).mean(axis=1, keepdim=True)
    return F.mse_loss(distance, same), SGD(0.1)


@network("Two layers share a parameter by name: ParamAttr(name='shared.w') in both.", sums=True, simulated=True)
def shared_by_name(x, y):
    first = nn.Linear(8, 8, weight_attr=paddle.ParamAttr(name="shared.w"))
    second = nn.Linear(8, 8, weight_attr=paddle.ParamAttr(name="shared.w"))
    return F.cross_entropy(nn.Linear(8, 5)(F.tanh(second(F.tanh(first(x))))), y), Momentum(0.1, 0.9)


@network("Two layers share a parameter by name, and the optimizer is plain SGD.", x=floats(6), y=floats(6))
def shared_by_name_sgd(x, y):
    attr = paddle.ParamAttr(name="w")
    return nn.Linear(6, 1, weight_attr=attr)(x).mean() + 10 * nn.Linear(6, 1, weight_attr=attr)(y).mean(), SGD(0.1)


@network("The embedding and the output layer share a matrix.", simulated=True, words=tokens(20, 4), target=classes(20))
def tied_embedding(words, target):
    embedding = nn.Embedding(20, 8)
    hidden = F.tanh(nn.Linear(8, 8)(embedding(words).mean(axis=1)))
    logits = paddle.matmul(hidden, embedding.weight, transpose_y=True)
    return F.cross_entropy(logits, target), Momentum(0.1, 0.9)


@program("A GAN in one program: two losses, two optimizers, both updates in each step.", several_optimizers=True)
def gan_in_one_program(script: Script) -> None:
    real, noise = script.inputs(real=floats(6), noise=floats(3))
    generator = nn.Linear(3, 6)
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    fake = generator(noise)
    judged = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
    made = F.softplus(-discriminator(fake)).mean()
    script.minimize(SGD(0.1, parameters=discriminator.parameters()), judged)
    script.minimize(SGD(0.2, parameters=generator.parameters()), made)
    script.train(judged)


@program("Two optimizers share one loss: SGD for the trunk, Adam for the head.", several_optimizers=True)
def two_optimizers(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    trunk, head = nn.Linear(8, 8), nn.Linear(8, 5)
    loss = F.cross_entropy(head(F.tanh(trunk(x))), y)
    script.minimize(SGD(0.1, parameters=trunk.parameters()), loss)
    script.minimize(Adam(0.01, epsilon=1e-3, parameters=head.parameters()), loss)
    script.train(loss, steps=12)


@program("A second network is built after the first one's minimize.", several_optimizers=True)
def network_after_minimize(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=floats(3))
    first = F.mse_loss(nn.Linear(8, 3)(x), y)
    script.minimize(SGD(0.1), first)
    second = F.mse_loss(nn.Linear(8, 3)(F.tanh(nn.Linear(8, 8)(x))), y)
    script.minimize(SGD(0.001), second)
    script.start()
    for batch in script.batches():
        script.run(batch, [first, second])


def _in_turn(script: Script, *optimizers: Any, shared: bool = False) -> None:
    """A program for each wrapped optimizer, trained in turn; ``shared``: with parameters of the same names."""
    mains, losses = [paddle.static.default_main_program(), paddle.static.Program()], []
    startup = paddle.static.Program()
    for main, optimizer in zip(mains, optimizers, strict=True):
        names = paddle.utils.unique_name.guard() if shared else nullcontext()
        with paddle.static.program_guard(main, startup), names:
            x, y = script.inputs(x=floats(8), y=classes(5))
            losses.append(F.cross_entropy(nn.Linear(8, 5)(F.tanh(nn.Linear(8, 8)(x))), y))
            optimizer.minimize(losses[-1])
    script.start(startup)
    for step in range(4):
        for main, loss in zip(mains, losses, strict=True):
            script.run(script.batch(step, main), [loss], main)


@program("Two programs with a network and an optimizer each, trained in turn.")
def two_programs(script: Script) -> None:
    _in_turn(script, *(script.wrap(Momentum(rate, 0.9)) for rate in (0.1, 0.001)))


@program("One optimizer minimises in two programs.")
def one_optimizer_two_programs(script: Script) -> None:
    _in_turn(script, *[script.wrap(SGD(0.1))] * 2)


@program("Two programs train the same parameters in turn, with an optimizer each.")
def two_programs_same_parameters(script: Script) -> None:
    _in_turn(script, *(script.wrap(SGD(rate)) for rate in (0.1, 0.05)), shared=True)


@program("Two losses on one trunk, with an optimizer each; both update the trunk.", several_optimizers=True)
def trunk_of_two_losses(script: Script) -> None:
    x, y, z = script.inputs(x=floats(8), y=classes(5), z=floats(1))
    trunk = F.tanh(nn.Linear(8, 8)(x))
    first, second = F.cross_entropy(nn.Linear(8, 5)(trunk), y), F.mse_loss(nn.Linear(8, 1)(trunk), z)
    script.minimize(SGD(0.1), first)
    script.minimize(SGD(0.05), second)
    script.train(first)


@program("One optimizer minimises two losses in one program.", several_optimizers=True)
def one_optimizer_two_losses(script: Script) -> None:
    x, y, z = script.inputs(x=floats(8), y=classes(5), z=floats(1))
    first, second = F.cross_entropy(nn.Linear(8, 5)(x), y), F.mse_loss(nn.Linear(8, 1)(x), z)
    optimizer = script.wrap(Momentum(0.1, 0.9))
    optimizer.minimize(first)
    optimizer.minimize(second)
    script.train(first)


@program("Two networks with the same names are in two scopes.")
def two_scopes(script: Script) -> None:
    other = paddle.static.Scope()
    x, y = script.inputs(x=floats(8), y=classes(5))
    loss = F.cross_entropy(nn.Linear(8, 5)(x), y)
    script.minimize(SGD(0.1), loss)
    with paddle.static.scope_guard(other):
        script.start()
        script.run(script.batch(10), [loss])
    script.start()
    for batch in script.batches():
        script.run(batch, [loss])
        with paddle.static.scope_guard(other):
            script.run(batch, [loss])
