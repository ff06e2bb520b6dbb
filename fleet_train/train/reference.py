"""The reference trainer: one job from joining the cluster to summary.json, a user of `Trainer` like any other.

It decides whether a run starts or continues, and prevents two runs in one folder.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import paddle

from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.cluster.environment import attempt, launched_job, log_folder
from fleet_train.cluster.flight.trace import read_steps
from fleet_train.data import (
    Dataset,
    ImageSettings,
    Loader,
    Participant,
    Splits,
    make_evaluation_loader,
    make_loader,
    open_splits,
    settle,
)
from fleet_train.errors import CheckpointError, ScheduleMismatch
from fleet_train.files import publish_where_linked
from fleet_train.train import metrics
from fleet_train.train.agree import ask_first_worker
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, StoredCheckpoint
from fleet_train.train.checkpoint.position import versions
from fleet_train.train.config import TrainConfig
from fleet_train.train.evaluation import Outcome, ProgramEvaluator
from fleet_train.train.metrics import MetricSink, NullSink, TeeSink, open_sinks
from fleet_train.train.numerics import seed_process, use_deterministic_kernels
from fleet_train.train.programs import Programs, build_programs
from fleet_train.train.progress import Progress, make_progress
from fleet_train.train.trainer import Trainer

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


def run(config: TrainConfig) -> dict[str, Any]:
    """Train as configured on all ranks of the cluster that the environment describes; returns the summary."""
    began = time.perf_counter()
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    agree_on_flags(config)
    if config.trace:
        fleet.trace(*read_steps(config.trace), path=log_folder(os.environ) or config.output_path)
    progress = make_progress(fleet.is_first_worker())
    with closing(_prometheus(config, progress)) as prometheus:
        summary = _train(config, progress, prometheus, began)
    fleet.shutdown()
    return summary


def _prometheus(config: TrainConfig, progress: Progress) -> MetricSink:
    if config.prometheus_port is None:
        return NullSink()
    from fleet_train.train.prometheus_sink import PrometheusSink, open_prometheus

    opened = open_prometheus(config.prometheus_port, config.prometheus_host)
    if isinstance(opened, PrometheusSink):
        progress.say(f"metrics for Prometheus: {opened.address}")
    return opened


def _train(config: TrainConfig, progress: Progress, prometheus: MetricSink, began: float) -> dict[str, Any]:
    checkpoints = Checkpoints(
        config.output_path,
        config.keep_checkpoints,
        keep_best=config.keep_best,
        background=config.background_checkpoints,
        timeout_seconds=config.checkpoint_timeout,
        copies=config.checkpoint_copies,
        say=progress.say,
    )
    checkpoint = start_or_resume(config, checkpoints)

    seed_process(config.seed, fleet.worker_index())
    if config.deterministic:
        progress.say(f"deterministic kernels: {', '.join(use_deterministic_kernels()) or 'all of this build are'}")
    train, test, batches_per_epoch = _open_loaders(config)
    programs, exe = _make_programs(config, train.dataset, batches_per_epoch)
    first_step = 0 if checkpoint is None else checkpoint.state.recorded_step
    sinks = TeeSink([_open_sinks(config, first_step), prometheus])
    try:
        trainer = Trainer(
            exe,
            programs.loss,
            train,
            config,
            scheduler=programs.scheduler,
            evaluator=ProgramEvaluator(
                programs.evaluation, programs.evaluation_sums, test, programs.confusion, programs.probabilities
            ),
            checkpoints=checkpoints,
            average=programs.average,
            skipping=programs.skipping,
            gradient_norm=programs.gradient_norm,
            sinks=sinks,
            progress=progress,
            description={**config.as_json(), "peak_learning_rate": config.peak_learning_rate(fleet.worker_num())},
        )
        progress.say(headline(config, batches_per_epoch))
        progress.say(where_it_saves(config))
        if checkpoint is not None:
            trainer.resume(checkpoint)
        outcome = trainer.fit()
        corrupt = [loader.corrupt.names for loader in (train, test) if loader.corrupt is not None]
        corrupt_images = len({name for names in fleet.gather(corrupt) for part in names for name in part})
    finally:
        train.close()
        test.close()
        sinks.close()
        checkpoints.close()
    summary = summarize(config, outcome, corrupt_images, time.perf_counter() - began)
    ask_first_worker(lambda: publish_summary(config.output_path, summary))
    show_results(progress, config, summary)
    return summary


def _open_sinks(config: TrainConfig, first_step: int) -> MetricSink:
    """Open the run's sinks. Raises CheckpointError on every rank if rank 0 cannot write there."""
    opened: list[MetricSink] = []
    ask_first_worker(lambda: opened.append(open_sinks(config.output_path, reporting=True, resume_step=first_step)))
    return opened[0] if opened else NullSink()


def convert_only(config: TrainConfig) -> None:
    """Join and convert the configured model, and stop there: for planning."""
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    _make_programs(config, open_data(config).train, batches_per_epoch=1)


