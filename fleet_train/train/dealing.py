"""Lets the loader of a loop deal each joint batch by the profile's ``batch_shares``, which change between epochs."""

from __future__ import annotations

from typing import Any

from fleet_train import fleet
from fleet_train.convert.session import batch_shares
from fleet_train.errors import DataError


class Dealing:
    """The shares by which one loader deals. All ranks make the same calls.

    Raises DataError for a loader that cannot deal unlike shares.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler = getattr(loader, "sampler", None)
        if batch_shares().are_equal:
            return
        if not hasattr(self._sampler, "deal"):
            what = type(loader if self._sampler is None else self._sampler).__name__
            raise DataError(
                f"batch_shares: {fleet.profile().batch_shares} needs a ShardedBatchSampler (--shard_by sample), which "
                f"deals each joint batch; a {what} does not: use batch_shares: equal, or feed fleet.batch_size(GLOBAL) "
                "samples in a loop of your own"
            )
        self.deal()

    def deal(self) -> None:
        """Before an epoch is opened."""
        shares = batch_shares()
        if not shares.are_equal:
            shares.is_used = True
            self._sampler.deal(shares.now)

    def after_epoch(self) -> str | None:
        """Agree on the shares of the next epoch; returns what to say if they change."""
        shares = batch_shares()
        if shares.are_equal:
            return None
        said = shares.adjust(self._sampler.batch_size * fleet.worker_num())
        self.deal()
        return said
