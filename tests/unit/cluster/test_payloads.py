"""How the members' payloads of a barrier are combined."""

from __future__ import annotations

import pytest

from fleet_train.cluster.store.payloads import Reduced, Word
from fleet_train.cluster.store.wire import Fields


def reduced(*headers: dict[str, object]) -> Reduced:
    """The parts of members 0, 1, ... of a step barrier."""
    barrier = Reduced()
    for member, header in enumerate(headers):
        barrier.add(Word(1 << member, len(headers), Fields(header), b""))
    return barrier


@pytest.mark.parametrize(
    ("told", "slowest"),
    [([12.0, 80.0, 30.0], 80.0), ([80.0, 12.0], 80.0), ([0.0], 0.0), ([80.0, None, 12.0], None)],
)
def test_the_slowest_member_has_the_longest_step(told: list[float | None], slowest: float | None) -> None:
    barrier = reduced(*({"slowest": milliseconds} for milliseconds in told))
    assert barrier.result() == barrier.part() == ({"slowest": slowest, "stop": None}, b"")


@pytest.mark.parametrize(
    ("told", "same"),
    [([7, 7, 7], 7), ([0, 0], 0), ([7, 8, 7], None), ([7, None], None), ([None, 7, 7], None), ([None, None], None)],
)
def test_a_digest_counts_if_every_member_gave_the_same(told: list[int | None], same: int | None) -> None:
    digests: list[dict[str, object]] = [{} if digest is None else {"digest": digest} for digest in told]
    assert reduced(*digests).result()[0].get("digest") == same
    parts = [reduced(digest).part()[0] for digest in digests]  # of relays with one member each
    assert reduced(*parts).result()[0].get("digest") == same


def test_the_lowest_member_that_requests_a_stop_counts() -> None:
    barrier = reduced({"slowest": 1.0}, {"slowest": 1.0, "stop": [1, "z"]}, {"slowest": 1.0, "stop": [2, "a"]})
    assert barrier.stop == (1, "z")
    barrier = reduced({"slowest": 1.0, "stop": [2, "a"]}, {"slowest": 1.0, "stop": [1, "z"]}, {"slowest": 1.0})
    assert barrier.stop == (1, "z")
