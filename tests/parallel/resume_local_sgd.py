"""Run as several ranks: LocalSGD saved in the middle of a period and taken up again, beside a run that only saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.parallel.local_sgd import CASES, LOCAL
from tests.parity.compare import SAMPLES_PER_RANK, Trained
from tests.parity.networks import batches
from tests.support.worker import digest, report

SAVED_AFTER = 8  # warm-up 3, averaging after 7: one local step into a period
STEPS = 14


def steps(trained: Trained, first: int, last: int, seed: int) -> None:
    share = slice(fleet.worker_index() * SAMPLES_PER_RANK, (fleet.worker_index() + 1) * SAMPLES_PER_RANK)
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed)[first:last]:
        trained.step(features[share], labels[share])


def resume(name: str, seed: int, folder: Path) -> dict[str, Any]:
    network, make, settings = CASES[name]

    def start() -> Trained:
        return Trained(network, lambda inner: fleet.distributed_optimizer(inner, Profile(**LOCAL | settings)), make)

    paddle.seed(seed)
    straight = start()
    steps(straight, 0, SAVED_AFTER, seed)
    with paddle.static.scope_guard(straight.scope):
        fleet.save_persistables(straight.exe, folder, straight.main)
    at_save = digest(straight.state())
    steps(straight, SAVED_AFTER, STEPS, seed)
    paddle.seed(seed + 1000)
    resumed = start()
    with paddle.static.scope_guard(resumed.scope):
        fleet.load_persistables(resumed.exe, folder, resumed.main)
    steps(resumed, SAVED_AFTER, STEPS, seed)
    return {"at_save": at_save, "straight": digest(straight.state()), "resumed": digest(resumed.state())}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    names = ["constant, keep", "adam", "average momentum", "slowmo", "diloco", "bfloat16 differences", "doubling"]
    results = {name: resume(name, seed, Path(sys.argv[1]) / str(seed)) for seed, name in enumerate(names)}
    report(fleet.worker_index(), cases=results)


if __name__ == "__main__":
    main()
