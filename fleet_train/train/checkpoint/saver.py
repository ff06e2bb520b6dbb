"""When a checkpoint is due, and its contents other than the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train import fleet
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint.copies.kept import FINISH_SECONDS
from fleet_train.train.checkpoint.manager import Checkpoints, Found, TrainState
from fleet_train.train.checkpoint.position import EpochLoss, Position
from fleet_train.train.checkpoint.same_data import RunData
from fleet_train.train.components.evaluation import Evaluation
from fleet_train.train.components.settings import TrainerSettings
from fleet_train.train.components.versions import versions


@dataclass(frozen=True)
class Saver:
    """The checkpoints of one `Trainer`. With `checkpoints` None nothing is ever due or saved."""

    exe: Any
    settings: TrainerSettings
    checkpoints: Checkpoints | None
    scheduler: Any
    batches_per_epoch: int
    description: dict[str, Any]
    data: RunData

    def is_due_after(self, at: Position) -> bool:
        """At the end of an epoch, `at` being the beginning of the next."""
        every = self.settings.checkpoint_every
        return (every > 0 and at.epoch % every == 0) or self.is_due_within(at.step)

    def is_due_within(self, step: int) -> bool:
        """After that step."""
        every = self.settings.checkpoint_every_steps
        return self.checkpoints is not None and every > 0 and step % every == 0

    def claim(self) -> None:
        """Before anything is trained: raises CheckpointError if another process saves there, or nothing can."""
        if self.checkpoints is not None:
            self.checkpoints.claim()

    def save(self, at: Position, losses: EpochLoss, evaluation: Evaluation | None) -> Path | None:
        """The folder of the new checkpoint, None if there is none. Raises NotFinite instead of saving NaN; in the
        background the next save raises it, or the end."""
        if self.checkpoints is None:
            return None
        return self.checkpoints.save(self.exe, self._state(at, losses), score=_score(evaluation))

    def finish(self, copy_seconds: float = FINISH_SECONDS, *, may_lack_copies: bool = False) -> Path | None:
        """See `Checkpoints.finish`."""
        if self.checkpoints is None:
            return None
        return self.checkpoints.finish(copy_seconds, may_lack_copies=may_lack_copies)

    def missing_copies(self) -> str:
        """See `Checkpoints.missing_copies`."""
        return "" if self.checkpoints is None else self.checkpoints.missing_copies

    def scalars(self) -> dict[str, float]:
        """The metrics of checkpoints; empty in most jobs."""
        return {} if self.checkpoints is None else self.checkpoints.scalars()

    def load(self, found: Found) -> None:
        if self.checkpoints is None:
            raise CheckpointError("this trainer was made without checkpoints: give it the ones to resume from")
        every = fleet.profile().divergence_check_steps
        if found.state.compared is False and every and not self.settings.resume_uncompared:
            raise CheckpointError(
                f"{found.folder} was saved with divergence_check_steps: 0: nobody has compared the ranks' values, and "
                f"rank 0's may not be those of the others; with divergence_check_steps: {every}, as now, it is resumed "
                "only with --resume_uncompared (TrainerSettings.resume_uncompared)"
            )
        self.checkpoints.load(self.exe, found)

    def _state(self, at: Position, losses: EpochLoss) -> TrainState:
        profile, plan = fleet.profile(), fleet.plan()
        told = fleet.gather([losses.total, losses.count, self.data.done(at)])
        return TrainState(
            epoch=at.epoch,
            step=at.step,
            steps_per_epoch=self.batches_per_epoch,
            world_size=fleet.worker_num(),
            scheduler={} if self.scheduler is None else self.scheduler.state_dict(),
            config=self.description,
            profile={"name": profile.name, "digest": profile.digest(), "chosen": plan.chosen if plan else ""},
            versions=versions(),
            consumed_samples=at.consumed_samples,
            epoch_losses=[[total, count] for total, count, _ in told],
            batches=at.batches,
            pending_batches=at.pending,
            accumulate_steps=profile.accumulate_steps,
            updates=at.updates,
            data=self.data.record(at, [done for _, _, done in told]),
            compared=profile.divergence_check_steps > 0 or fleet.worker_num() == 1,
        )


def _score(evaluation: Evaluation | None) -> float | None:
    """Accuracy, or without one the negative loss: higher is better."""
    if evaluation is None:
        return None
    return -evaluation.loss if math.isnan(evaluation.accuracy) else evaluation.accuracy
