"""A run's summary: one line before it, one file and two lines after it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fleet_train import fleet
from fleet_train.files import publish_where_linked
from fleet_train.train.components.versions import versions
from fleet_train.train.metrics.console import Progress
from fleet_train.train.outcome import Outcome
from fleet_train.train.reference.config import TrainConfig


def headline(config: TrainConfig, batches_per_epoch: int) -> str:
    """What will be trained, on which data, and with which learning rate."""
    ranks, rate = fleet.worker_num(), config.peak_learning_rate(fleet.worker_num())
    scaled = f" (scaled by {ranks} ranks)" if config.scale_lr and ranks > 1 else ""
    return (
        f"{config.model} on {config.data_name}: {ranks} rank(s) on {fleet.node_num()} node(s), "
        f"profile {fleet.profile().name}, global batch {global_batch_size(config)}, "
        f"{_steps(batches_per_epoch)} per epoch, "
        f"{config.optimizer} with learning rate {rate:g}{scaled}, {config.lr_schedule}"
    )


def _steps(batches: int) -> str:
    merged = fleet.profile().accumulate_steps
    if merged == 1:
        return f"{batches} steps"
    return f"{batches / merged:g} steps of {merged} micro-batches"


def global_batch_size(config: TrainConfig) -> int:
    """Samples of one update, over all ranks and micro-batches."""
    return config.batch_size * fleet.profile().accumulate_steps * fleet.worker_num()


def summarize(config: TrainConfig, outcome: Outcome, corrupt_images: int, seconds: float) -> dict[str, Any]:
    """The content of summary.json; `seconds` is the whole job's time."""
    ranks = fleet.worker_num()
    profile = fleet.profile()
    return {
        "world_size": ranks,
        "num_nodes": fleet.node_num(),
        "steps": outcome.steps,
        "epochs": outcome.epochs,
        "train_loss": _or_none(outcome.train_loss),
        **_evaluated(outcome),
        "samples_per_second": round(outcome.samples_per_second, 1),
        "seconds": round(seconds, 2),
        "train_seconds": round(outcome.train_seconds, 2),
        "model": config.model,
        "data": config.data_name,
        "profile": profile.name,
        "profile_digest": profile.digest(),
        "optimizer": config.optimizer,
        "learning_rate": config.peak_learning_rate(ranks),
        "batch_size_per_rank": config.batch_size,
        "global_batch_size": global_batch_size(config),
        "seed": config.seed,
        "corrupt_images": corrupt_images,
        "skipped_updates": outcome.skipped_updates,
        "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
        "versions": versions(),
    }


def publish_summary(output: Path, summary: dict[str, Any]) -> None:
    """Write summary.json atomically."""
    publish_where_linked(output / "summary.json", f"{json.dumps(summary, indent=2)}\n".encode())


def say_results(progress: Progress, config: TrainConfig, summary: dict[str, Any]) -> None:
    if summary["corrupt_images"]:
        progress.say(f"note: {summary['corrupt_images']} images could not be read and were replaced by others")
    progress.say(
        f"done: test accuracy {summary['test_accuracy']:.4f}, {summary['steps']} steps, "
        f"{summary['samples_per_second']:.0f} samples/s, {summary['seconds']:.1f} s"
    )
    progress.say(f"checkpoint {summary['checkpoint']}, summary {config.output_path / 'summary.json'}")


def _evaluated(outcome: Outcome) -> dict[str, float | None]:
    """test_loss, test_accuracy, and test_top5_accuracy if there are more than five classes."""
    values = {} if outcome.evaluation is None else outcome.evaluation.values
    return {
        f"test_{name}": _or_none(value) for name, value in {"loss": math.nan, "accuracy": math.nan, **values}.items()
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