def _make_programs(config: TrainConfig, data: Dataset, batches_per_epoch: int) -> tuple[Programs, Any]:
    """The converted programs and an executor on which the startup program has run."""
    strategy = None if config.strategy is None else DistributedStrategy.from_profile(config.strategy)
    programs = build_programs(config, data, config.schedule(batches_per_epoch), fleet.worker_num(), strategy)
    paddle.seed(config.seed)
    exe = paddle.static.Executor(fleet.place())
    exe.run(programs.startup)
    return programs, exe


def open_data(config: TrainConfig) -> Splits:
    """The configured training and test data."""
    images = ImageSettings(image_size=config.image_size)
    return open_splits(config.data, config.data_dir, images=images, max_corrupt=config.max_corrupt)


def _open_loaders(config: TrainConfig) -> tuple[Loader, Loader, int]:
    """Loaders of this rank's share for training and testing, and the batches of an epoch. To be closed: they may have
    processes. DataError on every rank if the ranks' data is inconsistent.
    """
    splits = open_data(config)
    participant = Participant.of(fleet.worker_index(), fleet.worker_endpoints())
    train = make_loader(splits.train, config, participant, fleet.place())
    test = make_evaluation_loader(splits.test, config, participant, fleet.place())
    return train, test, settle(train, fleet.gather)


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


def where_it_saves(config: TrainConfig) -> str:
    every, steps = config.checkpoint_every, config.checkpoint_every_steps
    times = ["after every epoch" if every == 1 else f"every {every} epochs"] * (every > 0)
    times += [f"every {steps} steps"] * (steps > 0) + ["at the end"] * (every != 1)
    return f"saves to {config.output_dir} (--output_dir) {', '.join(times)}, and when it is asked to stop (Ctrl-C)"


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
        "batch_shares": [round(share, 4) for share in fleet.batch_shares()],
        "seed": config.seed,
        "corrupt_images": corrupt_images,
        "skipped_updates": outcome.skipped_updates,
        "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
        "versions": versions(),
    }


def publish_summary(output: Path, summary: dict[str, Any]) -> None:
    """Write summary.json atomically."""
    publish_where_linked(output / "summary.json", f"{json.dumps(summary, indent=2)}\n".encode())


def show_results(progress: Progress, config: TrainConfig, summary: dict[str, Any]) -> None:
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


def agree_on_flags(config: TrainConfig) -> None:
    """Raise ScheduleMismatch on every rank, naming the first flag that differs: a command is typed on each machine."""
    mine = {name: value for name, value in config.as_json().items() if name not in _EACH_MACHINES_OWN}
    flags_by_rank, endpoints = fleet.gather(mine), fleet.worker_endpoints()
    for name, value in flags_by_rank[0].items():
        for rank, flags in enumerate(flags_by_rank):
            if flags.get(name) != value:
                flag = {"learning_rate": "lr"}.get(name, name)
                raise ScheduleMismatch(
                    f"--{flag} is {value} on rank 0 ({endpoints[0]}) and {flags.get(name)} on rank {rank} "
                    f"({endpoints[rank]}): give all machines the same flags"
                )


def start_or_resume(config: TrainConfig, checkpoints: Checkpoints) -> StoredCheckpoint | None:
    """The checkpoint to continue from, or None for a fresh start; refuses to mix two runs in one folder.

    A job restarted by the launcher continues as with --resume, whatever its command says, but only from its own
    checkpoints: an attempt may have ended before it removed an earlier run. CheckpointError if the folder, or its
    `checkpoints`, cannot be one: a file, or a link to an unmounted disk; if nothing can be written there; if another
    run uses it. What --overwrite replaces stays until the first checkpoint of the new run.
    """
    output = config.output_path
    ask_first_worker(lambda: _make_folder(output))
    checkpoints.claim()
    ask_first_worker(lambda: metrics.restore_logs(output))
    if config.resume or attempt(os.environ) > 0:
        checkpoint = checkpoints.newest()
        if checkpoint is None:
            return None
        if config.resume or checkpoint.run_id == launched_job(os.environ) or not launched_job(os.environ):
            _check_same_run(config, checkpoint)
            return checkpoint
    holders = checkpoints.holders()
    if holders and not config.overwrite:
        where = "" if holders[0].partition(" (")[0] == "rank 0" else f" on {', '.join(holders)}"
        raise CheckpointError(
            f"{config.output_dir} holds checkpoints of an earlier run{where}; continue it with --resume, "
            "start again with --overwrite (replaces them), or give another --output_dir"
        )
    if holders:
        ask_first_worker(lambda: metrics.keep_logs(output))
    checkpoints.start_new_run(lambda: metrics.forget_logs(output))
    return None


def _make_folder(output: Path) -> None:
    for path in (*reversed(output.parents), output):
        storage.refuse_no_folder(path)
    output.mkdir(parents=True, exist_ok=True)


def _check_same_run(config: TrainConfig, checkpoint: StoredCheckpoint) -> None:
    for name in _FIXED_FOR_A_RUN:
        was, given = checkpoint.state.config.get(name), getattr(config, name)
        if was != given:
            raise CheckpointError(
                f"{checkpoint.folder} was written with --{name} {was}, now --{name} {given} is given; "
                f"resume with --{name} {was}, or start again in another --output_dir"
            )
