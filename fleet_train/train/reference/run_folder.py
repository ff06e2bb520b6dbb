"""Decides whether a run starts or continues, and prevents two runs in one folder."""

from __future__ import annotations

import os
from pathlib import Path

from fleet_train import fleet
from fleet_train.cluster.environment import attempt, launched_job
from fleet_train.errors import CheckpointError, ScheduleMismatch
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, Found
from fleet_train.train.components.rank0 import ask_first_worker
from fleet_train.train.metrics import replaced_logs
from fleet_train.train.reference.config import TrainConfig

# Another value of these means another run: its tensors or its random streams would not fit.
_FIXED_FOR_A_RUN = ("model", "data", "image_size", "augment", "optimizer", "seed")
# May differ between machines, or is compared elsewhere (the strategy: by its knobs).
_EACH_MACHINES_OWN = {
    "data_dir",
    "output_dir",
    "strategy",
    "loader",
    "workers",
    "prefetch_depth",
    "prometheus_port",
    "prometheus_host",
}


def agree_on_flags(config: TrainConfig) -> None:
    """Raise ScheduleMismatch on every rank, naming the first flag that differs: a command is typed on each machine."""
    mine = {name: value for name, value in config.as_json().items() if name not in _EACH_MACHINES_OWN}
    everybody, endpoints = fleet.gather(mine), fleet.worker_endpoints()
    for name, value in everybody[0].items():
        for rank, flags in enumerate(everybody):
            if flags.get(name) != value:
                flag = {"learning_rate": "lr"}.get(name, name)
                raise ScheduleMismatch(
                    f"--{flag} is {value} on rank 0 ({endpoints[0]}) and {flags.get(name)} on rank {rank} "
                    f"({endpoints[rank]}): give all machines the same flags"
                )


def start_or_resume(config: TrainConfig, checkpoints: Checkpoints) -> Found | None:
    """The checkpoint to continue from, or None for a fresh start; refuses to mix two runs in one folder.

    A job restarted by the launcher continues as with --resume, whatever its command says, but only from its own
    checkpoints: an attempt may have ended before it removed an earlier run. CheckpointError if the folder, or its
    `checkpoints`, cannot be one: a file, or a link to an unmounted disk; if nothing can be written there; if another
    run uses it. What --overwrite replaces stays until the first checkpoint of the new run.
    """
    output = config.output_path
    ask_first_worker(lambda: _make_folder(output))
    checkpoints.claim()
    ask_first_worker(lambda: replaced_logs.restore(output))
    if config.resume or attempt(os.environ) > 0:
        found = checkpoints.newest()
        if found is None:
            return None
        if config.resume or found.run_id == launched_job(os.environ) or not launched_job(os.environ):
            _check_same_run(config, found)
            return found
    holders = checkpoints.holders()
    if holders and not config.overwrite:
        where = "" if holders[0].partition(" (")[0] == "rank 0" else f" on {', '.join(holders)}"
        raise CheckpointError(
            f"{config.output_dir} holds checkpoints of an earlier run{where}; continue it with --resume, "
            "start again with --overwrite (replaces them), or give another --output_dir"
        )
    if holders:
        ask_first_worker(lambda: replaced_logs.keep(output))
    checkpoints.start_new_run(lambda: replaced_logs.forget(output))
    return None


def _make_folder(output: Path) -> None:
    for path in (*reversed(output.parents), output):
        storage.refuse_no_folder(path)
    output.mkdir(parents=True, exist_ok=True)


def _check_same_run(config: TrainConfig, found: Found) -> None:
    for name in _FIXED_FOR_A_RUN:
        was, given = found.state.config.get(name), getattr(config, name)
        if was != given:
            raise CheckpointError(
                f"{found.folder} was written with --{name} {was}, now --{name} {given} is given; "
                f"resume with --{name} {was}, or start again in another --output_dir"
            )
