"""A job of one process, in static mode, for tests of what the trainer puts into programs and saves of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
import pytest

from fleet_train import fleet


@pytest.fixture
def one_process() -> Iterator[None]:
    paddle.enable_static()
    fleet.init()
    yield
    fleet.shutdown()
    paddle.disable_static()


@pytest.fixture
def small_loss(one_process: None) -> Iterator[Any]:
    """The loss of a layer of 4 x 3 in programs, names and a scope of its own; not minimised yet."""
    del one_process
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.utils.unique_name.guard(),
    ):
        yield paddle.mean(paddle.nn.Linear(4, 3)(paddle.static.data("x", [None, 4], "float32")))


@pytest.fixture
def program(small_loss: Any) -> None:
    """Its training program, with a state that can be saved."""
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1)).minimize(small_loss)
    paddle.static.Executor().run(fleet.startup_program)
