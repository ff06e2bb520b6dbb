"""The reference trainer: one job from joining the cluster to summary.json, a user of `Trainer` like any other."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import paddle

from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.data import Dataset
from fleet_train.train.checkpoint.manager import Checkpoints
from fleet_train.train.components.evaluation import ProgramEvaluator
from fleet_train.train.components.rank0 import ask_first_worker
from fleet_train.train.components.rng import seed_process, use_deterministic_kernels
from fleet_train.train.metrics.console import Progress, make_progress
from fleet_train.train.metrics.opening import open_sinks
from fleet_train.train.metrics.sinks import MetricSink, NullSink, TeeSink
from fleet_train.train.reference.config import TrainConfig
from fleet_train.train.reference.inputs import open_data, open_inputs
from fleet_train.train.reference.programs import Programs, build_programs
from fleet_train.train.reference.run_folder import agree_on_flags, start_or_resume
from fleet_train.train.reference.summary import headline, publish_summary, say_results, summarize
from fleet_train.train.trainer import Trainer


def run(config: TrainConfig) -> dict[str, Any]:
    """Train as configured on all ranks of the cluster that the environment describes; returns the summary."""
    began = time.perf_counter()
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    agree_on_flags(config)
    progress = make_progress(fleet.is_first_worker())
    with closing(_prometheus(config, progress)) as prometheus:
        summary = _train(config, progress, prometheus, began)
    fleet.shutdown()
    return summary


def _prometheus(config: TrainConfig, progress: Progress) -> MetricSink:
    if config.prometheus_port is None:
        return NullSink()
    from fleet_train.train.metrics.prometheus.sink import PrometheusSink, open_prometheus

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
    found = start_or_resume(config, checkpoints)

    seed_process(config.seed, fleet.worker_index())
    if config.deterministic:
        progress.say(f"deterministic kernels: {', '.join(use_deterministic_kernels()) or 'all of this build are'}")
    inputs = open_inputs(config)
    programs, exe = _make_programs(config, inputs.train.dataset, inputs.batches_per_epoch)
    first_step = 0 if found is None else found.state.recorded_step
    sinks = TeeSink([_open_sinks(config, first_step), prometheus])
    try:
        trainer = Trainer(
            exe,
            programs.loss,
            inputs.train,
            config.trainer_settings(),
            scheduler=programs.scheduler,
            evaluator=ProgramEvaluator(
                programs.evaluation, programs.evaluation_sums, inputs.test, programs.confusion, programs.probabilities
            ),
            checkpoints=checkpoints,
            average=programs.average,
            skipping=programs.skipping,
            gradient_norm=programs.gradient_norm,
            sinks=sinks,
            progress=progress,
            description={**config.as_json(), "peak_learning_rate": config.peak_learning_rate(fleet.worker_num())},
        )
        progress.say(headline(config, inputs.batches_per_epoch))
        if found is not None:
            trainer.resume(found)
        outcome = trainer.fit()
        corrupt_images = inputs.corrupt_images()
    finally:
        inputs.close()
        sinks.close()
        checkpoints.close()
    summary = summarize(config, outcome, corrupt_images, time.perf_counter() - began)
    ask_first_worker(lambda: publish_summary(config.output_path, summary))
    say_results(progress, config, summary)
    return summary


def _open_sinks(config: TrainConfig, first_step: int) -> MetricSink:
    """Raises CheckpointError on every rank if rank 0 cannot write there."""
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
