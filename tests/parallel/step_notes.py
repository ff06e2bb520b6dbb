"""Run as several ranks: when each rank learns of a stop request, and the measured times of a rank that sleeps."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import paddle

from fleet_train import fleet, role_maker, timeouts
from fleet_train.profile import Profile
from fleet_train.selftest.training import SAMPLES_PER_RANK, Trained, batches
from tests.parallel.local_sgd import MLP, momentum
from tests.support.worker import report

STEPS, SLEEP_SECONDS = 8, 0.1

LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 2, "local_sgd_steps": 4}
# What is asked for before which step (from 1) by the last rank, and what the profile says.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "synchronous": (3, {}),
    "two communicators": (3, {"nccl_comm_num": 2, "fuse_parameter_groups_size": 2}),
    "gradient merge": (4, {"accumulate_steps": 3}),
    # A comparison of the replicas would be a synchronization point, and give the next step a barrier.
    "few barriers": (3, {"barrier_every_steps": 5, "divergence_check_steps": 0}),
    "few barriers, gradient merge": (3, {"barrier_every_steps": 5, "accumulate_steps": 2}),
    "local sgd, warm-up": (2, LOCAL),
    "local sgd, period": (4, LOCAL),
}


def steps(settings: dict[str, Any]) -> Any:
    """Trains ``STEPS`` steps; yields the number of the next step before each, and 0 at the end."""
    trained = Trained(MLP, lambda inner: fleet.distributed_optimizer(inner, Profile(**settings)), momentum)
    share = slice(fleet.worker_index() * SAMPLES_PER_RANK, (fleet.worker_index() + 1) * SAMPLES_PER_RANK)
    for step, (features, labels) in enumerate(batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), 0), 1):
        yield step
        trained.step(features[share], labels[share])
    yield 0


def stop(step_of_request: int, settings: dict[str, Any]) -> list[str | None]:
    """What this rank knows after each step."""
    notes = fleet._current().job.notes
    notes.stop = notes._stop_reason = None  # a job has one stop in its life, this one has one per case
    known: list[str | None] = []
    for step in steps(settings):
        known.append(fleet.stop_requested())
        if step == step_of_request and fleet.worker_index() == fleet.worker_num() - 1:
            fleet.request_stop("the machine is needed")
            fleet.request_stop("not heard")
    return known[1:]


def times(settings: dict[str, Any], first: int) -> dict[str, Any]:
    """What is counted from behind step ``first``, while rank 1 sleeps before each step."""
    for step in steps(settings):
        if step == first + 1:
            fleet.communication()
        if fleet.worker_index() == 1:
            time.sleep(SLEEP_SECONDS)
    read = asdict(fleet.communication())
    plan = fleet.plan()
    assert plan is not None
    return read | {"planned_bytes": plan.sent_bytes_per_step, "again": asdict(fleet.communication())}


def main() -> None:
    # A step that a busy machine makes longer than this would have a barrier more (tests/unit/collectives has the rule).
    timeouts.QUICK_STEP_SECONDS = float("inf")
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    report(
        fleet.worker_index(),
        known={name: stop(*case) for name, case in CASES.items()},
        synchronous=times({}, first=1),
        local=times(LOCAL | {"local_sgd_steps": 3}, first=2),
    )


if __name__ == "__main__":
    main()
