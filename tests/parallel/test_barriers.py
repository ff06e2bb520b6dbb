"""What ranks tell one another at step barriers: stop requests, equal gradients; and which steps have one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.convert.fleet import _current
from fleet_train.profile import Profile
from fleet_train.selftest.training import SAMPLES_PER_RANK, Trained, batches, share
from tests.parallel.strategies import LOCAL, MLP, STREAMING, momentum
from tests.support.ranks import run_ranks
from tests.support.worker import digest, report

STOP_STEPS = 8
SHORT = LOCAL | {"local_sgd_is_warm_steps": 2}
# Which step the last rank asks to stop before (from 1), what the profile says, and behind which step all know it: the
# next one that communicates, at a barrier. A comparison of the replicas would give the next step a barrier.
STOPS: dict[str, tuple[int, dict[str, Any], int]] = {
    "synchronous": (3, {}, 3),
    "gradient merge": (4, {"accumulate_steps": 3}, 6),
    "few barriers, gradient merge": (3, {"barrier_every_steps": 5, "accumulate_steps": 2}, 4),
    "local sgd, period": (4, SHORT, 6),
}
STEPS, EVERY, SLOW = 12, 5, "a slow step"
# Without comparisons, which are synchronization points, too.
ALONE = Profile(divergence_check_steps=0, barrier_every_steps=1)
# With the steps that have a barrier where only each fifth has to. The slow step is the seventh, told at the tenth.
FEW: dict[str, tuple[Profile, list[int]]] = {
    "default": (ALONE, [1, 2, 3, 5, 10]),
    SLOW: (ALONE.with_settings("test", average_over="ranks"), [1, 2, 3, 5, 10, 11]),
    "small buckets": (ALONE.with_settings("test", fuse_parameter_groups_size=1, nccl_comm_num=2), [1, 2, 3, 5, 10]),
    "local_sgd": (
        ALONE.with_settings("test", use_local_sgd=True, local_sgd_is_warm_steps=7, local_sgd_steps=2),
        [1, 2, 3, 5],
    ),
    "merge": (ALONE.with_settings("test", accumulate_steps=2), [1, 2, 3, 5]),
    "compared": (Profile(divergence_check_steps=4, barrier_every_steps=1), []),
}
SAMPLES = {
    "default": Profile(),
    "small buckets": Profile(fuse_parameter_groups_size=1, nccl_comm_num=2),
    "int8": Profile(compression="int8"),
    "merge": Profile(accumulate_steps=2),
    "local steps later": Profile(use_local_sgd=True, local_sgd_is_warm_steps=3, local_sgd_steps=4),
    "overlapped": Profile(**STREAMING | {"local_sgd_is_warm_steps": 0}),
}


class Turned:
    """A moment of the clock that the script turns."""

    now = 0.0

    def __init__(self) -> None:
        self.at = Turned.now

    def has_passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Any) -> float:
        return float(self.at - earlier.at)


def trained(profile: Profile, steps: int, start: Any = None, same: bool = False) -> Iterator[Trained]:
    """Trains; gives the program before each step and at the end."""
    paddle.seed(7)
    program = Trained(MLP, lambda inner: fleet.distributed_optimizer(inner, profile), momentum)
    if start is not None:
        program.start_from(start)
    mine = share(0 if same else fleet.worker_index())
    for features, labels in batches(steps, SAMPLES_PER_RANK * fleet.worker_num(), 1):
        Turned.now += 0.01
        yield program
        program.step(features[mine], labels[mine])
    yield program


def stop(step_of_request: int, settings: dict[str, Any], _: int) -> list[str | None]:
    """What this rank knows after each step."""
    notes = _current().job.notes
    notes.stop = notes._stop_reason = None  # a job has one stop in its life, this one has one per case
    known: list[str | None] = []
    for step, _program in enumerate(trained(Profile(**{"barrier_every_steps": 1} | settings), STOP_STEPS), 1):
        known.append(fleet.stop_requested())
        if step == step_of_request and fleet.worker_index() == fleet.worker_num() - 1:
            fleet.request_stop("the machine is needed")
            fleet.request_stop("not heard")
    return known[1:]


def barriers(case: str, profile: Profile, start: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What the program started from; its end, and the names of its step barriers."""
    job, names = _current().job, []
    real = job.step_barrier

    def step_barrier(name: str, *arguments: Any) -> Any:
        names.append(name.partition(" of program")[0])
        return real(name, *arguments)

    for step, program in enumerate(trained(profile, STEPS, start), 1):
        if step == 1:
            start = program.state()
            job.step_barrier = step_barrier  # type: ignore[method-assign]
        if case == SLOW and step == 7 and fleet.worker_index() == fleet.worker_num() - 1:
            Turned.now += 10.0
    del job.step_barrier
    return start, {"end": digest(program.state()), "barriers": names}


