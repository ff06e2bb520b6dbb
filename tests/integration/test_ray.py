"""Ray Train places the ranks and restarts them, and the run equals an undisturbed one."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fleet_train import spawn
from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, python, run_alone, write_script

pytestmark = [pytest.mark.ray, pytest.mark.long]

STEPS, SAVE_EVERY, KILLED_AT = 12, 4, 6


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


def main(folder: Path, example: str) -> None:
    """The page's example, and in the Ray that it has started two workers of ours, one of which is killed once."""
    from ray.train import FailureConfig, RunConfig

    from fleet_train.ray import FleetTrainer

    runpy.run_path(example, run_name="__main__")
    failures = FailureConfig(max_failures=1)
    FleetTrainer(
        train,
        num_workers=2,
        strategy="unfused",
        train_loop_config={"folder": str(folder), "kills": True},
        run_config=RunConfig(storage_path=f"{folder}/storage", failure_config=failures),
    ).fit()


@pytest.mark.timeout(400)
def test_the_pages_example_runs_and_a_killed_worker_is_started_again_to_the_same_bits(tmp_path: Path) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in (killed, undisturbed):
        folder.mkdir()
    blocks = fenced_blocks((ROOT / "docs" / "engines.md").read_text(), "python")
    example = write_script(next(block for block in blocks if "FleetTrainer" in block), tmp_path)
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # paths of sockets are short
        environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short, "HOME": str(tmp_path)}
        ended = run_alone(tmp_path, python(__file__, str(killed), str(example)), environ, timeout_seconds=360)
    assert ended.exit_code == 0, ended.output
    assert "'ranks': 2" in ended.output
    assert "'rate': 0.1" in ended.output
    spawn(train, ({"folder": str(undisturbed), "kills": False},), nprocs=2, strategy="unfused")
    assert [(one["attempt"], one["first"]) for one in told(undisturbed)] == [(0, 0), (0, 0)]
    assert [(one["attempt"], one["first"]) for one in told(killed)] == [(1, 4), (1, 4)]
    runs = [*told(undisturbed), *told(killed)]
    assert [(one["ranks"], one["profile"]) for one in runs] == [(2, "unfused")] * 4
    assert len({one["digest"] for one in runs}) == 1


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
