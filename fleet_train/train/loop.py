"""The training loop for any static program: `Trainer.fit` is the whole story, what it calls is below it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.data.datasets import Arrays
from fleet_train.errors import FleetTrainError
from fleet_train.train.checkpoint import Checkpoints, Found, TrainState
from fleet_train.train.evaluate import Evaluator
from fleet_train.train.meter import StepMeter
from fleet_train.train.metrics import MetricSink, NullSink
from fleet_train.train.progress import Progress, SilentProgress
from fleet_train.train.seeds import stream_seed
from fleet_train.train.settings import TrainerSettings
from fleet_train.train.versions import versions


class Loader(Protocol):
    """This rank's batches. Every rank has the same number of them, each of the same size on all ranks."""

    def __len__(self) -> int:
        """Steps of the epoch."""

    def epoch(self, epoch: int) -> AbstractContextManager[Any]:
        """A context in which the feeds (name -> array, samples first) of that epoch can be iterated over."""


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
    """Trains the program that `fleet.distributed_optimizer(...).minimize(loss)` has made. All ranks call it.

    Args:
        exe: an executor on `fleet.place()` on which the startup program has run.
        loss: value of the training program with one element; fetched as the profile's `fetch_frequency` says.
        loader: this rank's batches, as feeds of the training program.
        settings: how long, how often.
        scheduler: the learning-rate schedule (`paddle.optimizer.lr`), stepped after every step; None = constant.
        evaluator: called every `evaluate_every` epochs; None = no evaluation.
        checkpoints: where they go; None = nothing is saved.
        sinks: where the numbers go (on the reporting rank).
        progress: what a person sees (on the reporting rank).
        description: JSON values that a checkpoint keeps to tell runs apart, such as the model's name.
    """

    def __init__(
        self,
        exe: Any,
        loss: Any,
        loader: Loader,
        settings: TrainerSettings,
        *,
        scheduler: Any = None,
        evaluator: Evaluator | None = None,
        checkpoints: Checkpoints | None = None,
        sinks: MetricSink | None = None,
        progress: Progress | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self._exe = exe
        self._loss = loss
        self._loader = loader
        self._settings = settings
        self._scheduler = scheduler
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self._sinks = sinks or NullSink()
        self._progress = progress or SilentProgress()
        self._description = dict(description or {})
        self._meter: StepMeter[Arrays] = StepMeter(fleet.worker_num())
        self.step = 0
        self.epoch = 0
        self.outcome = Outcome()

    def fit(self) -> Outcome:
        """Train from the current epoch on, evaluate and save as configured; the last epoch always does both."""
        last_epoch = self._last_epoch()
        if self.epoch >= last_epoch:
            self._progress.say(f"nothing left to train: {self.epoch} of {self._settings.epochs} epochs are done")
            self._evaluate()
        while self.epoch < last_epoch:
            self._train_epoch()
            if self.epoch == last_epoch or self.epoch % self._settings.evaluate_every == 0:
                self._evaluate()
            if self.epoch == last_epoch or self._checkpoint_is_due():
                self._save()
            self._progress.end(self._epoch_line())
        self.outcome.epochs, self.outcome.steps = self.epoch, self.step
        return self.outcome

    def _train_epoch(self) -> None:
        steps = len(self._loader)
        self._progress.begin(self.epoch, self._settings.epochs, steps, done=0)
        self._meter.restart()
        losses: list[float] = []
        began = time.perf_counter()
        with self._loader.epoch(self.epoch) as batches:
            for batch in self._meter.timed(batches):
                loss = self._train_step(batch, last=self.step + 1 == (self.epoch + 1) * steps)
                samples = len(next(iter(batch.values())))
                self._meter.count(samples)
                self.outcome.samples += samples * fleet.worker_num()
                losses += [] if loss is None else [loss]
                self._report_step(loss)
                self._progress.step(loss)
        self.outcome.train_seconds += time.perf_counter() - began
        self.outcome.train_loss = _mean_over_ranks(losses)
        self.epoch += 1

    def _train_step(self, batch: Arrays, last: bool) -> float | None:
        """One optimizer update; the loss where the profile's fetch_frequency asks for it, and at an epoch's end."""
        fetches = [self._loss] if last or fleet.should_fetch(self.step) else []
        paddle.seed(stream_seed(self._settings.seed, fleet.worker_index(), self.step))
        fetched = self._exe.run(fleet.main_program, feed=batch, fetch_list=fetches)
        self.step += 1
        if self._scheduler is not None:
            self._scheduler.step()
        return self._finite(fetched[0].item()) if fetches else None

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            rate = "" if self._scheduler is None else f" (now {self._scheduler.get_lr():g})"
            raise FleetTrainError(
                f"the loss of rank {fleet.worker_index()} is {loss} at step {self.step}; the last checkpoint is "
                f"untouched. Try a lower learning rate{rate} or a warm-up"
            )
        return float(loss)

    def _report_step(self, loss: float | None) -> None:
        if loss is None or self._meter.steps < self._settings.log_every:
            return
        speed = self._meter.read()
        self._meter.restart()
        scalars = {
            "train/loss": loss,
            "speed/samples_per_second": speed.samples_per_second,
            "speed/step_ms": speed.step_ms,
            "speed/data_wait_share": speed.data_wait_share,
        }
        if self._scheduler is not None:
            scalars["train/learning_rate"] = float(self._scheduler.get_lr())
        self._sinks.write(self.step, {"epoch": self.epoch, **scalars})

    def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        fleet.synchronize_parameters()  # LocalSGD lets the ranks drift between averagings
        result = self._evaluator(self._exe)
        self.outcome.test_loss, self.outcome.test_accuracy = result.loss, result.accuracy
        scalars = {f"test/{name}": value for name, value in result.values.items()}
        self._sinks.write(self.step, {"epoch": self.epoch, **scalars, "train/epoch_loss": self.outcome.train_loss})

    def _save(self) -> None:
        if self._checkpoints is not None:
            saved = self._checkpoints.save(self._exe, self.state(), score=self.outcome.test_accuracy)
            self.outcome.checkpoint = saved or self.outcome.checkpoint

    def _last_epoch(self) -> int:
        """The epoch (counted from 1) at which this call stops."""
        limit = self._settings.stop_after_epochs
        return self._settings.epochs if limit is None else min(self._settings.epochs, self.epoch + limit)

    def _checkpoint_is_due(self) -> bool:
        every = self._settings.checkpoint_every
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
            scheduler={} if self._scheduler is None else self._scheduler.state_dict(),
            config=self._description,
            profile={"name": profile.name, "digest": profile.digest()},
            versions=versions(),
        )

    def resume(self, found: Found) -> None:
        """Go on from a checkpoint: tensors into the scope, the position and the learning rate to where they were."""
        assert self._checkpoints is not None, "a trainer without checkpoints has none to resume from"
        self._checkpoints.load(self._exe, found)
        self.epoch, self.step = found.state.epoch, first_step(found, len(self._loader))
        self.outcome.checkpoint = found.folder
        if self._scheduler is not None:
            self._scheduler.set_state_dict(found.state.scheduler)
            # Computed anew from the step: the same value for the same run, and right if epochs or ranks have changed.
            self._scheduler.step(self.step)
        self._progress.say(f"resumed from {found.folder} (epoch {self.epoch}, step {self.step})")
        if found.state.profile["digest"] != fleet.profile().digest():
            was, now = found.state.profile["name"], fleet.profile().name
            self._progress.say(f"note: profile was {was}, now {now} with other values")


def first_step(found: Found | None, steps_per_epoch: int) -> int:
    """The step at which a call begins. On another number of ranks an epoch has another number of steps."""
    return 0 if found is None else found.state.epoch * steps_per_epoch


def _mean_over_ranks(losses: list[float]) -> float:
    total, count = fleet.all_reduce(np.array([sum(losses), len(losses)], dtype=np.float64), op="sum")
    return float(total / count) if count else math.nan
