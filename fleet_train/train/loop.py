"""The training loop: `Trainer.fit` is the whole story, what it calls is below it or in a module of its own."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.data import BatchLoader, Dataset
from fleet_train.data.datasets import Arrays
from fleet_train.errors import FleetTrainError
from fleet_train.train.checkpoint import Checkpoints, TrainState
from fleet_train.train.config import TrainConfig
from fleet_train.train.evaluate import evaluate
from fleet_train.train.meter import StepMeter
from fleet_train.train.metrics import MetricSink
from fleet_train.train.programs import Programs
from fleet_train.train.progress import Progress
from fleet_train.train.seeds import stream_seed
from fleet_train.train.versions import versions


@dataclass
class Outcome:
    """What `fit` came to, equal on all ranks except for the speed. NaN where nothing was trained or evaluated."""

    steps: int = 0
    epochs: int = 0
    train_loss: float = math.nan
    """Mean of the fetched losses of the last epoch, over all ranks."""
    test_loss: float = math.nan
    test_accuracy: float = math.nan
    samples: int = 0
    train_seconds: float = 0.0
    checkpoint: Path | None = None

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, of the training steps of this call; evaluation and checkpoints are not in the time."""
        return self.samples / self.train_seconds if self.train_seconds else 0.0


class Trainer:
    """Trains what it is given. Set-up, joining the cluster and clean-up are `job`'s."""

    def __init__(
        self,
        config: TrainConfig,
        exe: Any,
        programs: Programs,
        loader: BatchLoader,
        test_data: Dataset,
        checkpoints: Checkpoints,
        sinks: MetricSink,
        progress: Progress,
    ) -> None:
        self._config = config
        self._exe = exe
        self._programs = programs
        self._loader = loader
        self._test_data = test_data
        self._checkpoints = checkpoints
        self._sinks = sinks
        self._progress = progress
        self._meter: StepMeter[Arrays] = StepMeter(fleet.worker_num())
        self.step = 0
        self.epoch = 0
        self.outcome = Outcome()

    def fit(self) -> Outcome:
        """Train from the current epoch on, evaluate and save as configured; the last epoch always does both."""
        last_epoch = self._last_epoch()
        if self.epoch >= last_epoch:
            self._progress.say(f"nothing left to train: {self.epoch} of {self._config.epochs} epochs are done")
            self._evaluate()
        for epoch in range(self.epoch, last_epoch):
            self._train_epoch(epoch)
            self.epoch = epoch + 1
            if self.epoch == last_epoch or self.epoch % self._config.evaluate_every == 0:
                self._evaluate()
            if self.epoch == last_epoch or self._checkpoint_is_due():
                self.outcome.checkpoint = self._checkpoints.save(self._exe, self.state())
            self._progress.end(self._epoch_line())
        self.outcome.epochs, self.outcome.steps = self.epoch, self.step
        return self.outcome

    def _train_epoch(self, epoch: int) -> None:
        self._progress.begin(epoch, self._config.epochs, len(self._loader), done=0)
        self._meter.restart()
        losses: list[float] = []
        began = time.perf_counter()
        with self._loader.epoch(epoch) as batches:
            for batch in self._meter.timed(batches):
                loss = self._train_step(batch, last=self.step + 1 == (epoch + 1) * len(self._loader))
                self._meter.count(len(batch["labels"]))
                self.outcome.samples += len(batch["labels"]) * fleet.worker_num()
                losses += [] if loss is None else [loss]
                self._report_step(loss)
                self._progress.step(loss)
        self.outcome.train_seconds += time.perf_counter() - began
        self.outcome.train_loss = self._mean_over_ranks(losses)

    def _train_step(self, batch: Arrays, last: bool) -> float | None:
        """One optimizer update; the loss where the profile's fetch_frequency asks for it, and at an epoch's end."""
        fetches = [self._programs.loss] if last or fleet.should_fetch(self.step) else []
        paddle.seed(stream_seed(self._config.seed, fleet.worker_index(), self.step))
        fetched = self._exe.run(fleet.main_program, feed=batch, fetch_list=fetches)
        self._programs.scheduler.step()
        self.step += 1
        if not fetches:
            return None
        loss = float(fetched[0].item())
        if not math.isfinite(loss):
            raise FleetTrainError(
                f"the loss of rank {fleet.worker_index()} is {loss} at step {self.step}; the last checkpoint is "
                f"untouched. Try a lower --lr (now {self._programs.scheduler.get_lr():g}) or a warm-up"
            )
        return loss

    def _report_step(self, loss: float | None) -> None:
        if loss is None or self._meter.steps < self._config.log_every:
            return
        speed = self._meter.read()
        self._meter.restart()
        scalars = {
            "train/loss": loss,
            "train/learning_rate": float(self._programs.scheduler.get_lr()),
            "speed/samples_per_second": speed.samples_per_second,
            "speed/step_ms": speed.step_ms,
            "speed/data_wait_share": speed.data_wait_share,
        }
        self._sinks.write(self.step, {"epoch": self.epoch, **scalars})

    def _evaluate(self) -> None:
        fleet.synchronize_parameters()  # LocalSGD lets the ranks drift between averagings
        result = evaluate(self._exe, self._programs, self._test_data, self._config.batch_size)
        self.outcome.test_loss, self.outcome.test_accuracy = result.loss, result.accuracy
        scalars = {
            "test/loss": result.loss,
            "test/accuracy": result.accuracy,
            "train/epoch_loss": self.outcome.train_loss,
        }
        self._sinks.write(self.step, {"epoch": self.epoch, **scalars})

    def _mean_over_ranks(self, losses: list[float]) -> float:
        total, count = fleet.all_reduce(np.array([sum(losses), len(losses)], dtype=np.float64), op="sum")
        return float(total / count) if count else math.nan

    def _last_epoch(self) -> int:
        """The epoch (counted from 1) at which this call stops."""
        limit = self._config.stop_after_epochs
        return self._config.epochs if limit is None else min(self._config.epochs, self.epoch + limit)

    def _checkpoint_is_due(self) -> bool:
        every = self._config.checkpoint_every
        return every > 0 and self.epoch % every == 0

    def _epoch_line(self) -> str:
        outcome = self.outcome
        accuracy = "" if math.isnan(outcome.test_accuracy) else f"  test accuracy {outcome.test_accuracy:.4f}"
        return f"train loss {outcome.train_loss:.4f}{accuracy}  {outcome.samples_per_second:.0f} samples/s"

    def state(self) -> TrainState:
        """What a checkpoint holds beside the tensors."""
        profile = fleet.profile()
        return TrainState(
            epoch=self.epoch,
            step=self.step,
            steps_per_epoch=len(self._loader),
            world_size=fleet.worker_num(),
            scheduler=self._programs.scheduler.state_dict(),
            config=self._config.as_json(),
            profile={"name": profile.name, "digest": profile.digest()},
            versions=versions(),
        )
