"""The training loop for any static program: start reading at `Trainer.fit`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

import paddle

from fleet_train import fleet
from fleet_train.cluster.flight.ring import recorder
from fleet_train.convert.session import current_shares
from fleet_train.data import Loader
from fleet_train.data.datasets import Arrays
from fleet_train.errors import CheckpointError
from fleet_train.train import numerics
from fleet_train.train.agree import Dealing, agreed_steps
from fleet_train.train.checkpoint.manager import Checkpoints, StoredCheckpoint, TrainState
from fleet_train.train.checkpoint.position import (
    EpochLoss,
    Position,
    RunData,
    changes_since,
    profile_used,
    resumed,
    steps_of,
    versions,
)
from fleet_train.train.evaluation import Evaluation, Evaluator, Outcome
from fleet_train.train.metrics import MetricSink, UserSink, UserSinks, sinks_of
from fleet_train.train.numerics import WeightAverage, describe_statistics, stream_seed
from fleet_train.train.progress import Progress
from fleet_train.train.reporter import Reporter, StepMeter
from fleet_train.train.settings import TrainerSettings
from fleet_train.train.stopping import listening, preempted


@dataclass
class StepSums:
    """The batches of one step that are in one epoch."""

    samples: int = 0
    """Of all ranks."""
    losses: list[float] = field(default_factory=list)
    """The fetched losses."""
    gradient_norm: float | None = None
    """The gradient norm of the update, if it was fetched."""

    def loss(self) -> float | None:
        return sum(self.losses) / len(self.losses) if self.losses else None

    def scalars(self) -> dict[str, float]:
        return {} if self.gradient_norm is None else {"train/gradient_norm": self.gradient_norm}


class Trainer:
    """Trains the program that `fleet.distributed_optimizer(...).minimize(loss)` has made. All ranks call it.

    Args:
        exe: an executor on `fleet.place()` on which the startup program has run.
        loss: value of the training program with one element; fetched according to the profile's `fetch_frequency`.
        loader: this rank's batches, as feeds of the training program.
        settings: durations and intervals.
        scheduler: the learning-rate schedule (`paddle.optimizer.lr`), stepped after every update; None = constant. A
            resume on another number of ranks calls `scheduler.step(updates)`.
        evaluator: called every `evaluate_every` epochs; None = no evaluation.
        checkpoints: where they go; None = nothing is saved.
        average: the weights' moving average, if the program has one: it is evaluated instead of them.
        skipping: skips updates that are not finite; None = a loss that is not finite ends the training.
        gradient_norm: the result of the optimizer's `gradient_norm()`; fetched for each record. None = not recorded.
        sinks: where the numbers go. A list of objects with `write(step, scalars)` and `close()`: called only on rank 0
        and closed when `fit` ends. Or the result of `open_sinks`, which the caller closes. progress: the progress
        display (on the reporting rank). description: JSON values in checkpoints that distinguish runs, such as the
        model's name.
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
        average: WeightAverage | None = None,
        skipping: numerics.SkipNotFinite | None = None,
        gradient_norm: Any = None,
        sinks: MetricSink | UserSink | Sequence[UserSink] | None = None,
        progress: Progress | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self._exe = exe
        self._loss = loss
        self._norm = gradient_norm
        self._loader = loader
        self._settings = settings
        self._scheduler = scheduler
        self._evaluator = evaluator
        self._average = average
        self._progress = progress or Progress()
        self._sinks = sinks_of(sinks, fleet.is_first_worker())
        self._reporter = Reporter(self._sinks, self._progress, settings.straggler_factor)
        self._description = dict(description or {})
        self._merged = fleet.profile().accumulate_steps
        """Batches of a step."""
        self._meter = StepMeter(batches_per_step=self._merged)
        self._dealing = Dealing(loader)
        self._batches_per_epoch = agreed_steps(len(loader))
        self._data = RunData(loader)
        self._checkpoints = checkpoints
        self._watch = numerics.LossWatch(skipping)
        self._losses = EpochLoss()
        self._of_step = StepSums()
        self._first_step, self._last_step = 0, 0
        """Steps before the current epoch, and including it."""
        self._reported = 0
        """Steps of the current epoch up to the last record."""
        self.position = Position()
        self.outcome = Outcome()

    def fit(self) -> Outcome:
        """Train from the current position on, evaluate and save as configured; the last epoch always does both.

        Raises Preempted after a checkpoint when a stop was requested, NotSaved if the last checkpoint, also that of a
        stop, could not be written, NotFinite for a loss that is NaN or infinite.
        """
        try:
            self._fit()
        finally:
            if isinstance(self._sinks, UserSinks):
                self._sinks.close()
        return self.outcome

    def _fit(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.claim()  # before anything is trained
        last_epoch = self._last_epoch()
        self._show_notes()
        self._reporter.describe(self.position.updates, self._description, self._evaluator is not None)
        if self.position.epoch >= last_epoch:
            done, epochs = self.position.epoch, self._settings.epochs
            self._progress.say(f"nothing left to train: {done} of {epochs} epochs are done")
            self._evaluate()
        with listening(fleet.request_stop):
            while self.position.epoch < last_epoch:
                self._train_epoch()
                is_last = self.position.epoch == last_epoch
                if is_last or self.position.epoch % self._settings.evaluate_every == 0:
                    self._evaluate()
                if is_last or self._is_due_after_epoch():
                    self._save()
                self._progress.end(self.outcome.line())
        self.outcome.epochs, self.outcome.steps = self.position.epoch, self.position.step
        try:
            if self._checkpoints is not None:
                self.outcome.checkpoint = self._checkpoints.finish() or self.outcome.checkpoint
        finally:
            self._reporter.saved(self.position, self._copies_made())

    def _train_epoch(self) -> None:
        """The steps of one epoch, or its remaining steps after a checkpoint in the middle of it."""
        at = self.position
        began = time.perf_counter()
        with self._loader.epoch(at.epoch, at.consumed_samples) as batches:
            left = agreed_steps(len(self._loader))
            self._begin_at_batch((at.epoch + 1) * self._batches_per_epoch - left, left)
            begun, steps = at.step - self._first_step, self._last_step - self._first_step
            self._progress.begin(at.epoch, self._settings.epochs, steps, begun)
            self._meter.restart()
            self._reporter.begin_stretch()
            first = self._first_step
            self._reported = last_reported(begun, self._settings.log_every, lambda i: self._is_fetched(first + i - 1))
            for index, batch in enumerate(islice(self._meter.timed(batches), left)):
                consumed = self._loader.consumed_after(index + 1)
                self._train_batch(index, batch, consumed - at.consumed_samples)
                at.consumed_samples = consumed
                is_last = index + 1 == left
                if at.pending and not is_last:
                    continue
                self._account(self._of_step, is_whole=not at.pending)
                self._of_step = StepSums()
                is_due = not is_last and self._is_due_within(at.step)
                if is_due:
                    self._save()
                self._stop_if_asked(has_saved=is_due)
        self.outcome.train_seconds += time.perf_counter() - began
        self.outcome.train_loss = self._losses.mean()
        self._losses = EpochLoss()
        at.epoch, at.consumed_samples = at.epoch + 1, 0
        if at.epoch < self._settings.epochs and (said := self._dealing.after_epoch()):
            self._progress.say(f"from epoch {at.epoch + 1} on, {said}")

    def _begin_at_batch(self, batch: int, left: int) -> None:
        """The rest of an epoch determines the next batch: a resume on another number of ranks has only a rounded one.
        The schedule is set to it as well, so that a run that is stopped again continues with the same rate.
        """
        at = self.position
        if batch != at.batches:
            step = steps_of(batch, at.pending, self._merged)
            if step != at.step and self._scheduler is not None:
                self._scheduler.step(step)
            at.step, at.batches = step, batch
        self._of_step = StepSums()
        self._first_step = min(at.step, at.epoch * self._batches_per_epoch // self._merged)
        self._last_step = at.step + (at.pending + left) // self._merged

    def _train_batch(self, index: int, batch: Arrays, samples: int) -> None:
        """One run of the training program: a step, or with gradient merge a micro-batch of one. ``samples``: of all
        ranks."""
        at, indices = self.position, self._loader.indices(index)
        is_fetched = at.step + 1 >= self._last_step or self._is_fetched(at.step)
        paddle.seed(stream_seed(self._settings.seed, fleet.worker_index(), at.batches))
        step, pending = at.step + 1, (at.pending + 1) % self._merged
        has_norm = is_fetched and self._norm is not None and not pending and self._begins_record(step)
        wanted = [self._loss, self._norm] if has_norm else [self._loss] if is_fetched else []
        with numerics.naming_batch(indices, batch):
            fetched = self._exe.run(fleet.main_program, feed=batch, fetch_list=wanted)
        at.batches, at.pending = at.batches + 1, pending
        if not at.pending:
            at.step, at.updates = step, at.updates + 1
            if self._scheduler is not None:
                self._scheduler.step()
        self._meter.count(samples)
        self._of_step.samples += samples
        if not is_fetched:
            return
        loss = float(fetched[0].item())
        self._watch.check(loss, step, indices, batch)
        self._of_step.losses.append(loss)
        if has_norm:
            self._of_step.gradient_norm = float(fetched[1].item())

    def _is_fetched(self, step: int) -> bool:
        """Whether the loss is fetched in the step after this many others."""
        return fleet.should_fetch(step) or self._is_due_within(step + 1)

    def _account(self, of_step: StepSums, is_whole: bool) -> None:
        """Count, record and show a step; if not whole: the batches whose update is in the next epoch."""
        loss, samples = of_step.loss(), of_step.samples
        self.outcome.samples += samples
        self._losses.add(loss)
        if not is_whole:
            return
        self._progress.step(loss, samples)
        self._reporter.traced(self.position)
        if loss is None or not self._begins_record(self.position.step):
            return
        self._reported = self.position.step - self._first_step
        rate = None if self._scheduler is None else float(self._scheduler.get_lr())
        more = {**self._copies_made(), **of_step.scalars()}
        joint = fmean(fleet.gather(loss))  # each rank's is its share: the mean is the joint batch's
        self._reporter.interval(self.position, joint, rate, self._meter.read(), more)
        self._meter.restart()

    def _begins_record(self, step: int) -> bool:
        """Whether a record is made after this step of the current epoch, if its loss is fetched."""
        every = self._settings.log_every
        is_short = step == self._last_step and self._reported < every  # an epoch of fewer steps than that
        return is_short or begins_interval(step - self._first_step, self._reported, every)

    def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        fleet.synchronize_parameters()  # values that LocalSGD and batch norm let drift between the ranks
        with self._average.in_place() if self._average is not None else nullcontext(), recorder.event("evaluate"):
            result = self._evaluator(self._exe)
        self.outcome.evaluation = result
        self.outcome.skipped_updates = self._watch.skipped()
        self._reporter.evaluated(self.position, result, self.outcome.train_loss)

    def _is_due_after_epoch(self) -> bool:
        every = self._settings.checkpoint_every
        return (every > 0 and self.position.epoch % every == 0) or self._is_due_within(self.position.step)

    def _is_due_within(self, step: int) -> bool:
        """Whether a checkpoint is due after that step."""
        every = self._settings.checkpoint_every_steps
        return self._checkpoints is not None and every > 0 and step % every == 0

    def _save(self) -> None:
        """Save a checkpoint. Raises NotFinite instead of saving NaN; of a save in the background the next one raises
        it, or the end."""
        if self._checkpoints is not None:
            saved = self._checkpoints.save(self._exe, self._state(), score=_score(self.outcome.evaluation))
            self.outcome.checkpoint = saved or self.outcome.checkpoint

    def _copies_made(self) -> dict[str, float]:
        """The metrics of checkpoints; empty in most jobs."""
        return {} if self._checkpoints is None else self._checkpoints.scalars()

    def _state(self) -> TrainState:
        """What a checkpoint holds in addition to the tensors. All ranks call it."""
        at, losses, profile = self.position, self._losses, fleet.profile()
        of_ranks = fleet.gather([losses.total, losses.count, self._data.done(at)])
        return TrainState(
            epoch=at.epoch,
            step=at.step,
            steps_per_epoch=self._batches_per_epoch,
            world_size=fleet.worker_num(),
            scheduler={} if self._scheduler is None else self._scheduler.state_dict(),
            config=self._description,
            profile=profile_used(),
            versions=versions(),
            consumed_samples=at.consumed_samples,
            epoch_losses=[[total, count] for total, count, _ in of_ranks],
            batches=at.batches,
            pending_batches=at.pending,
            accumulate_steps=profile.accumulate_steps,
            updates=at.updates,
            data=self._data.record(at, [done for _, _, done in of_ranks]),
            compared=profile.divergence_check_steps > 0 or fleet.worker_num() == 1,
            shares=current_shares().record(),
        )

    def _stop_if_asked(self, *, has_saved: bool) -> None:
        """Every rank gets the same answer after the same step, which may have been saved just now."""
        why = fleet.stop_requested()
        if why is not None:
            if not has_saved:
                self._save()
            stopped = preempted(self._checkpoints, self.position.step, why)
            self._reporter.saved(self.position, self._copies_made())
            raise stopped

    def _show_notes(self) -> None:
        note = describe_statistics(fleet.main_program)
        if note is not None:
            self._progress.say(note)
        if self._batches_per_epoch % self._merged:
            self._progress.say(
                f"note: an epoch's {self._batches_per_epoch} batches are not a multiple of "
                f"accumulate_steps={self._merged}: the rest waits for the next epoch's first update, "
                "and is not used at the end of the run"
            )

    def _last_epoch(self) -> int:
        """The epoch (counted from 1) at which this call stops."""
        limit = self._settings.stop_after_epochs
        return self._settings.epochs if limit is None else min(self._settings.epochs, self.position.epoch + limit)

    def resume(self, checkpoint: StoredCheckpoint) -> None:
        """Continue from a checkpoint: restore the tensors, the position and the learning rate.

        DataError on every rank for other training data than the checkpoint's, unless the settings accept it.
        """
        state = checkpoint.state
        position, losses = resumed(state, self._batches_per_epoch)
        notes = self._data.resume(checkpoint, position, self._settings.accept_changed_data)
        notes += current_shares().resume(state.shares)
        self._dealing.deal()
        self._load(checkpoint)
        self.position, self._losses = position, losses
        self.outcome.checkpoint = checkpoint.folder
        if self._scheduler is not None:
            self._resume_schedule(checkpoint)
        at = self.position
        inside = f", {at.consumed_samples} samples into the next" if at.consumed_samples else ""
        self._progress.say(f"resumed from {checkpoint.folder} (epoch {at.epoch}{inside}, step {at.step})")
        for note in (*notes, *changes_since(state)):
            self._progress.say(note)

    def _load(self, checkpoint: StoredCheckpoint) -> None:
        if self._checkpoints is None:
            raise CheckpointError("this trainer was made without checkpoints: give it the ones to resume from")
        every = fleet.profile().divergence_check_steps
        if checkpoint.state.compared is False and every and not self._settings.resume_uncompared:
            raise CheckpointError(
                f"{checkpoint.folder} was saved with divergence_check_steps: 0: nobody has compared the ranks' values, "
                f"and rank 0's may not be those of the others; with divergence_check_steps: {every}, as now, it is "
                "resumed only with --resume_uncompared (TrainerSettings.resume_uncompared)"
            )
        self._checkpoints.load(self._exe, checkpoint)

    def _resume_schedule(self, checkpoint: StoredCheckpoint) -> None:
        try:
            self._scheduler.set_state_dict(checkpoint.state.scheduler)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{checkpoint.folder}: the learning rate's saved state does not fit this schedule: {error}; resume "
                "with the schedule that it was saved with"
            ) from error
        # A function of the step is recomputed: the same for the same run, and correct if its settings have changed.
        # Other schedules compute a rate from the previous one, which only their state restores bit by bit.
        is_function = isinstance(self._scheduler, paddle.optimizer.lr.LambdaDecay)
        saved = checkpoint.state
        if is_function or (saved.steps_per_epoch, saved.accumulate_steps) != (self._batches_per_epoch, self._merged):
            self._scheduler.step(self.position.step)


def _score(evaluation: Evaluation | None) -> float | None:
    """Accuracy, or without one the negative loss: higher is better."""
    if evaluation is None:
        return None
    return -evaluation.loss if math.isnan(evaluation.accuracy) else evaluation.accuracy


def last_reported(inside: int, every: int, is_fetched: Callable[[int], bool]) -> int:
    """The step of an epoch, counted from 1, that was reported last when ``inside`` steps are done; 0 for none.

    The first step whose loss is fetched (``is_fetched(step)``) in each ``every`` is reported: a run that continues
    from here must report the same ones as an uninterrupted run.
    """
    reported = 0
    for step in range(1, inside + 1):
        if is_fetched(step) and begins_interval(step, reported, every):
            reported = step
    return reported


def begins_interval(step: int, reported: int, every: int) -> bool:
    """Whether a step of an epoch is in a later interval of ``every`` steps than the one that was reported last."""
    return step // every != reported // every
