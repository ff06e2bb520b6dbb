"""Checkpoints of one training run over all ranks: published atomically, verified before they are used.

Scripts import the names below from here; `position` and `storage` are for the trainers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_train.lazy import load_on_use

if TYPE_CHECKING:
    from fleet_train.train.checkpoint.manager import Checkpoints, TrainState

__all__ = ["Checkpoints", "TrainState"]

__getattr__ = load_on_use(__name__, {"Checkpoints": "manager", "TrainState": "manager"})
