"""The state of a namespace at a relay, and the relay's link to its parent, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.relay import Parent, Relay, RelayLink
from fleet_train.cluster.store.wire import (
    ProtocolError,
    encode,
)
from tests.support.connections import BARRIER, Heard, Transport, arrive, in_virtual_time, root_here, ticking


class Ticking(Heard):
    """A relay's link."""

    def tick(self, now: float) -> None:
        pass


def relay_of(below: int = 0b111, silence: float = 4.0) -> tuple[Relay, Heard]:
    """A relay of these members (of a job's first six), and what it tells its parent."""
    parent = Parent("10.0.0.1", 6170, "0", 1, "node 1", below, Access(), silence)
    relay = ticking(Relay(asyncio.get_running_loop().time, parent))
    link = Ticking()
    relay.link = link  # type: ignore[assignment]
    return relay, link


def answer(relay: Relay, header: dict[str, Any], body: bytes = b"") -> bytes:
    """A frame of the parent; returned as it travels."""
    frame = encode(header, body)
    relay.heard(json.dumps(header, separators=(",", ":")).encode(), body)
    return frame


@in_virtual_time
async def test_a_relay_speaks_once_for_all_below_it() -> None:
    relay, link = relay_of()
    members = [Heard() for _ in range(3)]
    for member, timeout in enumerate((60.0, 30.0, 90.0)):
        assert link.frames == []
        arrive(relay, members[member], member, 6, timeout=timeout, call="" if member else "fleet.save")
    told = {"do": "barrier", "group": "rank", "name": "step 1", "count": 6, "timeout": 30.0}
    told |= {"members": [[0, 2]], "calls": [["fleet.save", [[0, 0]]]], "again": False}
    assert link.take() == [(told | {"slowest": 1.0, "stop": None}, b"")]
    answer(relay, {"number": 1, "slowest": 9.0, "to": BARRIER}, b"as it came")
    assert [heard.frames for heard in members] == [[({"number": 1, "slowest": 9.0, "to": BARRIER}, b"as it came")]] * 3
    assert not relay.pending
    await asyncio.sleep(100.0)
    assert link.frames == []


@in_virtual_time
async def test_a_relay_waits_for_those_of_a_small_group_only_and_tells_other_numbers_at_once() -> None:
    """The first two ranks of six meet: nobody else below the relay will come."""
    relay, link = relay_of()
    arrive(relay, Heard(), 0, 2)
    assert link.frames == []
    arrive(relay, Heard(), 1, 2)
    assert [header["members"] for header in link.headers] == [[[0, 1]]]
    relay, link = relay_of()
    arrive(relay, Heard(), 0, 6)
    arrive(relay, Heard(), 1, 5)
    assert [(header["count"], header["members"]) for header in link.headers] == [(5, [[0, 1]])]


@in_virtual_time
async def test_a_relay_tells_who_is_there_while_others_are_late_in_every_round() -> None:
    relay, link = relay_of()
    for _ in range(2):
        arrive(relay, Heard(), 0, 6)
        await asyncio.sleep(0.9)
        assert link.frames == []
        await asyncio.sleep(0.2)
        assert [(header["members"], header["again"]) for header in link.headers] == [([[0, 0]], False)]
        arrive(relay, Heard(), 1, 6)
        assert len(link.frames) == 1
        await asyncio.sleep(0.16)
        arrive(relay, Heard(), 2, 6)  # the last one is told at once
        late = [(header["members"], header["again"]) for header in link.headers[1:]]
        assert late == [([[0, 1]], True), ([[0, 2]], True)]
        await asyncio.sleep(10.0)
        assert len(link.take()) == 3
        answer(relay, {"number": 1, "to": BARRIER})


@in_virtual_time
async def test_a_parent_that_does_not_answer_in_time_is_named() -> None:
    """It has two seconds more than its members' patience, to name who is missing."""
    relay, _ = relay_of()
    hasty, patient = Heard(), Heard()
    arrive(relay, hasty, 0, 6, timeout=3.0)
    arrive(relay, patient, 1, 6, timeout=60.0)
    await asyncio.sleep(4.9)
    assert hasty.frames == []
    await asyncio.sleep(0.2)
    assert hasty.headers == [{"error": "store", "why": "10.0.0.1:6170 has not answered in time", "to": BARRIER}]
    await asyncio.sleep(56.7)
    assert patient.frames == []
    await asyncio.sleep(0.3)
    assert len(patient.frames) == 1


