"""Machines with separate data of different sizes: the number of steps of all ranks is decided before the first one.

A rank that runs out of batches earlier than the others leaves them waiting in a collective. So each rank proposes the
number of steps that its data allows, the proposals are exchanged (`fleet.gather`), and `agree_steps` returns the same
number on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleet_train.data.core.datasets import Indices
from fleet_train.data.core.sampler import check_sizes, epoch_order
from fleet_train.errors import DataError

UNEVEN_POLICIES = ("truncate", "pad", "error")


def agree_steps(counts: Sequence[int], policy: str = "truncate") -> int:
    """Steps per epoch for all ranks, from the steps that each rank's data allows, by rank.

    `truncate` takes the smallest count (the others omit some samples, different ones each epoch), `pad` the largest
    (the others repeat some), `error` accepts equal counts only. A rank without a step raises a DataError that names it.
    """
    if policy not in UNEVEN_POLICIES:
        raise DataError(f"--uneven {policy!r} is unknown; use one of {', '.join(UNEVEN_POLICIES)}")
    empty = [rank for rank, count in enumerate(counts) if count < 1]
    if empty or not counts:
        raise DataError(
            f"steps per epoch by rank: {_listed(counts)}; rank(s) {_listed(empty)} have too few samples for one step: "
            "use a smaller --batch_size or more data"
        )
    if policy == "error" and len(set(counts)) > 1:
        raise DataError(
            f"steps per epoch by rank: {_listed(counts)}; with --uneven error they must be equal. Use --uneven "
            f"truncate ({min(counts)} steps for all) or --uneven pad ({max(counts)} steps, short ranks repeat samples)"
        )
    return max(counts) if policy == "pad" else min(counts)


@dataclass(frozen=True)
class _Part:
    """The rest of an epoch, divided anew: see `OwnDataSampler.continue_at`."""

    epoch: int
    consumed_samples: int
    done: int
    steps: int


class OwnDataSampler:
    """Batches from a shard that only this machine has, divided over its ranks.

    Every step of every rank has exactly batch_size samples, so that equal weights in the average of gradients are
    right. Call `agree` with the `proposed_steps` of all ranks before the first epoch.

    `consumed_samples` counts the samples of all ranks. Resumed by it alone, an epoch needs the same machines with the
    same share of the ranks each; with other machines or ranks, `continue_at` divides the rest of the epoch.

    Args:
        num_samples: of this shard. Shards of different machines may differ.
        rank, world_size: among the ranks that read this shard.
        total_ranks: of the whole job.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        total_ranks: int,
        shuffle: bool = True,
        seed: int = 0,
        policy: str = "truncate",
    ) -> None:
        check_sizes(num_samples, batch_size, rank, world_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.total_ranks = total_ranks
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._policy = policy
        self._steps = self.proposed_steps
        self._consumed = 0
        self._part: _Part | None = None
        self._order: tuple[int, Indices] | None = None

    @property
    def proposed_steps(self) -> int:
        """Steps per epoch that this shard allows: whole batches, with policy `pad` also a partial one."""
        return self.steps_after(0)

    def steps_after(self, done: int) -> int:
        """Steps that this shard allows in an epoch after this many of its samples."""
        per_rank = max(0, self.num_samples - done) / self.world_size / self.batch_size
        return math.ceil(per_rank) if self._policy == "pad" else math.floor(per_rank)

    def agree(self, counts: Sequence[int]) -> int:
        """Set the steps per epoch from all ranks' proposals (by rank), and return them."""
        self._steps = agree_steps(counts, self._policy)
        return self._steps

    def continue_at(self, epoch: int, consumed_samples: int, done: int, counts: Sequence[int]) -> None:
        """Continue that epoch after `consumed_samples` with the present ranks, of which each may have read another
        share of its shard. `set_epoch` then takes `consumed_samples` from there on.

        done: samples of this shard that have been read in the epoch. counts: `steps_after` of it, of all ranks. With
        `truncate` and `error` the smallest is taken, with `pad` the largest; the epoch may be over (0).
        """
        steps = max(counts) if self._policy == "pad" else min(counts)
        self._part = _Part(epoch, consumed_samples, done, steps)

    def done_after(self, consumed_samples: int) -> int:
        """Samples of this shard that have been read in the epoch, after `consumed_samples` of all ranks."""
        part = self._of_epoch(self.epoch)
        return part.done + (consumed_samples - part.consumed_samples) * self.world_size // self.total_ranks

    def _of_epoch(self, epoch: int) -> _Part:
        part = self._part
        return part if part is not None and part.epoch == epoch else _Part(epoch, 0, 0, self._steps)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the epoch, or the rest of it after this many samples of all ranks together."""
        part = self._of_epoch(epoch)
        whole = part.consumed_samples + part.steps * self.batch_size * self.total_ranks
        if not part.consumed_samples <= consumed_samples <= whole:
            raise DataError(f"consumed_samples={consumed_samples} of an epoch in which all ranks read {whole} samples")
        self.epoch = epoch
        self._consumed = consumed_samples

    def __len__(self) -> int:
        """Steps left in the epoch, equal on every rank."""
        part = self._of_epoch(self.epoch)
        return part.steps - math.ceil((self._consumed - part.consumed_samples) / (self.batch_size * self.total_ranks))

    def batch(self, step: int) -> Indices:
        """This rank's indices in the shard at a remaining step; past the shard's end it starts again."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch with {len(self)} steps")
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, epoch_order(self.num_samples, self.seed, self.epoch, self.shuffle))
        done = self.done_after(self._consumed)
        mine = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        return self._order[1][(done + self.rank + self.world_size * mine) % self.num_samples]

    def consumed_after(self, steps: int) -> int:
        """Finished samples of all ranks together after this many of the remaining steps."""
        return self._consumed + steps * self.batch_size * self.total_ranks


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
