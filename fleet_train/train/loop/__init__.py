"""What a loop of one's own needs: it resumes (`resumable`); ranks with unequal data end together (`even_batches`)."""

from fleet_train.train.loop.even_batches import even_batches
from fleet_train.train.loop.resumable import Resumable, resumable

__all__ = ["Resumable", "even_batches", "resumable"]
