"""What an exchange remembers of a training: in each scope its own, and nothing after a startup program."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import paddle
import pytest

from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.exchange import GradientExchange
from tests.unit.collectives.played import OneOfTwo, exchange_of

SHAPES = [(3, 2), (5,)]
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2}


class Scope:
    """Stands in for Paddle's."""


def step(job: OneOfTwo, exchange: GradientExchange) -> None:
    values = [paddle.ones(shape, "float32") for shape in SHAPES]
    exchange.arrive()
    exchange.launch(0, values)
    exchange.wait(0)
    exchange.finish(HeldValues(values, [], []), ["p0", "p1"], None)
    job.device.step += 1


def test_steps_are_counted_in_each_scope_and_anew_after_a_startup_program(job: OneOfTwo) -> None:
    exchange, one, other = exchange_of(job, SHAPES, barrier_every_steps=50), Scope(), Scope()
    steps = []
    for scope in (one, one, other, one, other):
        exchange.enter(scope)
        step(job, exchange)
        steps.append(exchange.step)
    exchange.begin_anew(one)
    assert [exchange.has_trained_in(scope) for scope in (one, other)] == [False, True]
    exchange.enter(one)
    step(job, exchange)
    assert [*steps, exchange.step] == [1, 2, 1, 3, 2, 1]
    # A scope's first steps have a barrier, and so have those behind another scope's. Its name says whose step it is.
    others = [f"step {number} of training 2" for number in (1, 2)]
    assert job.barriers == ["step 1", "step 2", others[0], "step 3", others[1], "step 1 of training 3"]


def test_the_first_scope_goes_on_with_what_was_there_before_any(job: OneOfTwo) -> None:
    exchange, scope = exchange_of(job, SHAPES), Scope()
    step(job, exchange)
    exchange.enter(scope)
    step(job, exchange)
    exchange.enter(scope)
    assert (exchange.step, exchange.has_trained_in(scope)) == (2, True)


def test_replicas_are_compared_after_the_first_step_of_each_training(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    exchange, scope = exchange_of(job, SHAPES, divergence_check_steps=3), Scope()
    monkeypatch.setattr(job, "met", lambda name: compared.append(name) if name.startswith("digest") else None)
    exchange.enter(scope)
    for _ in range(2):
        for _ in range(4):
            step(job, exchange)
        exchange.begin_anew(scope)
    first = ["digest at step 1", "digest at step 4"]
    assert compared == [*first, *(f"{name} of training 2" for name in first)]


@pytest.mark.parametrize("is_inside_update", [False, True])
def test_an_averaging_under_way_is_awaited_and_dropped(job: OneOfTwo, is_inside_update: bool) -> None:
    exchange, scope = exchange_of(job, SHAPES, **LOCAL, local_sgd_overlap_steps=1), Scope()
    exchange.enter(scope)
    for _ in range(2):
        step(job, exchange)
    before = exchange.averaging
    assert job.barriers == ["averaging after step 2 0"]
    exchange.begin_anew(scope, is_inside_update)
    held = HeldValues([paddle.zeros(shape) for shape in SHAPES], [], [])
    assert before is not None
    assert exchange.averaging is not None
    assert [each.apply_pending(held) for each in (before, exchange.averaging)] == [[], []]
    assert exchange.averager is not before.averager


@pytest.mark.parametrize("is_entered", [True, False])
def test_a_scope_that_is_freed_takes_its_training_with_it(job: OneOfTwo, is_entered: bool) -> None:
    exchange, scope, other = exchange_of(job, SHAPES, compression="int8"), Scope(), Scope()
    exchange.enter(scope)
    step(job, exchange)
    remembered: weakref.ref[Any] = weakref.ref(exchange.methods[0][1])
    if not is_entered:
        exchange.enter(other)
    del scope
    gc.collect()
    assert remembered() is None
    assert exchange.step == 0
