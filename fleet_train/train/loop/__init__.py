"""A training loop of one's own that resumes: `resumable`."""

from fleet_train.train.loop.resumable import Resumable, resumable

__all__ = ["Resumable", "resumable"]
