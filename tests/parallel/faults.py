"""Run as ranks: a small network, and what one rank does otherwise than the others; the first argument names the case.

Cases that begin with ``late`` have collectives that are enqueued and end late, as on GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import paddle

import fleet_train.cli
from fleet_train import fleet, role_maker, timeouts
from fleet_train.collectives.engines import CALC, OWN
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.convert.fleet import _current
from fleet_train.errors import DataError, ScheduleMismatch
from fleet_train.profile import Profile
from tests.support.late import install_late_engine
from tests.support.worker import digest, report

STEPS, TIMEOUT_SECONDS = 6, 3
RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def build() -> tuple[Any, Any]:
    features = paddle.static.data("x", [None, 4], "float32")
    hidden = features
    for _ in range(2):
        hidden = paddle.static.nn.fc(hidden, 8, activation="tanh")
    return features, paddle.mean(paddle.static.nn.fc(hidden, 1) ** 2)


def batch(step: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng([step, RANK]).standard_normal((5, 4)).astype("float32")}


def state() -> dict[str, np.ndarray]:
    values = fleet.main_program.state_dict("all", paddle.static.global_scope())
    return {name: np.array(value) for name, value in values.items()}


def train(profile: Profile | None = None, before_step: Any = None) -> Any:
    _, loss = build()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.01), profile)
    optimizer.minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    for step in range(STEPS):
        if before_step is not None:
            before_step(step)
        exe.run(fleet.main_program, feed=batch(step), fetch_list=[loss])
    return exe


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    while True:  # it is let go on to tell where it stands, and on a busy machine before the others have given it up
        os.kill(os.getpid(), signal.SIGSTOP)


def throw() -> None:
    raise ValueError("boom")


def save() -> None:
    fleet.save_persistables(None, "out")


def never_end() -> None:
    _current().job.engine.calls.never = "all_reduce"  # type: ignore[attr-defined]


def in_a_collective(end: Callable[[], None]) -> None:
    """This rank meets the others, begins its collective, and is gone before that has run."""
    calls = _current().job.engine.calls  # type: ignore[attr-defined]
    calls.on_own_stream = calls.on_calc_stream = lambda _: end()


def skip() -> None:
    """This rank meets the others, and then does not begin its collective."""
    real = GradientExchange.launch

    def launch(exchange: Any, index: int, gradients: Any, boundary: Any = None) -> None:
        calls = exchange._job.engine.calls
        calls.on_own_stream = calls.on_calc_stream = lambda _: None
        real(exchange, index, gradients, boundary)

    GradientExchange.launch = launch  # type: ignore[method-assign]


# What the ranks of the list do before the fourth step.
FAULTS: dict[str, tuple[Callable[[], Any], Sequence[int]]] = {
    "die": (die, [1]),
    "freeze": (freeze, [1]),
    "throw": (throw, [1]),
    "exit with text": (lambda: sys.exit("no disk left"), [1]),
    "leave early": (lambda: sys.exit(0), [1]),
    "save on rank 0": (save, [0]),
    "barrier after unequal steps": (lambda: fleet.barrier_worker(), [1]),
    "stall": (lambda: time.sleep(30), [1]),
    "busy for longer than gloo waits": (lambda: time.sleep(33), [1]),
    "never end": (never_end, [0, 1, 2]),
    "die in a collective": (lambda: in_a_collective(die), [1]),
    "freeze in a collective": (lambda: in_a_collective(freeze), [1]),
    "skip": (skip, [1]),
}


def fail(name: str, step: int) -> None:
    action, ranks = FAULTS[name]
    if step == 3 and RANK in ranks:
        report(failed_at=time.monotonic())
        action()


def few_barriers() -> Profile:
    """None from the third step on."""
    return Profile(barrier_every_steps=50)


def updates_later() -> Profile:
    """The step before is still to be updated when a rank fails."""
    return Profile(overlap_next_step=True)


def save_on_rank_0_at_the_end() -> None:
    train(Profile(use_local_sgd=True, local_sgd_is_warm_steps=1, local_sgd_steps=4))
    if fleet.is_first_worker():
        save()


def drift(every: str, before: str) -> None:
    """Rank 2 changes one parameter outside of training, before a run; the ranks compare every so many."""

    def disturb(step: int) -> None:
        if RANK == 2 and step == int(before):
            variable = paddle.static.global_scope().find_var("fc_1.w_0").get_tensor()
            variable.set(np.array(variable) * np.float32(1.0001), fleet.place())

    train(Profile(divergence_check_steps=int(every)), disturb)
    fleet.save_persistables(None, "saved")


def unequal_start() -> None:
    """A startup program unknown to minimize initialises a layer; LocalSGD from the first step."""
    paddle.seed(RANK)
    main, network, rest = (paddle.static.Program() for _ in range(3))
    with paddle.static.program_guard(main, network):
        hidden = paddle.nn.Linear(4, 4)(paddle.static.data("x", [None, 4]))
    profile = Profile(use_local_sgd=True, local_sgd_is_warm_steps=0, local_sgd_steps=2)
    with paddle.static.program_guard(main, rest):
        loss = paddle.nn.Linear(4, 1)(hidden).mean()
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), profile).minimize(loss, rest)
    exe = paddle.static.Executor(fleet.place())
    for startup in (network, rest):
        exe.run(startup)
    for _ in range(2):  # on streams, what a step starts from is compared in the next one
        exe.run(main, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])


def converted(
    settings: dict[str, Any] | None = None,
    dtype: str = "float32",
    width: int = 8,
    layers: int = 1,
    channels: int = 0,
    make: Any = paddle.optimizer.SGD,
) -> None:
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        hidden = paddle.static.data("x", [None, 4], dtype)
        for _ in range(layers):
            hidden = paddle.static.nn.fc(hidden, width)
        if channels:
            hidden = paddle.nn.BatchNorm1D(8, use_global_stats=channels > 1)(hidden)
        fleet.distributed_optimizer(make(0.1), Profile(**settings or {})).minimize(hidden.mean())


def mismatches() -> None:
    """Rank 1 differs from the others in one respect after another; each rank's error."""
    differs, local = RANK == 1, {"use_local_sgd": True, "local_sgd_momentum": "average"}
    cases: dict[str, Any] = {
        "same": lambda: converted(),
        "dtype": lambda: converted(dtype="float64" if differs else "float32"),
        "shape": lambda: converted(width=9 if differs else 8),
        "knob outside the plan": lambda: converted({"divergence_check_steps": 50 if differs else 100}),
        "knob of the plan": lambda: converted({"nccl_comm_num": 1 + differs}),
        "variable": lambda: converted({"environment": {"NCCL_DEBUG": "INFO" if differs else "secret"}}),
        "variable on one rank": lambda: converted({"environment": {"NCCL_DEBUG": "INFO"} if differs else {}}),
        "optimizer's state": lambda: converted(
            local, make=paddle.optimizer.Adam if differs else paddle.optimizer.Momentum
        ),
        "batch norm": lambda: converted({"sync_batch_norm": True}, channels=2 if differs else 1),
        "more layers": lambda: converted(layers=1 + differs),
        "steps per epoch": lambda: fleet.agree("steps per epoch", 100 + RANK),
        "agreed": lambda: fleet.agree("steps per epoch", 100),
    }
    told = {}
    for name, case in cases.items():
        try:
            case()
            told[name] = ""
        except ScheduleMismatch as error:
            told[name] = str(error)
    report(told=told)


