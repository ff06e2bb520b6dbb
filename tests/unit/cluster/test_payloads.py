"""How the members' payloads of a barrier are combined."""

from __future__ import annotations

import pytest

from fleet_train.cluster.store.wire import ProtocolError, Reduced, pack_times, unpack_times
from tests.support.connections import arrival


def reduced(*headers: dict[str, object]) -> Reduced:
    """The parts of members 0, 1, ... of a step barrier."""
    barrier = Reduced()
    for member, header in enumerate(headers):
        barrier.add(arrival(1 << member, len(headers), header))
    return barrier


@pytest.mark.parametrize(
    ("told", "slowest"),
    [([12.0, 80.0, 30.0], 80.0), ([80.0, 12.0], 80.0), ([0.0], 0.0), ([80.0, None, 12.0], None)],
)
def test_the_slowest_member_has_the_longest_step(told: list[float | None], slowest: float | None) -> None:
    barrier = reduced(*({"slowest": milliseconds} for milliseconds in told))
    assert barrier.part() == ({"slowest": slowest, "stop": None}, b"")


@pytest.mark.parametrize(
    ("told", "same"),
    [([7, 7, 7], 7), ([0, 0], 0), ([7, 8, 7], None), ([7, None], None), ([None, 7, 7], None), ([None, None], None)],
)
def test_a_digest_counts_if_every_member_gave_the_same(told: list[int | None], same: int | None) -> None:
    digests: list[dict[str, object]] = [{} if digest is None else {"digest": digest} for digest in told]
    assert reduced(*digests).part()[0].get("digest") == same
    parts = [reduced(digest).part()[0] for digest in digests]  # of relays with one member each
    assert reduced(*parts).part()[0].get("digest") == same


def test_the_lowest_member_that_requests_a_stop_counts() -> None:
    barrier = reduced({"slowest": 1.0}, {"slowest": 1.0, "stop": [1, "z"]}, {"slowest": 1.0, "stop": [2, "a"]})
    assert barrier.stop == (1, "z")
    barrier = reduced({"slowest": 1.0, "stop": [2, "a"]}, {"slowest": 1.0, "stop": [1, "z"]}, {"slowest": 1.0})
    assert barrier.stop == (1, "z")


def test_times_of_members_go_up_the_tree_and_the_newest_count() -> None:
    first, second = Reduced(), Reduced()
    first.add(arrival(0b1, 3, {}, pack_times(0, [1, 10.004, 0.5])))
    second.add(arrival(0b10, 3, {}, pack_times(1, [2, 20, 6])))
    root = Reduced()
    root.add(arrival(0b1, 3, *first.part()))
    for _ in range(9):  # a part that is sent again and again does not add up
        root.add(arrival(0b10, 3, *second.part()))
    second.add(arrival(0b100, 3, {}, pack_times(2, [3, 30, 7])))
    root.add(arrival(0b110, 3, *second.part()))
    assert root.part()[0] == {"slowest": None, "stop": None}
    assert len(root.part()[1]) <= 6 * len(first.part()[1])
    assert unpack_times(root.part()[1]) == [(0, [1.0, 10.0, 0.5]), (1, [2.0, 20.0, 6.0]), (2, [3.0, 30.0, 7.0])]


def test_a_member_gives_its_own_times_only() -> None:
    times = pack_times(1, [1.0, 2.0, 3.0])
    Reduced().add(arrival(0b10, 2, {}, times))
    with pytest.raises(ProtocolError, match="times of another"):
        Reduced().add(arrival(0b1, 2, {}, times))


def test_times_of_no_member_are_left_out_and_of_too_many_are_refused() -> None:
    barrier = Reduced()
    barrier.add(arrival(0b1, 1, {}, pack_times(0, [1, -2, 3])))
    assert unpack_times(barrier.part()[1]) == []
    entry = barrier.part()[1]
    for body in (entry[:-1], entry * 3):
        with pytest.raises(ProtocolError, match="cut off"):
            Reduced().add(arrival(0b1, 1, {}, body))
    strange = Reduced()
    strange.add(arrival(0b11, 2, {}, b"\xff" * len(entry)))
    assert unpack_times(strange.part()[1]) == []
