"""``FleetTrainer``: runs the ranks as workers of Ray Train, which places and restarts them and keeps their results.

Needs Ray: ``pip install "ray[train]"``. The name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_train.errors import FleetTrainError

if TYPE_CHECKING:
    from fleet_train.spawning.ray_trainer import FleetTrainer

__all__ = ["FleetTrainer"]


class RayMissing(FleetTrainError, ImportError):
    """Ray Train is not installed, or too old. Also an ImportError."""


def __getattr__(name: str) -> Any:
    if name != "FleetTrainer":
        raise AttributeError(f"module 'fleet_train.ray' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        from fleet_train.spawning.ray_trainer import FleetTrainer
    except ImportError as error:
        raise RayMissing(
            f'fleet_train.ray needs Ray Train ({error}); install it on every node: pip install "ray[train]"'
        ) from error
    globals()[name] = FleetTrainer
    return FleetTrainer
