"""The state of one namespace, at its root and at a relay, on a virtual clock: no sockets, no waiting."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

import pytest

from fleet_train.cluster.store import namespace
from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.namespace import Root, StoreNamespace
from fleet_train.cluster.store.relay import Link, Parent, Relay
from fleet_train.cluster.store.wire import (
    Arrival,
    Fields,
    Key,
    ProtocolError,
    encode,
    pack,
    pack_times,
)
from tests.support.connections import Heard, Transport, in_virtual_time

BARRIER = ["rank", "barrier", "step 1"]
R = TypeVar("R", bound=StoreNamespace)


def ticking(found: R) -> R:
    """A namespace whose server's clock ticks."""

    def tick() -> None:
        loop.call_later(0.05, tick)
        found.tick(loop.time())

    loop = asyncio.get_running_loop()
    loop.call_later(0.05, tick)
    return found


def root_here() -> Root:
    return ticking(Root(asyncio.get_running_loop().time))


def arrive(
    at: StoreNamespace,
    who: Heard,
    member: int,
    count: int,
    *,
    name: str = "step 1",
    kind: str = "barrier",
    group: str = "rank",
    timeout: float = 60.0,
    call: str = "",
    body: bytes = b"",
    told: list[float] | None = None,
) -> None:
    mask = 1 << member
    body = pack({body: mask}) if body else pack_times(member, told) if told else b""
    calls = {call: mask} if call else {}
    at.arrive(Arrival(Key(group, kind, name), who, mask, count, timeout, calls, Fields({"slowest": 1.0}), body))


def ask(at: StoreNamespace, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], Any]:
    """The answer to what needs no waiting: its header, and its body read."""
    answers: list[tuple[dict[str, Any], Any]] = []
    at.ask(header, body, lambda head, text: answers.append((head, json.loads(text) if text else None)))
    assert len(answers) == 1
    return answers[0]


def join(root: Root, member: int, machine: str = "m", group: str = "rank") -> dict[str, Any]:
    return ask(root, {"do": "join", "group": group, "member": member, "via": [machine, f"{group} {member}"]})[0]


# the root


@in_virtual_time
async def test_barriers_are_numbered_and_other_kinds_are_not() -> None:
    root = root_here()
    for number in (1, 2):
        one, two = Heard(), Heard()
        arrive(root, one, 0, 2)
        assert one.frames == []
        arrive(root, two, 1, 2)
        assert one.frames == two.frames == [({"slowest": 1.0, "stop": None, "number": number, "to": BARRIER}, b"")]
    arrive(root, one, 0, 1, kind="all_gather", body=b"x")
    assert one.headers[-1] == {"to": ["rank", "all_gather", "step 1"]}
    arrive(root, one, 0, 1, group="supervisor")
    assert one.headers[-1]["number"] == 1  # every group has an order of its own
    assert not root.pending


@in_virtual_time
async def test_who_does_not_come_in_time_is_named_and_who_gave_up_is_not_blamed() -> None:
    root = root_here()
    patient, hasty = Heard(), Heard()
    arrive(root, patient, 0, 4, timeout=5.0)
    arrive(root, hasty, 2, 4, timeout=2.0)
    await asyncio.sleep(1.9)
    assert hasty.frames == []
    await asyncio.sleep(0.2)
    assert hasty.headers == [{"error": "timeout", "missing": [[1, 1], [3, 3]], "to": BARRIER}]
    assert patient.frames == []
    await asyncio.sleep(2.8)
    assert patient.frames == []
    await asyncio.sleep(0.2)
    assert patient.headers == [{"error": "timeout", "missing": [[1, 1], [3, 3]], "to": BARRIER}]
    assert not root.pending


@in_virtual_time
async def test_members_that_say_another_number_of_members_are_told_both() -> None:
    root, one, two = root_here(), Heard(), Heard()
    arrive(root, one, 3, 8)
    arrive(root, two, 5, 9)
    assert one.headers == two.headers == [{"error": "count", "counts": [[3, 8], [5, 9]], "to": BARRIER}]


