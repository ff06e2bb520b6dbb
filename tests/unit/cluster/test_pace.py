"""A server batches slow arrivals of many members; few, or fast ones, are answered at once."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Iterator

import pytest

from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.members import Pace, PacedSelector
from fleet_train.cluster.store.server import StoreServer

GATE = ("rank", 40)


def paced(*spreads: float, participants: int = 40) -> float:
    """What is held at the barrier after barriers of these spreads."""
    pace = Pace()
    for seconds in spreads:
        pace.began(GATE)
        pace.ended(GATE, participants, seconds)
        assert pace.hold_seconds == 0.0
    pace.began(GATE)
    return pace.hold_seconds


def test_a_tenth_of_the_quickest_barrier_is_waited() -> None:
    assert paced(0.015, 0.012, 0.9, 0.013) == pytest.approx(0.0012)


def test_sixteen_are_many() -> None:
    assert paced(0.015, 0.012, 0.9, 0.013, participants=16) == pytest.approx(0.0012)


def test_never_more_than_two_milliseconds() -> None:
    assert paced(1.0, 2.0, 3.0, 4.0) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("spreads", "participants"), [((0.5,) * 3, 40), ((0.5,) * 4, 15), ((0.5, 0.5, 0.5, 0.001), 40)]
)
def test_nothing_is_waited(spreads: tuple[float, ...], participants: int) -> None:
    """Not enough barriers yet, few participants, one barrier that was quick."""
    assert paced(*spreads, participants=participants) == 0.0


def test_other_barriers_are_not_held_for_these() -> None:
    pace = Pace()
    for _ in range(4):
        pace.ended(GATE, 40, 0.5)
    pace.began(("rank", 2))
    assert pace.hold_seconds == 0.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_held_selector_sees_all_that_came_meanwhile(pipe: tuple[int, int]) -> None:
    pace = Pace()
    pace.hold_seconds = 0.05
    selector = PacedSelector(pace)
    selector.register(pipe[0], selectors.EVENT_READ)
    began = time.monotonic()
    assert selector.select(0) == []  # a look that does not wait is not held
    late = threading.Timer(0.02, os.write, [pipe[1], b"x"])
    os.write(pipe[1], b"x")
    late.start()
    assert len(selector.select(10)) == 1
    assert time.monotonic() - began >= 0.05
    assert os.read(pipe[0], 10) == b"xx"
    selector.close()


def test_a_look_that_would_wait_for_a_moment_is_held_no_longer_than_that(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[float] = []
    monkeypatch.setattr(time, "sleep", held.append)
    pace = Pace()
    pace.hold_seconds = 0.05
    with PacedSelector(pace) as selector:
        selector.register(pipe[0], selectors.EVENT_READ)
        os.write(pipe[1], b"x")
        for timeout in (None, 10.0, 0.5, 0.01, 0.0, -1.0):
            assert len(selector.select(timeout)) == 1
    assert held == [0.05, 0.05, 0.05, 0.01]


def test_many_slow_arrivals_are_answered_as_ever() -> None:
    """20 members, one of them late each time: the server holds from the fifth barrier on."""
    barriers, members = 6, 20
    held: dict[int, float] = {}
    server = StoreServer("127.0.0.1", 0).start()

    def hold_at_its_end(barrier: int) -> float:
        """Once the others have had time to come; at the fifth as long as it takes."""
        time.sleep(0.3)
        deadline = time.monotonic() + 20.0
        while barrier >= 4 and not server._pace.hold_seconds and time.monotonic() < deadline:
            time.sleep(0.01)
        return server._pace.hold_seconds

    def run(member: int) -> None:
        client = StoreClient.connect(server.endpoint, member)
        for barrier in range(barriers):
            if member == members - 1:
                held[barrier] = hold_at_its_end(barrier)
            client.barrier(f"barrier {barrier}", None, members, 60.0)
        client.close()

    threads = [threading.Thread(target=run, args=(member,)) for member in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert server._pace.hold_seconds == 0.0
    server.stop()
    assert [held[barrier] > 0 for barrier in range(barriers)] == [False, False, False, False, True, True]