def command() -> None:
    """A command of the package that fails on rank 1."""

    @click.command()
    def fails() -> None:
        fleet.init()
        if RANK == 1:
            raise DataError("no such folder on this machine")
        fleet.barrier_worker()

    fleet_train.cli.COMMANDS["fail"] = "Fail on rank 1."
    fleet_train.cli._LazyGroup.get_command = lambda *_: fails  # type: ignore[method-assign]
    sys.argv = ["fleet_train", "fail"]
    fleet_train.cli.main()


def meet_in_the_folder(ranks: Sequence[int], patience_seconds: float = 90.0) -> None:
    """Ranks that have imported Paddle wait for one another: on a busy machine that differs by more than a timeout."""
    folder = Path(os.environ["FLEET_TRAIN_TEST_RESULTS"])
    (folder / f"imported-{RANK}").touch()
    until = time.monotonic() + patience_seconds
    while not all((folder / f"imported-{rank}").exists() for rank in ranks):
        assert time.monotonic() < until, f"ranks {ranks} have not all been started within {patience_seconds:g} s"
        time.sleep(0.02)


CASES: dict[str, Callable[..., Any]] = {
    "save on rank 0 at the end": save_on_rank_0_at_the_end,
    "stall": lambda: train(Profile(collective_timeout_seconds=2), partial(fail, "stall")),
    "drift": drift,
    "unequal start": unequal_start,
    "mismatches": mismatches,
}


def main() -> None:
    case = sys.argv[1]
    if case == "command":
        command()
    paddle.enable_static()
    if case == "never come":
        if RANK == 1:
            return
        meet_in_the_folder(ranks=[0, 2])
    if case.startswith("late "):
        install_late_engine(stream=CALC if case.startswith("late calc ") else OWN)
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    name = case.removeprefix("late ").removeprefix("calc ")
    fault = name.removesuffix(", few barriers")
    in_next = name.removesuffix(", next step")
    if fault != name:
        timeouts.QUICK_STEP_SECONDS = 600.0  # a busy machine's slow steps would have barriers, too
    if case in CASES:
        CASES[case](*sys.argv[2:])
    elif case.startswith("late "):
        every = 1 if fault == name else 50
        profile = Profile(collective_timeout_seconds=TIMEOUT_SECONDS, barrier_every_steps=every)
        train(profile, partial(fail, fault))
    elif fault in FAULTS:
        train(None if fault == name else few_barriers(), partial(fail, fault))
    elif in_next in FAULTS:
        train(updates_later(), partial(fail, in_next))
    else:
        train()
    report(RANK, ended=True, state=digest(state()) if case not in CASES else "", world=fleet.worker_num())


if __name__ == "__main__":
    main()