@in_virtual_time
async def test_members_at_different_barriers_are_told_a_second_later() -> None:
    root = root_here()
    one, two, other = Heard(), Heard(), Heard()
    arrive(root, other, 0, 3, group="supervisor", name="facts")
    arrive(root, one, 0, 2, name="a", call="fleet.save")
    arrive(root, two, 1, 2, name="b")
    await asyncio.sleep(0.9)
    assert one.frames == two.frames == []
    await asyncio.sleep(0.2)
    where = [[[[0, 0]], "a", "fleet.save"], [[[1, 1]], "b", ""]]
    assert [(header["error"], json.loads(body)) for header, body in one.frames + two.frames] == [("crossed", where)] * 2
    assert other.frames == []


@in_virtual_time
async def test_a_coincidence_is_no_mistake_and_is_looked_at_again() -> None:
    root, one, two, three = root_here(), Heard(), Heard(), Heard()
    arrive(root, one, 0, 3, name="a")
    arrive(root, two, 1, 3, name="b")
    await asyncio.sleep(5.0)  # the third may come to either
    assert one.frames == two.frames == []
    arrive(root, three, 2, 3, name="b")
    await asyncio.sleep(0.9)
    assert one.frames == []
    await asyncio.sleep(0.2)
    assert [heard.headers[0]["error"] for heard in (one, two, three)] == ["crossed"] * 3
    # Afterwards the same is seen again.
    arrive(root, one, 0, 2, name="a")
    arrive(root, two, 1, 2, name="b")
    await asyncio.sleep(1.1)
    assert len(one.frames) == len(two.frames) == 2


@in_virtual_time
async def test_members_that_come_to_the_same_place_meanwhile_are_left_alone() -> None:
    root = root_here()
    one, two = Heard(), Heard()
    arrive(root, one, 0, 2, name="a")
    arrive(root, two, 1, 2, name="b", timeout=0.5)
    await asyncio.sleep(0.6)
    assert two.headers[0]["error"] == "timeout"
    await asyncio.sleep(5.0)
    assert one.frames == []
    assert len(root.pending) == 1


@in_virtual_time
async def test_a_value_that_does_not_fit_is_refused_and_leaves_the_one_before() -> None:
    root = root_here()
    half = bytes(32 << 20)
    assert [root.put(key, half) for key in "ab"] == [True, True]
    assert not root.put("c", b"x")
    assert root.put("a", half)  # in place of the old one
    assert root.put("a", half[:-1])
    assert root.put("c", b"7")
    assert not root.put("d", b"x")
    assert not root.put("c", b"10")
    assert ask(root, {"do": "get", "key": "c"}) == ({}, 7)
    assert ask(root, {"do": "set", "key": "e"}, b"1") == ({"error": "full"}, None)
    assert ask(root, {"do": "keys", "prefix": ""}) == ({}, ["a", "b", "c"])


@in_virtual_time
async def test_keys_are_bounded_and_listed_by_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_MOST_KEYS", 3)
    root = root_here()
    assert [root.put(key, b"1") for key in ("ab", "b", "ac", "d")] == [True, True, True, False]
    assert root.put("b", b"2")
    assert ask(root, {"do": "keys", "prefix": "a"}) == ({}, ["ab", "ac"])
    assert [ask(root, {"do": "get", "key": key}) for key in "bd"] == [({}, 2), ({}, None)]


