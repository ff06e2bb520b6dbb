"""Converts a user's strategy, in any of its forms, to its profile."""

from __future__ import annotations

import os
from typing import Any

from fleet_train.errors import ClusterError
from fleet_train.spawning.shipping import shown


def profile_of(strategy: Any) -> Any:
    """The profile; None for None. Raises ProfileError, and ClusterError for anything but a strategy."""
    if strategy is None:
        return None
    from fleet_train.convert.settings.strategy import DistributedStrategy
    from fleet_train.profile import Profile, load_profile

    if isinstance(strategy, (str, os.PathLike)):
        return load_profile(os.fspath(strategy))
    if isinstance(strategy, Profile):
        return strategy
    if isinstance(strategy, DistributedStrategy):
        return strategy.to_profile()
    if type(strategy).__name__ == "DistributedStrategy":  # Paddle's own
        return DistributedStrategy.from_stock(strategy).to_profile()
    raise ClusterError(
        f"strategy={shown(strategy)}: it takes a profile's name (python -m fleet_train profiles lists them), the path "
        "of a YAML file, or a fleet_train.DistributedStrategy"
    )
