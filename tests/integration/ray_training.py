"""Two workers of Ray Train, twice: undisturbed, and with one of them killed once. Prints how each run ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

STEPS, SAVE_EVERY, KILLED_AT = 24, 6, 15


def train(config: dict[str, Any]) -> None:
    import numpy as np
    import paddle

    from fleet_train import fleet
    from fleet_train.cluster.environment import attempt
    from fleet_train.selftest.training import SEVERAL_BUCKETS, Trained, batches, digest

    paddle.enable_static()
    fleet.init()
    rank, number, folder = fleet.worker_index(), attempt(os.environ), Path(config["folder"])
    paddle.seed(3)
    training = Trained(SEVERAL_BUCKETS, fleet.distributed_optimizer, lambda: paddle.optimizer.Momentum(0.05, 0.9))
    first = 0
    if number:
        first = max(int(saved.name) for saved in folder.glob("[0-9]*"))
        with paddle.static.scope_guard(training.scope):
            fleet.load_persistables(training.exe, folder / str(first), training.main)
    for step, (features, labels) in enumerate(batches(STEPS, 12, seed=5)):
        if step < first:
            continue
        training.step(features[rank * 6 : rank * 6 + 6], labels[rank * 6 : rank * 6 + 6])
        if (step + 1) % SAVE_EVERY == 0:
            with paddle.static.scope_guard(training.scope):
                fleet.save_persistables(training.exe, folder / "draft", training.main)
            if rank == 0:
                (folder / "draft").rename(folder / str(step + 1))
        if config["kills"] and number == 0 and step == KILLED_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    found = {
        "digest": digest(training.state()),
        "attempt": number,
        "first": first,
        "profile": fleet.profile().name,
        "ranks": int(fleet.all_reduce(np.array(1, "int64"), "sum")),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def main(folder: Path) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig

    from fleet_train.ray import FleetTrainer

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2])
    try:
        for kills in (False, True):
            run = folder / ("killed" if kills else "undisturbed")
            run.mkdir(parents=True)
            FleetTrainer(
                train,
                num_workers=2,
                strategy="unfused",
                train_loop_config={"folder": str(run), "kills": kills},
                run_config=RunConfig(
                    storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
