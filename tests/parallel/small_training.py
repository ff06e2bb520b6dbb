"""Run as ranks by the tests beside it: a small network, then the case that the first argument names."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.support.worker import digest, report

STEPS = 6
RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def build(width: int = 8, layers: int = 2) -> tuple[Any, Any]:
    features = paddle.static.data("x", [None, 4], "float32")
    hidden = features
    for _ in range(layers):
        hidden = paddle.static.nn.fc(hidden, width, activation="tanh")
    return features, paddle.mean(paddle.static.nn.fc(hidden, 1) ** 2)


def batch(step: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng([step, RANK]).standard_normal((5, 4)).astype("float32")}


def state() -> dict[str, np.ndarray]:
    values = fleet.main_program.state_dict("all", paddle.static.global_scope())
    return {name: np.array(value) for name, value in values.items()}


def train(profile: Profile | None = None, before_step: Any = None, **network: int) -> Any:
    _, loss = build(**network)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.01), profile)
    optimizer.minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    for step in range(STEPS):
        if before_step is not None:
            before_step(step)
        exe.run(fleet.main_program, feed=batch(step), fetch_list=[loss])
    return exe


def fails_now(step: int) -> bool:
    """Whether this rank fails before this step; the test is told when."""
    if RANK != 1 or step != 3:
        return False
    report(failed_at=time.monotonic())
    return True


def die(step: int) -> None:
    if fails_now(step):
        os.kill(os.getpid(), 9)


def throw(step: int) -> None:
    if fails_now(step):
        raise ValueError("boom")


def exit_with_text(step: int) -> None:
    if RANK == 1 and step == 3:
        sys.exit("no disk left")


def leave_early(step: int) -> None:
    if fails_now(step):
        sys.exit(0)


def save_on_rank_0(step: int) -> None:
    if RANK == 0 and step == 3:
        fleet.save_persistables(None, "out")


def save_on_rank_0_at_the_end() -> None:
    train(Profile(use_local_sgd=True, local_sgd_is_warm_steps=1, local_sgd_steps=4))
    if fleet.is_first_worker():
        fleet.save_persistables(None, "out")


def barrier_early(step: int) -> None:
    if RANK == 1 and step == 3:
        fleet.barrier_worker()


def sleep_at_step_3(seconds: float) -> Any:
    def sleep(step: int) -> None:
        if RANK == 1 and step == 3:
            time.sleep(seconds)

    return sleep


def meet_in_the_folder(ranks: Sequence[int], patience_seconds: float = 90.0) -> None:
    """Ranks that have imported Paddle wait for one another: on a busy machine that differs by more than a timeout."""
    folder = Path(os.environ["FLEET_TRAIN_TEST_RESULTS"])
    (folder / f"imported-{RANK}").touch()
    until = time.monotonic() + patience_seconds
    while not all((folder / f"imported-{rank}").exists() for rank in ranks):
        assert time.monotonic() < until, f"ranks {ranks} have not all been started within {patience_seconds:g} s"
        time.sleep(0.02)


def busy_after_a_barrier(step: int) -> None:
    if step == 3:
        fleet.barrier_worker()
        time.sleep(33 * RANK)


def freeze(step: int) -> None:
    if RANK == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)


def few_barriers() -> Profile:
    """None from the third step on."""
    return Profile(barrier_every_steps=50)


def other_version() -> None:
    import fleet_train

    if RANK == 1:
        fleet_train.__version__ = "0.0.7"


def other_paddle() -> None:
    if RANK == 1:
        paddle.__version__ = "3.3.99"


CASES = {
    "train": lambda: train(),
    "die": lambda: train(before_step=die),
    "throw": lambda: train(before_step=throw),
    "exit with text": lambda: train(before_step=exit_with_text),
    "leave early": lambda: train(before_step=leave_early),
    "save on rank 0": lambda: train(before_step=save_on_rank_0),
    "save on rank 0 at the end": save_on_rank_0_at_the_end,
    "barrier after unequal steps": lambda: train(before_step=barrier_early),
    "stall": lambda: train(Profile(collective_timeout_seconds=2), before_step=sleep_at_step_3(30)),
    "busy for longer than gloo waits": lambda: train(before_step=sleep_at_step_3(33)),
    "die, few barriers": lambda: train(few_barriers(), before_step=die),
    "throw, few barriers": lambda: train(few_barriers(), before_step=throw),
    "leave early, few barriers": lambda: train(few_barriers(), before_step=leave_early),
    "freeze, few barriers": lambda: train(few_barriers(), before_step=freeze),
    "save on rank 0, few barriers": lambda: train(few_barriers(), before_step=save_on_rank_0),
    "barrier after unequal steps, few barriers": lambda: train(few_barriers(), before_step=barrier_early),
    "busy after a barrier, few barriers": lambda: train(few_barriers(), before_step=busy_after_a_barrier),
    "other shapes": lambda: train(width=8 + RANK),
    "other profile": lambda: train(Profile(nccl_comm_num=1 + RANK)),
    "more layers": lambda: train(layers=2 + RANK),
}


def main() -> None:
    case = sys.argv[1]
    paddle.enable_static()
    if case == "other version":
        other_version()
    if case == "other Paddle":
        other_paddle()
    if case == "never come":
        if RANK == 1:
            return
        meet_in_the_folder(ranks=[0, 2])
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    CASES.get(case, CASES["train"])()
    report(RANK, state=digest(state()), world=fleet.worker_num())


if __name__ == "__main__":
    main()
