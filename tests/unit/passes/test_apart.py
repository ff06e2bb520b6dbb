"""Updates that do not communicate are found in a program, with the line of the script that made them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.incubate.optimizer import LarsMomentumOptimizer

from fleet_train.convert import process, session
from fleet_train.convert.passes.program import run_if, updates_alone

OPTIMIZERS = {
    **{name: getattr(paddle.optimizer, name) for name in ("SGD", "Momentum", "Adam", "AdamW", "Adagrad", "RMSProp")},
    **{name: getattr(paddle.optimizer, name) for name in ("Adamax", "Adadelta", "Lamb", "NAdam", "RAdam", "Rprop")},
    "ASGD": lambda rate: paddle.optimizer.ASGD(rate, batch_num=2),
    "Lars": lambda rate: LarsMomentumOptimizer(rate, 0.9),
}


@contextlib.contextmanager
def network() -> Iterator[tuple[Any, Any, Any]]:
    """A program, its startup program, and a loss."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        hidden = paddle.nn.BatchNorm1D(4)(paddle.static.data("x", [None, 4], "float32"))
        yield main, startup, paddle.nn.Linear(4, 1)(hidden).mean()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_updates_of_every_optimizer_are_found(make: Callable[[float], Any]) -> None:
    with network() as (main, startup, loss):
        assert updates_alone(main, set()) == ""
        make(0.1).minimize(loss)
    assert updates_alone(main, set()).startswith("test_apart.py, line ")
    assert updates_alone(main, set()).endswith(" (make(0.1).minimize(loss))")
    assert updates_alone(startup, set()) == ""


def test_an_update_inside_a_condition_is_found() -> None:
    with network() as (main, _, loss):
        optimizer = paddle.optimizer.SGD(0.1)
        pairs = optimizer.backward(loss)
        optimizer._create_global_learning_rate()
        run_if(loss > 0, lambda: optimizer.apply_gradients(pairs))
    assert "test_apart.py, line " in updates_alone(main, set())


def test_each_program_is_looked_at_once_and_paddles_method_comes_back() -> None:
    before, seen = paddle.static.Executor.run, []
    try:
        session.before_first_runs(seen.append)
        exe = paddle.static.Executor()
        with network() as (main, startup, loss), paddle.static.scope_guard(paddle.static.Scope()):
            exe.run(startup)
            for _ in range(3):
                exe.run(feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
                exe.run(main, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
        with pytest.raises(AttributeError, match="'list' object"):  # as Paddle has it
            exe.run([])
        assert seen == [startup, main]
    finally:
        process.put_back()
    assert paddle.static.Executor.run is before


def test_a_method_that_somebody_else_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(paddle.static.Executor, "run", lambda *_: ran.append("paddle's"))
    session.before_first_runs(lambda _: ran.append("looked"))
    ours = paddle.static.Executor.run
    monkeypatch.setattr(paddle.static.Executor, "run", lambda self, *given: (ran.append("theirs"), ours(self, *given)))
    theirs = paddle.static.Executor.run
    paddle.static.Executor().run(paddle.static.Program())
    process.put_back()
    assert paddle.static.Executor.run is theirs
    paddle.static.Executor().run(paddle.static.Program())
    assert ran == ["theirs", "looked", "paddle's", "theirs", "paddle's"]
