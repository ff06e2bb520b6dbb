"""One training job from joining the cluster to summary.json: named steps, each of them short."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import paddle

from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.data import BatchLoader, Dataset, ShardedBatchSampler, augmentation, load_splits
from fleet_train.errors import CheckpointError, DataError
from fleet_train.train.agree import ask_first_worker
from fleet_train.train.checkpoint import Checkpoints, Found
from fleet_train.train.config import TrainConfig
from fleet_train.train.loop import Outcome, Trainer
from fleet_train.train.metrics import open_sinks
from fleet_train.train.programs import Programs, build_programs
from fleet_train.train.progress import Progress, make_progress
from fleet_train.train.schedules import Schedule
from fleet_train.train.seeds import seed_process
from fleet_train.train.versions import versions

# Another value of these means another run: its tensors or its random streams would not fit.
_FIXED_FOR_A_RUN = ("model", "data", "augment", "optimizer", "seed")


def run(config: TrainConfig) -> dict[str, Any]:
    """Train as configured on all ranks of the cluster that the environment describes; returns the summary."""
    began = time.perf_counter()
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    progress = make_progress(fleet.is_first_worker())
    checkpoints = Checkpoints(config.output_path, config.keep_checkpoints)
    found = _start_or_resume(config, checkpoints)

    seed_process(config.seed, fleet.worker_index())
    train_data, test_data = load_splits(config.data)
    loader = _make_loader(config, train_data)
    programs, exe = _make_programs(config, train_data, len(loader))
    sinks = open_sinks(config.output_path, fleet.is_first_worker(), _first_step(found, len(loader)))
    try:
        trainer = Trainer(config, exe, programs, loader, test_data, checkpoints, sinks, progress)
        progress.say(_headline(config, loader))
        if found is not None:
            _restore(trainer, found, programs, checkpoints, exe, len(loader), progress)
        outcome = trainer.fit()
    finally:
        sinks.close()
    summary = _summary(config, outcome, time.perf_counter() - began)
    ask_first_worker(lambda: _publish_summary(config.output_path, summary))
    _say_results(progress, config, summary)
    fleet.shutdown()
    return summary


def convert_only(config: TrainConfig) -> None:
    """Join and convert the configured model, and stop there: for planning."""
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    train_data, _ = load_splits(config.data)
    _make_programs(config, train_data, steps_per_epoch=1)


def _start_or_resume(config: TrainConfig, checkpoints: Checkpoints) -> Found | None:
    """The checkpoint to go on from, or None for a fresh start; refuses to mix two runs in one folder."""
    ask_first_worker(lambda: config.output_path.mkdir(parents=True, exist_ok=True))
    if config.resume:
        found = checkpoints.newest()
        if found is not None:
            _check_same_run(config, found)
        return found
    if checkpoints.exist() and not config.overwrite:
        raise CheckpointError(
            f"{config.output_dir} holds checkpoints of an earlier run; go on with it by --resume, "
            "start anew by --overwrite (deletes them), or give another --output_dir"
        )
    ask_first_worker(lambda: shutil.rmtree(checkpoints.folder, ignore_errors=True))
    return None


def _check_same_run(config: TrainConfig, found: Found) -> None:
    for name in _FIXED_FOR_A_RUN:
        was, given = found.state.config.get(name), getattr(config, name)
        if was != given:
            raise CheckpointError(
                f"{found.folder} was written with --{name} {was}, now --{name} {given} is given; "
                f"resume with --{name} {was}, or start anew in another --output_dir"
            )


def _make_loader(config: TrainConfig, data: Dataset) -> BatchLoader:
    # Every rank is given the same seed: the order is global, the rank only picks its share of it.
    sampler = ShardedBatchSampler(
        data.num_samples, config.batch_size, fleet.worker_index(), fleet.worker_num(), seed=config.seed
    )
    if len(sampler) == 0:
        raise DataError(f"{data.name} has {data.num_samples} samples, too few for one step on every rank")
    return BatchLoader(data, sampler, augmentation(config.augment))


def _make_programs(config: TrainConfig, data: Dataset, steps_per_epoch: int) -> tuple[Programs, Any]:
    """The converted programs and an executor on which the startup program has run."""
    schedule = Schedule(
        config.lr_schedule,
        total_steps=config.epochs * steps_per_epoch,
        warmup_steps=round(config.warmup_epochs * steps_per_epoch),
    )
    strategy = None if config.strategy is None else DistributedStrategy.from_profile(config.strategy)
    programs = build_programs(config, data, schedule, fleet.worker_num(), strategy)
    paddle.seed(config.seed)
    exe = paddle.static.Executor(fleet.place())
    exe.run(programs.startup)
    return programs, exe


def _first_step(found: Found | None, steps_per_epoch: int) -> int:
    """The step at which this call begins. On another number of ranks an epoch has another number of steps."""
    return 0 if found is None else found.state.epoch * steps_per_epoch


def _restore(
    trainer: Trainer,
    found: Found,
    programs: Programs,
    checkpoints: Checkpoints,
    exe: Any,
    steps_per_epoch: int,
    progress: Progress,
) -> None:
    checkpoints.load(exe, found)
    trainer.epoch, trainer.step = found.state.epoch, _first_step(found, steps_per_epoch)
    trainer.outcome.checkpoint = found.folder
    programs.scheduler.set_state_dict(found.state.scheduler)
    # Computed anew from the step: the same value for the same run, and right if --epochs or the ranks have changed.
    programs.scheduler.step(trainer.step)
    progress.say(f"resumed from {found.folder} (epoch {found.state.epoch}, step {trainer.step})")
    if found.state.profile["digest"] != fleet.profile().digest():
        progress.say(f"note: profile was {found.state.profile['name']}, now {fleet.profile().name} with other values")


def _headline(config: TrainConfig, loader: BatchLoader) -> str:
    ranks, rate = fleet.worker_num(), config.peak_learning_rate(fleet.worker_num())
    scaled = f" (scaled by {ranks} ranks)" if config.scale_lr and ranks > 1 else ""
    return (
        f"{config.model} on {config.data}: {ranks} rank(s) on {fleet.node_num()} node(s), "
        f"profile {fleet.profile().name}, global batch {config.batch_size * ranks}, {len(loader)} steps per epoch, "
        f"{config.optimizer} with learning rate {rate:g}{scaled}, {config.lr_schedule}"
    )


def _summary(config: TrainConfig, outcome: Outcome, seconds: float) -> dict[str, Any]:
    ranks = fleet.worker_num()
    profile = fleet.profile()
    return {
        "world_size": ranks,
        "num_nodes": fleet.node_num(),
        "steps": outcome.steps,
        "epochs": outcome.epochs,
        "train_loss": _or_none(outcome.train_loss),
        "test_loss": _or_none(outcome.test_loss),
        "test_accuracy": _or_none(outcome.test_accuracy),
        "samples_per_second": round(outcome.samples_per_second, 1),
        "seconds": round(seconds, 2),
        "train_seconds": round(outcome.train_seconds, 2),
        "model": config.model,
        "data": config.data,
        "profile": profile.name,
        "profile_digest": profile.digest(),
        "optimizer": config.optimizer,
        "learning_rate": config.peak_learning_rate(ranks),
        "batch_size_per_rank": config.batch_size,
        "global_batch_size": config.batch_size * ranks,
        "seed": config.seed,
        "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
        "versions": versions(),
    }


def _publish_summary(output: Path, summary: dict[str, Any]) -> None:
    draft = output / ".summary.json"
    draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, output / "summary.json")


def _say_results(progress: Progress, config: TrainConfig, summary: dict[str, Any]) -> None:
    progress.say(
        f"done: test accuracy {summary['test_accuracy']:.4f}, {summary['steps']} steps, "
        f"{summary['samples_per_second']:.0f} samples/s, {summary['seconds']:.1f} s"
    )
    progress.say(f"checkpoint {summary['checkpoint']}, summary {config.output_path / 'summary.json'}")


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