@in_virtual_time
async def test_those_whose_patience_is_over_hear_who_is_missing_and_the_others_wait_on() -> None:
    relay, link = relay_of()
    hasty, patient = Heard(), Heard()
    arrive(relay, hasty, 0, 6, timeout=3.0)
    arrive(relay, patient, 1, 6, timeout=60.0)
    await asyncio.sleep(2.8)
    link.take()
    timeout = {"error": "timeout", "missing": [[4, 5]], "to": BARRIER}
    answer(relay, timeout)
    assert hasty.headers == [timeout]
    assert patient.frames == []
    again = link.headers[0]
    assert (again["members"], again["timeout"], again["again"]) == ([[1, 1]], 57.2, False)
    assert len(link.take()) == 1
    answer(relay, timeout)  # not yet theirs either
    assert patient.frames == []
    answer(relay, {"error": "gone", "call": "", "to": BARRIER}, b"[]")
    assert patient.headers == [{"error": "gone", "call": "", "to": BARRIER}]


@in_virtual_time
async def test_questions_in_flight_are_answered_when_the_parent_is_lost() -> None:
    relay, link = relay_of()
    waiting, late = Heard(), Heard()
    arrive(relay, waiting, 0, 6)
    answers: list[tuple[str, dict[str, Any], bytes]] = []

    def get(key: str) -> None:
        relay.ask({"do": "get", "key": key}, b"", lambda head, body: answers.append((key, head, body)))

    for key in "abc":
        get(key)
    asked = [("get", 1, "a"), ("get", 2, "b"), ("get", 3, "c")]
    assert [(header["do"], header["id"], header["key"]) for header in link.headers] == asked
    answer(relay, {"id": 2, "error": "full"}, b"body")
    answer(relay, {"id": 2}, b"again")  # nobody waits for it any more
    answer(relay, {"id": 99}, b"")
    assert answers == [("b", {"error": "full"}, b"body")]
    relay.parent_lost("the connection was closed")
    lost = {"error": "store", "why": "10.0.0.1:6170, the parent of this node's relay: the connection was closed"}
    assert answers[1:] == [("a", lost, b""), ("c", lost, b"")]
    assert waiting.headers == [lost | {"to": BARRIER}]
    relay.parent_lost("something else")
    get("x")
    arrive(relay, late, 1, 6)
    assert answers[3:] == [("x", lost, b"")]
    assert late.headers == [lost | {"to": BARRIER}]
    assert len(link.frames) == 3
    assert not relay.pending
    relay, link = relay_of()
    relay.depart("connection 7", "left")
    assert link.take() == [({"do": "depart", "via": "connection 7", "how": "left", "id": 1}, b"")]


@pytest.mark.parametrize("to", [None, "rank", ["rank", "barrier"], ["rank", "dance", "a"], ["rank", "barrier", 1]])
@in_virtual_time
async def test_an_answer_that_says_not_to_which_barrier_is_refused(to: object) -> None:
    relay, _ = relay_of()
    with pytest.raises(ProtocolError):
        answer(relay, {"to": to})


@in_virtual_time
async def test_a_value_beyond_the_limit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_train.cluster.store.wire.MOST_GATHERED_BYTES", 10)
    for at in (root_here(), relay_of()[0]):
        one, two = Heard(), Heard()
        arrive(at, one, 0, 3, kind="all_gather", body=b"12345")
        arrive(at, two, 1, 3, kind="all_gather", body=b"123456")
        assert one.headers == two.headers == [{"error": "large", "to": ["rank", "all_gather", "step 1"]}]
        assert not at.pending


# a relay's link


def linked(silence: float = 4.0) -> tuple[RelayLink, Transport, list[str]]:
    """A link that its parent has accepted, the connection, and why the parent counts as lost."""
    relay, _ = relay_of(silence=silence)
    link, transport = RelayLink(relay), Transport()
    relay.link = link
    lost: list[str] = []
    relay.parent_lost = lambda why: lost.append(why)  # type: ignore[method-assign]
    link.connection_made(transport)
    return link, transport, lost


@in_virtual_time
async def test_a_link_beats_four_times_in_its_silence_and_a_parent_that_is_silent_is_lost() -> None:
    link, transport, lost = linked()
    for _ in range(10):
        await asyncio.sleep(1.0)
        link.data_received(encode({"beat": True}))
    assert 10 <= transport.sent.headers.count({"do": "beat"}) <= 11
    await asyncio.sleep(3.9)
    assert lost == []
    await asyncio.sleep(1.5)
    assert lost == ["not heard of for 4 s"]
    assert transport.is_closing()
    link.connection_lost(None)
    assert len(lost) == 1
    link, transport, lost = linked()
    link.close()
    await asyncio.sleep(20.0)
    assert (transport.sent.frames, lost) == ([], [])


@in_virtual_time
async def test_a_parent_that_ends_the_connection_is_lost_and_a_link_that_its_relay_closes_is_not() -> None:
    for error, why in ((None, "the connection was closed"), (OSError("reset"), "reset")):
        link, _, lost = linked()
        link.connection_lost(error)
        assert lost == [why]
    link, transport, lost = linked()
    link.data_received(encode({"to": 7}))
    assert transport.is_closing()
    assert lost == ["an answer does not name its barrier"]
    link, _, lost = linked()
    link.close()
    link.connection_lost(None)
    assert lost == []
