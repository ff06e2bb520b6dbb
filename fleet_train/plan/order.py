"""Which buckets are sent last, where the next forward pass waits for them: chosen by price, from measured times.

Gradients become ready in the reverse order of their next use. Sent in that order, what is needed first arrives last,
and the forward pass waits for all of it. A large bucket that is needed late is *postponed*: launched after all others,
so that it travels while the forward pass computes with what has arrived. Sources of the aim, to send first what is
needed first: Jayarajan et al. 2019 (P3), Peng et al. 2019 (ByteScheduler). They cut and reorder while they send; here
one order is chosen for all steps and ranks, and sums stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet_train.plan.queues import PricedTask, QueuedBucket, finish_times

_MOST_TRIED = 16
_WORTH_IT = 0.99
"""A bucket is postponed if that makes a step at least a hundredth shorter."""


@dataclass(frozen=True)
class BucketTimes:
    """When a run needs and launches each bucket, in seconds from the last launch of the run before, without the time in
    which it waits for buckets."""

    needed: tuple[float, ...]
    launched: tuple[float, ...]


def postponed(buckets: Sequence[QueuedBucket], times: BucketTimes) -> tuple[int, ...]:
    """The buckets to launch after all others, in the order in which they are needed; the first bucket never is one.

    The same arguments give the same choice on every rank.
    """
    chosen: tuple[int, ...] = ()
    best = step_seconds(buckets, times, chosen)
    large = sorted(range(1, len(buckets)), key=lambda index: (-buckets[index].nbytes, index))[:_MOST_TRIED]
    while True:
        tried = []
        for index in large:
            if index not in chosen:
                more = tuple(sorted((*chosen, index), key=lambda one: (times.needed[one], -one)))
                tried.append((step_seconds(buckets, times, more), more))
        if not tried or min(tried)[0] > _WORTH_IT * best:
            return chosen
        best, chosen = min(tried)


def step_seconds(buckets: Sequence[QueuedBucket], times: BucketTimes, last: Sequence[int]) -> float:
    """A step's predicted length; ``last``: the buckets that are postponed."""
    order = [*(index for index in range(len(buckets)) if index not in last), *last]
    ready, tasks = 0.0, []
    for index in order:
        ready = max(ready, times.launched[index])
        tasks.append(PricedTask(buckets[index].communicator, buckets[index].phases, ready))
    end = max(times.launched)
    arrived = dict(zip(order, finish_times(tasks), strict=True))
    waited = 0.0
    for index in sorted(order, key=lambda one: (times.needed[one], -one)):
        waited += max(0.0, arrived[index] - (end + times.needed[index] + waited))
    return end + waited