@in_virtual_time
async def test_a_failure_ends_every_barrier_and_the_first_one_stands() -> None:
    root, one, two, late = root_here(), Heard(), Heard(), Heard()
    arrive(root, one, 0, 2)
    arrive(root, two, 0, 2, group="supervisor")
    await asyncio.sleep(2.5)
    first, second = {"message": "first"}, {"message": "second"}
    for report in (first, second):
        assert ask(root, {"do": "fail"}, json.dumps(report).encode()) == ({}, None)
    for heard in (one, two):
        assert [(header["error"], json.loads(body)) for header, body in heard.frames] == [("failed", first)]
    arrive(root, late, 1, 2)
    assert json.loads(late.frames[0][1]) == first
    await asyncio.sleep(1.0)
    assert ask(root, {"do": "failures", "known": 0})[1] == [[first, 2.5], [second, 2.5]]
    assert ask(root, {"do": "failures", "known": 1})[1] == [[second, 2.5]]
    assert ask(root, {"do": "clock"}) == ({}, 3.5)
    for number in range(260):
        ask(root, {"do": "fail"}, json.dumps({"message": str(number)}).encode())
    kept = ask(root, {"do": "failures", "known": 254})[1]
    assert [report["message"] for report, _ in kept] == ["252", "253"], "so many are kept"


@in_virtual_time
async def test_whoever_is_gone_is_named_to_those_who_wait_for_it_only() -> None:
    root = root_here()
    for member in range(4):
        assert join(root, member, "far" if member > 1 else "near") == {}
    waiting, other, done = Heard(), Heard(), Heard()
    arrive(root, waiting, 0, 4, call="fleet.all_reduce")
    arrive(root, done, 1, 4, call="fleet.all_reduce")
    arrive(root, other, 0, 2, name="of two")
    root.depart("rank 1", "left")
    assert waiting.frames == []  # member 1 had arrived
    assert json.loads(other.frames[0][1]) == [[[[1, 1]], "left"]]
    root.depart("far", "its connection broke")
    header, body = waiting.frames[0]
    assert header == {"error": "gone", "call": "fleet.all_reduce", "to": BARRIER}
    assert json.loads(body) == [[[[2, 3]], "its connection broke"]]
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[1, 1]], "left"], [[[2, 3]], "its connection broke"]]
    assert ask(root, {"do": "gone", "group": "other"})[1] == []


@in_virtual_time
async def test_the_first_reason_for_which_a_member_is_gone_stands() -> None:
    root = root_here()
    join(root, 0)
    root.depart("rank 0", "left")
    root.depart("rank 0", "its connection broke")
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0]], "left"]]
    join(root, 1)
    root.depart("rank 1", "lost")
    ask(root, {"do": "ended", "group": "rank", "member": 1})
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0]], "left"], [[[1, 1]], "lost"]]
    assert join(root, 1) == {}
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0]], "left"]]


@in_virtual_time
async def test_a_process_that_has_ended_without_joining_is_not_waited_for() -> None:
    root = root_here()
    waiting = Heard()
    join(root, 0)
    arrive(root, waiting, 0, 2)
    assert ask(root, {"do": "ended", "group": "rank", "member": 0}) == ({}, None)  # it is here: its connection will say
    assert waiting.frames == []
    assert ask(root, {"do": "ended", "group": "rank", "member": 1}) == ({}, None)
    assert json.loads(waiting.frames[0][1]) == [[[[1, 1]], "left"]]


@in_virtual_time
async def test_a_member_may_join_once_in_each_group() -> None:
    root = root_here()
    assert join(root, 3) == {}
    assert join(root, 3) == {"error": "twice"}
    assert join(root, 3, group="supervisor") == {}
    with pytest.raises(ProtocolError, match="member"):
        join(root, 1 << 17)
    assert join(root, (1 << 17) - 1) == {}


@in_virtual_time
async def test_a_silent_machine_takes_its_members_with_it_in_every_group() -> None:
    root = root_here()
    for member, machine in enumerate(("a", "b", "a")):
        join(root, member, machine)
    join(root, 0, "a", "supervisor")
    join(root, 1, "b", "supervisor")
    waiting = Heard()
    arrive(root, waiting, 1, 2, group="supervisor")
    root.depart("a", "not heard of for 3 s")
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0], [2, 2]], "not heard of for 3 s"]]
    assert json.loads(waiting.frames[0][1]) == [[[[0, 0]], "not heard of for 3 s"]]


