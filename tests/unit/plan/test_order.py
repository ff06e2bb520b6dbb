"""Which buckets are launched last: by hand, for forward passes that need first what is ready last."""

from __future__ import annotations

import pytest

from fleet_train.collectives.bucket_times import Stopwatch, slowest
from fleet_train.plan.order import BucketTimes, postponed, step_seconds
from fleet_train.plan.queues import QueuedBucket, TaskPhase


def buckets(*seconds: float) -> list[QueuedBucket]:
    """On one communicator, each busy for so long."""
    return [QueuedBucket(0, (TaskPhase("link", each),), each) for each in seconds]


# Forward pass: 3 s, a layer each second; backward pass: from 3 to 6 s. The first bucket is of the last layer.
TIMES = BucketTimes(needed=(2.0, 1.0, 0.0), launched=(4.0, 5.0, 6.0))


def test_a_short_link_adds_the_last_bucket_alone() -> None:
    assert step_seconds(buckets(0.5, 0.5, 0.5), TIMES, ()) == pytest.approx(6.5)
    assert postponed(buckets(0.5, 0.5, 0.5), TIMES) == ()


def test_the_forward_pass_waits_for_what_it_needs_first() -> None:
    # The link is busy from 4 s: buckets arrive at 7, 10 and 10.5 s. All layers wait until 10.5, and 6 s are computed.
    assert step_seconds(buckets(3.0, 3.0, 0.5), TIMES, ()) == pytest.approx(10.5)
    # Bucket 1 after bucket 2: they arrive at 7, 10.5 and 7.5 s; the first layer waits until 7.5, the second until 10.5.
    assert step_seconds(buckets(3.0, 3.0, 0.5), TIMES, (1,)) == pytest.approx(6.0 + 1.5 + 2.0)
    assert postponed(buckets(3.0, 3.0, 0.5), TIMES) == (1,)


def test_small_buckets_and_the_first_one_are_not_postponed() -> None:
    assert postponed(buckets(9.0, 0.01, 0.5), TIMES) == ()
    assert postponed(buckets(3.0), BucketTimes((0.5,), (2.0,))) == ()


def test_several_are_postponed_in_the_order_of_their_use() -> None:
    times = BucketTimes(needed=(9.0, 6.0, 3.0, 0.0), launched=(10.0, 11.0, 12.0, 12.5))
    assert postponed(buckets(3.0, 3.0, 3.0, 0.1), times) == (2, 1)
    # Bucket 3 arrives at 13.1 s, 2 and 1 when they are needed, 3 s of computing later each.
    assert step_seconds(buckets(3.0, 3.0, 3.0, 0.1), times, (2, 1)) == pytest.approx(12.5 + 0.6)


def test_a_stopwatch_stands_while_the_thread_waits_and_forgets_what_is_between_two_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch(2)
    for run in range(6):
        assert watch.own() == []
        began = now
        if run == 3:  # between two runs, by a flush
            watch.waits(1, began + 20.0, began + 50.0)
            watch.waits(0, began + 50.0, began + 90.0)
            watch.begin_anew()
        else:
            watch.waits(1, began + 1.0, began + 4.0)  # 3 s of waiting
            watch.waits(0, began + 5.0, began + 5.5)
        now = began + 7.0
        watch.launches(0)
        now = began + 8.0
        watch.launches(1)
    assert watch.own() == [[2.0, 1.0], [3.5, 4.5]]
    assert slowest([[[2.0, 1.0], [3.5, 4.5]], [[1.5, 1.5], [3.0, 5.0]]]) == BucketTimes((2.0, 1.5), (3.5, 5.0))
