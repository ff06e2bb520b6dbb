"""How samples are dealt over ranks of unlike speed. Pure: equal arguments give the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fleet_train.errors import DataError

_WITH_VARIANCE, _MANY = 2, 4
"""The samples of which batch norm has a variance; from how many for each rank on every rank gets so many."""
_LEAST_GAIN = 0.03
"""The part of a step's time that other shares must save: less is what a measurement is wrong by."""


def least_of(samples: int, ranks: int) -> int:
    """The fewest samples that a rank gets of a joint batch: 2, of which batch norm has a variance, where there are 4
    for each; else 1."""
    return _WITH_VARIANCE if samples >= _MANY * ranks else 1


def dealt(samples: int, shares: Sequence[float], least: int | None = None) -> list[int]:
    """Of ``samples`` each rank's number, in proportion to its share: the largest remainders are rounded up, equal ones
    from rank 0 on. Each rank gets ``least``; None: `least_of` so many.

    Raises DataError for shares that are not positive, and for fewer samples than ranks.
    """
    ranks = range(len(shares))
    if not shares or not all(0 < share < math.inf for share in shares):
        raise DataError(f"shares {list(shares)}: each rank needs a share above 0")
    if samples < len(shares):
        raise DataError(f"{samples} samples cannot be dealt over {len(shares)} ranks: each needs one")
    least, total = least or least_of(samples, len(shares)), sum(shares)
    exact = [samples * share / total for share in shares]
    numbers = [max(least, int(each)) for each in exact]
    while sum(numbers) < samples:
        numbers[min(ranks, key=lambda rank: (numbers[rank] - exact[rank], rank))] += 1
    while sum(numbers) > samples:  # some have the least, which is more than their share
        above = [rank for rank in ranks if numbers[rank] > least]
        numbers[max(above, key=lambda rank: (numbers[rank] - exact[rank], rank))] -= 1
    return numbers


def part_of(samples: int, shares: Sequence[float], rank: int, least: int | None = None) -> slice:
    """A rank's part of so many samples, `dealt`; parts are contiguous, in the order of ranks."""
    ends = list(accumulate(dealt(samples, shares, least), initial=0))
    return slice(ends[rank], ends[rank + 1])


def bounded(shares: Sequence[float], most: Sequence[float]) -> list[float]:
    """The shares as parts of 1, none above its rank's ``most``: what is above is divided over the others in proportion.

    Raises DataError where the bounds leave less than the whole batch.
    """
    if math.fsum(most) < 1:  # a plain sum of 0.7, 0.2 and 0.1 is below 1
        raise DataError(f"max_share: {list(most)} leaves {1 - sum(most):.0%} of the joint batch to no rank")
    full: set[int] = set()
    while True:
        rest = 1 - sum(most[rank] for rank in full)
        free = sum(share for rank, share in enumerate(shares) if rank not in full) or 1.0
        parts = [most[rank] if rank in full else rest * share / free for rank, share in enumerate(shares)]
        above = {rank for rank, part in enumerate(parts) if part > most[rank]}
        if above <= full:
            return parts
        full |= above


def measured_shares(samples: Sequence[int], step_ms: Sequence[float], most: Sequence[float]) -> list[float] | None:
    """The shares with which all ranks would compute equally long, from the samples that each took of a joint batch and
    the milliseconds that it computed; None where that would save less than 3 % of a step, or a time is not known.

    A part of a step that does not depend on the samples makes a change too small; the next measurement adds to it.
    """
    if min(step_ms) <= 0:
        return None
    wanted = bounded([number / time for number, time in zip(samples, step_ms, strict=True)], most)
    joint = sum(samples)
    then = max(time * joint * new / old for time, new, old in zip(step_ms, wanted, samples, strict=True))
    return wanted if then < (1 - _LEAST_GAIN) * max(step_ms) else None


@dataclass(frozen=True)
class Deal:
    """The samples that are left of an epoch, in joint batches of ``joint`` samples, each dealt by ``shares``. Their
    number does not depend on the shares. A rank's part of a joint batch is contiguous, in the order of ranks."""

    left: int
    joint: int
    shares: tuple[float, ...]
    merges: bool = True
    """Whether a last batch with less for each rank than others have at least becomes part of the one before."""
    drops: bool = False
    """Whether a last batch that is not whole is dropped."""

    @property
    def rest(self) -> int:
        """The samples that fill no joint batch."""
        return self.left % self.joint

    @property
    def has_small_rest(self) -> bool:
        """Whether the last batch has less for each rank than others have at least."""
        ranks = len(self.shares)
        return self.left > self.joint and 0 < self.rest < least_of(self.joint, ranks) * ranks

    def __len__(self) -> int:
        """The steps of every rank."""
        whole = self.left // self.joint
        if self.drops or not self.rest or (self.merges and self.has_small_rest):
            return whole
        return whole + 1

    def end(self, step: int) -> int:
        """The samples of all ranks up to and including that step, without what is repeated."""
        return (step + 1) * self.joint if step < len(self) - 1 or self.drops else self.left

    def part(self, step: int, rank: int) -> range:
        """A rank's places in what is left. With fewer samples than ranks they go on past its end: some are repeated."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch with {len(self)} steps")
        begin, ranks = step * self.joint, len(self.shares)
        samples = max(self.end(step) - begin, ranks)
        part = part_of(samples, self.shares, rank, min(least_of(self.joint, ranks), samples // ranks))
        return range(begin + part.start, begin + part.stop)
