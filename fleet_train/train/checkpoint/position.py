"""The position of a run, and the state of the current epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fleet_train import fleet
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint.manager import TrainState


@dataclass
class Position:
    """Counted from the beginning of the run, the same on every rank."""

    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    """Finished steps (optimizer updates)."""
    consumed_samples: int = 0
    """Samples of the current epoch that all ranks together have done."""
    batches: int = 0
    """Batches that each rank has done: with gradient merge micro-batches, several to a step."""
    pending: int = 0
    """The batches whose gradients wait for an update."""
    updates: int = 0
    """Updates that led here: the step of metrics. Unlike ``step`` it is never renumbered."""


@dataclass
class EpochLoss:
    """This rank's fetched losses of one epoch: sum and count."""

    total: float = 0.0
    count: int = 0

    def add(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self.total += loss
            self.count += 1

    def mean(self) -> float:
        """The mean over all ranks, NaN without a loss. All ranks call it."""
        total, count = fleet.all_reduce(np.array([self.total, self.count], dtype=np.float64), op="sum")
        return float(total / count) if count else math.nan


@dataclass(frozen=True)
class Resumed:
    """Converts a saved state to this call, which may have another number of ranks."""

    position: Position
    losses: EpochLoss = field(default_factory=EpochLoss)


def resumed(state: TrainState, batches_per_epoch: int) -> Resumed:
    """With a different number of batches per epoch (other ranks, another batch size), the run continues at the same
    share of the epoch. The current epoch's losses go to their rank, or all to rank 0 if the number of ranks differs.
    """
    done, pending = _batches(state)
    inside = max(0, done - state.epoch * state.steps_per_epoch)
    batches = state.epoch * batches_per_epoch + inside * batches_per_epoch // max(1, state.steps_per_epoch)
    losses = [EpochLoss(float(total), int(count)) for total, count in state.epoch_losses]
    rank = fleet.worker_index()
    if len(losses) == fleet.worker_num():
        mine = losses[rank]
    elif rank == 0:
        mine = EpochLoss(sum(each.total for each in losses), sum(each.count for each in losses))
    else:
        mine = EpochLoss()
    step = steps_of(batches, pending, fleet.profile().accumulate_steps)
    return Resumed(Position(state.epoch, step, state.consumed_samples, batches, pending, state.recorded_step), mine)


def steps_of(batches: int, pending: int, accumulate_steps: int) -> int:
    """The updates in this many batches, of which `pending` wait for an update."""
    return max(0, batches - pending) // accumulate_steps


def _batches(state: TrainState) -> tuple[int, int]:
    """The finished batches of each rank, and those of them that wait for an update."""
    size = fleet.profile().accumulate_steps
    if state.batches is None:
        if size > 1 and state.profile.get("digest") != fleet.profile().digest():
            raise CheckpointError(
                f"this checkpoint is of a version that counted micro-batches as steps, and of profile "
                f"'{state.profile.get('name', '')}' with other values than now: how many of its step {state.step} make "
                f"an update is not known; resume it with the profile that it was saved with, or start again"
            )
        return state.step, state.step % size
    if state.pending_batches and state.accumulate_steps != size:
        raise CheckpointError(
            f"this checkpoint has {state.pending_batches} of the {state.accumulate_steps} micro-batches of an update, "
            f"and accumulate_steps is now {size}; resume with accumulate_steps: {state.accumulate_steps}"
        )
    return state.batches, state.pending_batches
