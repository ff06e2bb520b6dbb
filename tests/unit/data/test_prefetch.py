"""The prefetch thread: same order, same exceptions, never more than the queue in advance, ended when closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from fleet_train.data import Prefetcher


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_items_come_in_order_and_the_thread_ends() -> None:
    assert list(Prefetcher(range(5))) == [0, 1, 2, 3, 4]
    assert threads() == []


def test_exhausted_prefetcher_stays_exhausted() -> None:
    items = Prefetcher([1])
    assert list(items) == [1]
    assert list(items) == []


def test_exception_arrives_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    items = Prefetcher(source())
    assert next(items) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(items)
    assert threads() == []


def test_closing_early_stops_a_source_that_never_ends() -> None:
    def source() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    with Prefetcher(source(), depth=1) as items:
        assert next(items) == 0
    assert threads() == []
    with pytest.raises(StopIteration):
        next(items)


def test_next_item_is_read_while_the_current_one_is_used() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for number in range(10):
            read.append(number)
            yield number

    with Prefetcher(source(), depth=2) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 5
        while len(read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        # One in use, two in the queue, one in the thread's hands: never the whole source.
        assert read == [0, 1, 2, 3]


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        Prefetcher([1], depth=0)
