"""Another name of `fleet_train.train.metrics.console`, for scripts."""

from fleet_train.train.metrics.console import Progress, make_progress

__all__ = ["Progress", "make_progress"]
