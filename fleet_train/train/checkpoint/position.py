"""Where a run stands, and what is remembered of an epoch that is under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fleet_train import fleet
from fleet_train.train.checkpoint.manager import TrainState


@dataclass
class Position:
    """Counted from the beginning of the run, the same on every rank."""

    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    """Finished steps."""
    consumed_samples: int = 0
    """Samples of the epoch under way that all ranks together have done."""


@dataclass
class EpochLoss:
    """The losses of one epoch that this rank has fetched: sum and count."""

    total: float = 0.0
    count: int = 0

    def add(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self.total += loss
            self.count += 1

    def mean(self) -> float:
        """Over all ranks, NaN without any loss. All ranks call it."""
        total, count = fleet.all_reduce(np.array([self.total, self.count], dtype=np.float64), op="sum")
        return float(total / count) if count else math.nan


@dataclass(frozen=True)
class Resumed:
    """What a saved state means for this call, which may have another number of ranks."""

    position: Position
    losses: EpochLoss = field(default_factory=EpochLoss)


def resumed(state: TrainState, steps_per_epoch: int) -> Resumed:
    """With another number of steps per epoch (other ranks, another batch size) the run goes on at the same share of it.

    The losses of an epoch under way go back to the rank that had them, or all to rank 0 when the ranks are others.
    """
    inside = max(0, state.step - state.epoch * state.steps_per_epoch)
    step = state.epoch * steps_per_epoch + inside * steps_per_epoch // max(1, state.steps_per_epoch)
    losses = [EpochLoss(float(total), int(count)) for total, count in state.epoch_losses]
    rank = fleet.worker_index()
    if len(losses) == fleet.worker_num():
        mine = losses[rank]
    elif rank == 0:
        mine = EpochLoss(sum(each.total for each in losses), sum(each.count for each in losses))
    else:
        mine = EpochLoss()
    return Resumed(Position(state.epoch, step, state.consumed_samples), mine)
