"""Assigns samples to ranks and steps. Pure numpy: equal arguments give equal indices on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from fleet_train.cluster.shares import Deal
from fleet_train.data.datasets import Indices
from fleet_train.errors import DataError

LAST_BATCHES = ("keep", "merge", "refuse", "exact")


class BatchSampler(Protocol):
    """The interface of a sampler for loaders."""

    seed: int
    epoch: int

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None: ...

    def __len__(self) -> int:
        """Remaining steps of the epoch."""

    def batch(self, step: int) -> Indices:
        """This rank's indices at that remaining step."""

    def consumed_after(self, steps: int) -> int:
        """`consumed_samples` for a resume after this many of the remaining steps."""


class ShardedBatchSampler:
    """Batches of sample indices for one rank; every rank gets the same number of batches, each of the same size, or of
    its share.

    Step k of all ranks together is a contiguous slice of one global order (rank r takes every world_size-th index of
    it). So the joint batch does not depend on the number of ranks, only on the global batch size, and the rest of an
    epoch can be read by another number of ranks: see `set_epoch`. Without `rank` and `world_size`, every process reads
    everything.

    Args:
        batch_size: samples per rank and step.
        shuffle: a new order each epoch, from (seed, epoch). Every rank must be given the same seed.
        drop_last: False pads to equal counts by repeating the first samples of the epoch's order and keeps a smaller
            last batch; True repeats nothing and drops samples that do not fill a whole batch on every rank.
        last_batch: how to handle a last batch of one sample per rank, whose batch-norm statistics have no variance:
            `keep` it, `merge` it into the previous batch (batch_size + 1 samples), or `refuse` with a DataError.
            `exact` merges it and repeats no sample: a rank's last batch may have one less than another's, which needs
            ``average_over: samples``. Where fewer samples than ranks are left, it repeats some, too.
        shares: unlike parts of each joint batch of batch_size * world_size samples, by rank, such as
            ``fleet.batch_shares()``: see `deal`. None: equal parts.
    Source: the semantics of torch's DistributedSampler and Paddle's DistributedBatchSampler, made step-addressable.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        last_batch: str = "keep",
        shares: Sequence[float] | None = None,
    ) -> None:
        check_sizes(num_samples, batch_size, rank, world_size)
        if last_batch not in LAST_BATCHES:
            raise DataError(f"last_batch={last_batch!r}; use one of {', '.join(LAST_BATCHES)}")
        if last_batch == "exact" and drop_last:
            raise DataError(
                "last_batch='exact' reads every sample, and drop_last=True drops some; leave one of them out"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.last_batch = last_batch
        self._consumed = 0
        self._deal: Deal | None = None
        self.deal(shares)
        self.set_epoch(0)

    def deal(self, shares: Sequence[float] | None) -> None:
        """Deal the samples that are left by these shares, by rank; None: in equal parts.

        A rank's batches then have unlike sizes, at least 2 samples each where the joint batch has 4 for each rank, and
        each sample comes once: a last batch that ``drop_last`` does not drop is dealt like the others, with ``merge``
        and ``exact`` as part of the one before if it has not that many.
        """
        if shares is not None and len(shares) != self.world_size:
            raise DataError(f"{len(shares)} shares for {self.world_size} ranks: {list(shares)}")
        self._shares = None if shares is None else tuple(shares)
        self._deal_left()

    def _deal_left(self) -> None:
        if self._shares is None:
            self._deal = None
            return
        merges, joint = self.last_batch in ("merge", "exact"), self.batch_size * self.world_size
        self._deal = Deal(self.num_samples - self._consumed, joint, self._shares, merges, self.drop_last)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the epoch, or the rest of it; without this call every pass repeats epoch 0's order.

        consumed_samples: finished samples of the global order, by any number of ranks (`consumed_after`). The rest is
        divided over the present ranks: none is read twice, and only `drop_last` omits samples.
        """
        if not 0 <= consumed_samples <= self.num_samples:
            raise DataError(
                f"consumed_samples={consumed_samples} of an epoch with {self.num_samples} samples; "
                "has the data changed since the checkpoint was written?"
            )
        self.epoch = epoch
        self._consumed = consumed_samples
        self._deal_left()
        if self.last_batch == "refuse" and self._has_single_rest():
            raise DataError(
                f"{self.num_samples - consumed_samples} samples on {self.world_size} rank(s) with batch_size="
                f"{self.batch_size} leave a last batch of 1 sample per rank, in which batch norm has no variance; use "
                "last_batch='merge', drop_last=True or another batch size"
            )

    @property
    def samples_per_rank(self) -> int:
        """Samples that each rank reads in the rest of the epoch, including padding."""
        left = self.num_samples - self._consumed
        if self.drop_last:
            return left // self.world_size // self.batch_size * self.batch_size
        return -(-left // self.world_size)

    def __len__(self) -> int:
        """Remaining steps of the epoch, equal on every rank."""
        if self._deal is not None:
            return len(self._deal)
        merged = self.last_batch in ("merge", "exact") and self._has_single_rest()
        return -(-self.samples_per_rank // self.batch_size) - merged

    def batch(self, step: int) -> Indices:
        """This rank's indices at a remaining step: step 0 is the first one after `consumed_samples`."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch with {len(self)} steps")
        places = self._consumed + self._places(step)
        # Past the end it continues with the first samples of the order, even if there are fewer samples than ranks.
        return epoch_order(self.num_samples, self.seed, self.epoch, self.shuffle)[places % self.num_samples]

    def consumed_after(self, steps: int) -> int:
        """Finished samples of the global order after this many of the remaining steps; padding does not count."""
        if self._deal is not None:
            return self._consumed + (self._deal.end(steps - 1) if steps else 0)
        done = self._end(steps - 1) if steps else 0
        return min(self.num_samples, self._consumed + done * self.world_size)

    def __iter__(self) -> Iterator[Indices]:
        return (self.batch(step) for step in range(len(self)))

    def _places(self, step: int) -> Indices:
        """This rank's places in what is left of the order."""
        if self._deal is not None:
            return np.array(self._deal.part(step, self.rank))
        places = self.rank + self.world_size * np.arange(step * self.batch_size, self._end(step))
        left = self.num_samples - self._consumed
        return places[places < left] if self.last_batch == "exact" and left >= self.world_size else places

    def _end(self, step: int) -> int:
        """Samples of this rank up to and including that step."""
        return self.samples_per_rank if step >= len(self) - 1 else (step + 1) * self.batch_size

    def _has_single_rest(self) -> bool:
        if self._deal is not None:
            return self._deal.has_small_rest
        return self.samples_per_rank > self.batch_size > 1 and self.samples_per_rank % self.batch_size == 1


class EvaluationSampler:
    """This rank's share of an evaluation: each sample exactly once over all ranks, so shards may be uneven or empty."""

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self._batches = evaluation_batches(num_samples, batch_size, rank, world_size)
        self.seed = 0
        self.epoch = 0

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Every epoch is the same and starts at the first sample."""
        if consumed_samples:
            raise DataError(f"consumed_samples={consumed_samples}: an evaluation always starts at its first sample")
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, step: int) -> Indices:
        return self._batches[step]

    def consumed_after(self, steps: int) -> int:
        del steps
        return 0


@lru_cache(maxsize=2)  # asked for each batch; two samplers may alternate
def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True) -> Indices:
    """All sample indices in the order of that epoch, int64 [num_samples], not writeable."""
    order = np.arange(num_samples, dtype=np.int64)
    if shuffle:
        # A sequence as seed: seed 0 in epoch 1 must not be seed 1 in epoch 0.
        order = np.random.default_rng([seed, epoch]).permutation(num_samples).astype(np.int64)
    order.flags.writeable = False
    return order


def evaluation_batches(num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[Indices]:
    """This rank's share of an evaluation, in order: rank r reads every world_size-th sample."""
    check_sizes(num_samples, batch_size, rank, world_size)
    mine = np.arange(rank, num_samples, world_size, dtype=np.int64)
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


def check_sizes(num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
    """Raise DataError if the numbers leave no sample or no rank."""
    if num_samples < 1:
        raise DataError(f"num_samples={num_samples}; at least 1 sample is needed")
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size}; samples per rank and step must be at least 1")
    if not 0 <= rank < world_size:
        raise DataError(f"rank={rank} with world_size={world_size}; ranks run from 0 to world_size - 1")


# Machines with separate data of different sizes: the number of steps of all ranks is decided before the first one.
#
# A rank that runs out of batches earlier than the others leaves them waiting in a collective. So each rank proposes
# the number of steps that its data allows, the proposals are exchanged (`fleet.gather`), and `agree_steps` returns
# the same number on every rank.


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
        done = self.done_after(self._consumed)
        mine = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        order = epoch_order(self.num_samples, self.seed, self.epoch, self.shuffle)
        return order[(done + self.rank + self.world_size * mine) % self.num_samples]

    def consumed_after(self, steps: int) -> int:
        """Finished samples of all ranks together after this many of the remaining steps."""
        return self._consumed + steps * self.batch_size * self.total_ranks


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