def few_and_all(case: str) -> dict[str, Any]:
    profile, _ = FEW[case]
    start, every = barriers(case, profile, None)
    _, few = barriers(case, profile.with_settings("test", barrier_every_steps=EVERY), start)
    return {"start": digest(start), "all": every, "few": few}


def advised(train: Callable[[], Any]) -> list[str]:
    told: list[str] = []
    _current().job.advise = lambda error: told.append(str(error))
    train()
    return told


def train_on(profile: Profile, same: bool) -> None:
    for _ in trained(profile, 14, same=same):
        pass


def train_constant_gradient_of_a_bias() -> None:
    """A loss that is the output itself: the gradient of its last bias is 1 on every rank."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with (
        paddle.static.program_guard(main, startup),
        paddle.utils.unique_name.guard(),
        paddle.static.scope_guard(paddle.static.Scope()),
    ):
        loss = paddle.nn.Linear(4, 1)(paddle.static.data("x", [None, 4], "float32")).mean()
        profile = Profile(fuse_parameter_groups_size=1)
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), profile).minimize(loss)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        random = np.random.default_rng(fleet.worker_index())
        for _ in range(5):
            exe.run(main, feed={"x": random.standard_normal((3, 4)).astype("float32")})


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    Turned.now = time.perf_counter()
    _current().job.clock._moment = Turned  # type: ignore[assignment]
    report(
        fleet.worker_index(),
        known={name: stop(*case) for name, case in STOPS.items()},
        few={name: few_and_all(name) for name in FEW},
        advised={
            name: [advised(partial(train_on, profile, same)) for same in (True, False)]
            for name, profile in SAMPLES.items()
        },
        innocent=advised(train_constant_gradient_of_a_bias),
    )


Ranks = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, False), id="2"), pytest.param((3, True), id="3, streams", marks=pytest.mark.long)],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    size, late = request.param
    script, folder = Path(__file__), tmp_path_factory.mktemp("barriers")
    result = run_ranks(script, size, folder=folder, nodes=size, late_streams=late, timeout_seconds=300)
    return [result.values[rank] for rank in range(size)]


@pytest.mark.parametrize("case", STOPS)
def test_stop_is_known_to_every_rank_after_the_same_step(ranks: Ranks, case: str) -> None:
    last, before = len(ranks) - 1, STOPS[case][2] - 1
    for rank in ranks:
        known = rank["known"][case]
        assert known[:before] == [None] * before
        assert len(set(known[before:])) == 1
        assert known[-1].startswith(f"rank {last} (127.0.0.{2 + last}:")
        assert known[-1].endswith("): the machine is needed")


@pytest.mark.parametrize("case", FEW)
def test_few_barriers_are_those_of_the_rule_on_every_rank_and_change_no_bit(ranks: Ranks, case: str) -> None:
    few, every = (ranks[0]["few"][case][which] for which in ("few", "all"))
    for rank in ranks:
        assert rank["few"][case]["few"]["end"] == rank["few"][case]["all"]["end"] != rank["few"][case]["start"]
        assert rank["few"][case]["few"]["barriers"] == few["barriers"]
    assert set(few["barriers"]) < set(every["barriers"])
    steps = FEW[case][1]
    if steps:
        assert [name for name in few["barriers"] if name.startswith("step ")] == [f"step {step}" for step in steps]
        averagings = [name for name in every["barriers"] if not name.startswith("step ")]
        assert [name for name in few["barriers"] if not name.startswith("step ")] == averagings


@pytest.mark.parametrize("case", SAMPLES)
def test_the_same_samples_are_noticed_once_in_a_program_by_every_rank(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        same, own = rank["advised"][case]
        assert len(same) == 1
        assert "all ranks computed the same gradient twice in a row" in same[0]
        assert own == []
        assert rank["innocent"] == [], "gradients that are equal by nature accuse nobody"


if __name__ == "__main__":
    main()
