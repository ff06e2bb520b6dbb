"""The reference run of a soak with machine faults: one plain job per stretch that was not rolled back.

Each job runs on as many machines as its stretch had, from the final checkpoint of the job before it, in its own
folder, without faults, restarts, copies or relays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fleet_train.errors import Preempted
from tools.soaking.kills import SoakFailed
from tools.soaking.ledger import Stretch
from tools.soaking.nodes import MachineJob, started
from tools.soaking.program import STOP_AT

_STRETCH_SECONDS = 600.0


def replay(
    model: MachineJob, stretches: Sequence[Stretch], folder: Path, say: Callable[[str], None]
) -> list[MachineJob]:
    """The jobs in order; the last one has the final checkpoint. Raises SoakFailed if one fails."""
    jobs: list[MachineJob] = []
    for number, stretch in enumerate(stretches):
        is_last = number + 1 == len(stretches)
        job = _job(model, stretch, folder / f"stretch{number}", is_last)
        what = f"{stretch.world_size} machines, {stretch.start} to {stretch.end}"
        say(f"reference {number + 1} of {len(stretches)}: {what}")
        if jobs:
            _hand_over(newest_checkpoint(jobs[-1], 0), job)
        with started(job) as machines:
            codes = machines.wait(_STRETCH_SECONDS)
        if any(code not in (0, Preempted.exit_code) for code in codes):
            raise SoakFailed(f"a reference run ended with {codes}; see the logs in {job.folder}")
        jobs.append(job)
    return jobs


def _job(model: MachineJob, stretch: Stretch, folder: Path, is_last: bool) -> MachineJob:
    environ = {} if is_last else {STOP_AT: f"{stretch.end[0]}:{stretch.end[1]}"}
    train = tuple(flag for flag in model.train_flags if not flag.startswith("--checkpoint"))
    return replace(
        model,
        folder=folder,
        nodes=model.nodes[: stretch.world_size],
        launch_flags=(),
        train_flags=(*train, "--resume"),
        environ=environ,
    )


def _hand_over(checkpoint: Path, job: MachineJob) -> None:
    shutil.copytree(checkpoint, job.output(job.nodes[0]) / "checkpoints" / checkpoint.name)


def newest_checkpoint(job: MachineJob, node: int) -> Path:
    """The newest checkpoint. Raises SoakFailed if there is none."""
    found = [path for path in (job.output(node) / "checkpoints").glob("step-*") if (path / "complete.json").is_file()]
    if not found:
        raise SoakFailed(f"there is no checkpoint in {job.output(node)}")
    return max(found, key=lambda path: (path / "complete.json").stat().st_mtime_ns)