@in_virtual_time
async def test_what_cannot_be_asked_is_refused() -> None:
    for header in ({"do": "dance"}, {"do": "get"}, {"do": "get", "key": "k" * 501}, {"do": "failures", "known": 257}):
        with pytest.raises(ProtocolError):
            ask(root_here(), header)
    ask(root_here(), {"do": "get", "key": "k" * 500})


@in_virtual_time
async def test_a_member_reads_the_times_of_all_up_to_one_of_the_last_eight_barriers() -> None:
    root = root_here()
    for number in range(1, 13):
        arrive(root, Heard(), 0, 2, told=[number, 10 * number, 0.5])
        arrive(root, Heard(), 1, 2, told=[number, 20 * number, 0.25])

    def times(number: int) -> Any:
        return ask(root, {"do": "times", "group": "rank", "number": number})[1]

    assert times(12) == times(13) == [[0, [12.0, 120.0, 0.5]], [1, [12.0, 240.0, 0.25]]]
    assert times(5) == [[0, [5.0, 50.0, 0.5]], [1, [5.0, 100.0, 0.25]]]
    assert times(4) == []  # further back nothing is known any more
    assert ask(root, {"do": "times", "group": "supervisor", "number": 1})[1] == []


# a relay


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
async def test_a_relay_tells_who_is_there_while_others_are_late() -> None:
    relay, link = relay_of()
    members = [Heard() for _ in range(3)]
    arrive(relay, members[0], 0, 6)
    await asyncio.sleep(0.9)
    assert link.frames == []
    await asyncio.sleep(0.2)
    assert [(header["members"], header["again"]) for header in link.headers] == [([[0, 0]], False)]
    arrive(relay, members[1], 1, 6)
    assert len(link.frames) == 1
    await asyncio.sleep(0.16)
    arrive(relay, members[2], 2, 6)  # the last one is told at once
    assert [(header["members"], header["again"]) for header in link.headers[1:]] == [([[0, 1]], True), ([[0, 2]], True)]
    await asyncio.sleep(10.0)
    assert len(link.frames) == 3


@in_virtual_time
async def test_a_relay_that_has_told_all_does_not_tell_a_part_later() -> None:
    relay, link = relay_of()
    for member in range(3):
        arrive(relay, Heard(), member, 6)
        await asyncio.sleep(0.3)
    assert len(link.frames) == 1
    answer(relay, {"number": 1, "to": BARRIER})
    await asyncio.sleep(5.0)
    # The next round of the same barrier begins anew, with a second of patience.
    arrive(relay, Heard(), 0, 6)
    await asyncio.sleep(0.9)
    assert len(link.frames) == 1
    await asyncio.sleep(0.2)
    assert [header["again"] for header in link.headers] == [False, False]


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


def linked(silence: float = 4.0) -> tuple[Link, Transport, list[str]]:
    """A link that its parent has accepted, the connection, and why the parent counts as lost."""
    relay, _ = relay_of(silence=silence)
    link, transport = Link(relay), Transport()
    relay.link = link
    lost: list[str] = []
    relay.parent_lost = lost.append  # type: ignore[method-assign]
    link.connection_made(transport)
    return link, transport, lost


@in_virtual_time
async def test_a_link_beats_four_times_in_its_silence() -> None:
    link, transport, lost = linked()
    for _ in range(10):
        await asyncio.sleep(1.0)
        link.data_received(encode({"beat": True}))
    assert 10 <= transport.sent.headers.count({"do": "beat"}) <= 11
    assert lost == []
    link.close()
    transport.sent.take()
    await asyncio.sleep(20.0)
    assert transport.sent.frames == []
    assert lost == []


@in_virtual_time
async def test_a_parent_that_is_silent_is_lost() -> None:
    link, transport, lost = linked()
    await asyncio.sleep(3.5)
    link.data_received(encode({"beat": True}))
    await asyncio.sleep(3.9)
    assert lost == []
    await asyncio.sleep(1.5)
    assert lost == ["not heard of for 4 s"]
    assert transport.is_closing()
    link.connection_lost(None)
    assert len(lost) == 1


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
