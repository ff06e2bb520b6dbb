"""Run as ranks whose collectives are enqueued: one of them does what the first argument says in step 3.

A second argument is the profile's ``barrier_every_steps``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.convert.fleet import _current
from fleet_train.profile import Profile
from tests.parallel.small_training import RANK, train
from tests.support.late import install_late_engine

TIMEOUT_SECONDS = 3


def fault(kind: str) -> Any:
    def before_step(step: int) -> None:
        if step != 3:
            return
        if kind == "never ends":
            _current().job.engine._begin.never = "all_reduce"  # type: ignore[attr-defined]
        elif RANK == 1 and kind.endswith("in a collective"):
            end_in_a_collective({"killed": die, "stopped": stop}[kind.split()[0]])
        elif RANK == 1:
            {"stopped": stop, "killed": die, "leaves": sys.exit, "skips": skip}[kind]()

    return before_step


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def end_in_a_collective(end: Callable[[], None]) -> None:
    """This rank meets the others, begins its collective, and is gone before that has run."""
    engine = _current().job.engine

    def begin(_: Any) -> None:
        end()

    engine._begin = begin  # type: ignore[attr-defined]


def skip() -> None:
    """This rank meets the others, and then does not begin its collective."""
    real = GradientExchange.launch

    def launch(exchange: Any, index: int, gradients: Any, boundary: Any = None) -> None:
        exchange._job.engine._begin = lambda _: None
        real(exchange, index, gradients, boundary)

    GradientExchange.launch = launch  # type: ignore[method-assign]


if __name__ == "__main__":
    paddle.enable_static()
    install_late_engine()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    profile = Profile(collective_timeout_seconds=TIMEOUT_SECONDS, barrier_every_steps=every)
    train(profile, before_step=fault(sys.argv[1]))
