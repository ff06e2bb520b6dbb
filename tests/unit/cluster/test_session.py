"""One connection to a server of the store, on a virtual clock: which messages it may send, and their effects."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.server import StoreServer
from fleet_train.cluster.store.wire import LENGTHS, encode
from tests.support.connections import WELCOME, Caller, Waiting, gone, hall_here, in_virtual_time, member


def relay(state: StoreServer, number: int = 1, **fields: Any) -> Caller:
    return member(state, number, role="relay", group="relay", machine=f"node {number}", **fields)


def barrier(count: int, **fields: Any) -> dict[str, Any]:
    return {"do": "barrier", "name": "s", "count": count, "timeout": 60.0, "slowest": 1.0} | fields


def part(members: object, calls: object = (), count: int = 4, **fields: Any) -> dict[str, Any]:
    return barrier(count, group="rank", members=members, calls=list(calls), **fields)  # type: ignore[call-overload]


# who connects


@in_virtual_time
async def test_who_says_nothing_or_half_is_closed_after_five_seconds_and_a_member_is_not() -> None:
    state = hall_here()
    silent, half, known = Caller(state), Caller(state), member(state, 0)
    half.write(LENGTHS.pack(100, 0) + b'{"do": "he')
    await asyncio.sleep(4.9)
    assert not silent.is_ended
    await asyncio.sleep(0.2)
    assert silent.is_ended
    assert half.is_ended
    await asyncio.sleep(1000.0)
    assert not known.is_ended
    assert state.connected_members("rank", "0") == {0}
    assert state.has_members()


@in_virtual_time
async def test_a_connection_is_watched_by_the_kernel() -> None:
    options = Caller(hall_here()).transport.options
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) in options
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1) in options
    assert (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000) in options


@pytest.mark.parametrize(
    ("options", "hello", "answer"),
    [
        ({"callers": Callers(["10.0.0.1"])}, None, {"error": "address", "address": "10.0.0.9", "later": False}),
        ({"callers": Callers(["a", "localhost"])}, None, {"error": "address", "address": "10.0.0.9", "later": True}),
        ({"begins_namespaces": False}, {}, {"error": "closed"}),
        ({"access": Access("ours")}, {"job": "theirs"}, {"error": "job", "job": "ours"}),
    ],
)
@in_virtual_time
async def test_who_is_refused_is_told_why_and_closed(
    options: dict[str, Any], hello: dict[str, Any] | None, answer: dict[str, Any]
) -> None:
    state = hall_here(**options)
    caller = Caller(state)
    assert (caller.transport.sent.headers if hello is None else caller.hello(**hello)) == [answer]
    assert caller.transport.ends == ["closed"]
    assert len(state.namespaces) == ("begins_namespaces" not in options)
    heard = Caller(hall_here(callers=Callers(["10.0.0.1"])), "10.0.0.1")
    assert heard.hello() == [WELCOME]


@in_virtual_time
async def test_the_same_member_twice_is_refused_and_the_first_stays() -> None:
    state = hall_here()
    first, second = member(state, 3), Caller(state)
    assert second.hello(member=3) == [{"error": "twice"}]
    assert second.is_ended
    second.lose()
    assert state.connected_members("rank", "0") == {3}
    assert gone(state) == []
    assert not first.is_ended


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTHS.pack(5000, 0),
        LENGTHS.pack(10, 60 << 20),
        LENGTHS.pack(4000, 0) + b"[" * 4000,
        b"\x00" * 100_000,
        encode({"do": "set", "key": "a"}, b"1"),
        encode({"do": "hello"}),
        encode({"do": "hello"}, bytes(4097)),
    ],
)
@in_virtual_time
async def test_a_stranger_that_says_something_else_is_closed(said: bytes) -> None:
    stranger = Caller(hall_here())
    stranger.write(said)
    assert stranger.is_ended


@in_virtual_time
async def test_frames_of_members_are_large_and_values_are_not_parsed() -> None:
    known = member(hall_here(), 0, watched=False)
    assert known.say({"do": "set", "key": "large and deep"}, b"[" * 1_000_000) == [{}]


@in_virtual_time
async def test_two_hellos_are_one_too_many() -> None:
    """The second comes while the first waits for its relay's parent, in the same packet."""
    state = hall_here()
    Waiting(state)
    caller = Caller(state)
    assert caller.hello() == []
    assert not caller.is_ended
    caller.hello()
    assert caller.is_ended


@in_virtual_time
async def test_who_has_gone_before_it_was_taken_is_gone() -> None:
    state = hall_here()
    waiting = Waiting(state)
    caller = Caller(state)
    caller.hello(member=2)
    (_, reply) = waiting.asked.pop()
    caller.session.close()
    reply({}, b"")
    assert [(request["do"], request["how"]) for request, _ in waiting.asked] == [("depart", "its connection broke")]


# who is lost


@in_virtual_time
async def test_a_broken_connection_loses_its_member_and_what_leaves_has_left() -> None:
    state = hall_here()
    one, two, unwatched = member(state, 0), member(state, 1), member(state, 2, watched=False)
    assert unwatched.say(barrier(3)) == []
    unwatched.lose()
    assert not state.namespaces["0"].pending, "a lost waiter leaves its barrier to the others"
    assert two.say({"do": "leave"}) == [{}]
    one.lose()
    two.lose()
    assert gone(state) == [[[[0, 0]], "its connection broke"], [[[1, 1]], "left"]]
    assert not state.has_members()


@in_virtual_time
async def test_a_silent_member_is_lost_with_its_machine_at_that_address() -> None:
    state = hall_here()
    silent = member(state, 0, machine="m", silence=3.0)
    beside = member(state, 1, machine="m")
    unwatched = member(state, 3, silence=1.0, watched=False)
    elsewhere = Caller(state, "10.0.0.8")
    elsewhere.hello(member=2, machine="m")
    await asyncio.sleep(2.0)
    assert silent.say({"do": "beat"}) == [{"beat": True}]
    await asyncio.sleep(2.9)
    assert not silent.is_ended
    await asyncio.sleep(0.2)
    assert silent.transport.ends == ["aborted"]
    assert gone(state) == [[[[0, 1]], "not heard of for 3 s"]]
    assert not beside.is_ended
    assert not unwatched.is_ended, "only a member that is watched can be silent"


@pytest.mark.parametrize(
    ("is_silent", "why"),
    [(True, "the relay of node 1 was not heard of for 3 s"), (False, "the relay of node 1 was lost")],
)
@in_virtual_time
async def test_a_lost_relay_loses_those_that_joined_by_way_of_it_over_several_levels(is_silent: bool, why: str) -> None:
    state = hall_here()
    caller = relay(state, silence=3.0)
    other = member(state, 7)
    for number, *below in ((4,), (5,), (6, "relay below"), (7,)):
        via = {"group": "rank", "member": number, "via": ["x", f"connection {number}", *below]}
        told = caller.say({"do": "join", "id": number} | via)
        assert told == [{"id": number} if number < 7 else {"error": "twice", "id": 7}]
    for gone_via, how in (("connection 5", "left"), ("relay below", "the relay of node 9 was lost")):
        assert caller.say({"do": "depart", "id": 8, "via": gone_via, "how": how}) == [{"id": 8}]
    assert state.has_members()
    if is_silent:
        await asyncio.sleep(3.1)
        assert caller.transport.ends == ["aborted"]
    caller.lose()
    assert gone(state) == [[[[4, 4]], why], [[[5, 5]], "left"], [[[6, 6]], "the relay of node 9 was lost"]]
    assert state.connected_members("rank", "0") == {7}
    other.lose()
    assert not state.has_members()


# what is said


@pytest.mark.parametrize(
    "header",
    [
        barrier(2),  # member 2 of two
        barrier(0),
        barrier(1 << 18),
        barrier(3, name="n" * 501),
        barrier(3, timeout=2e7),
        barrier(3, calls=[[7, [[2, 2]]]]),
        barrier(3, calls=[["a", [[1, 1]]]]),
        barrier(3, members=[[1, 1]]),
        barrier(3, group="rank"),
        barrier(True),
        barrier(2.5),
        barrier(3, name=7),
        barrier(3, slowest=-1),
        barrier(3, slowest=True),
        barrier(3, stop="now"),
        barrier(3, stop=[9, "now"]),
        barrier(3, stop=[1, 2]),
        barrier(3, digest=-1),
        barrier(3, digest=1 << 32),
        barrier(3, do="broadcast", source=1),
        {"do": "join", "group": "rank", "member": 5},
        {"do": "depart", "via": "m at 10.0.0.9", "how": "left"},
        {"do": "hello"},
        {"do": "dance"},
        {"do": "d" * 21},
        {"do": ["set"]},
        {"do": "failures", "known": -1},
        {"do": "get"},
        {"do": "ended", "group": "rank", "member": 10**12},
        {"do": "fail"},
    ],
)
@in_virtual_time
async def test_a_member_that_breaks_the_rules_is_closed(header: dict[str, Any]) -> None:
    state = hall_here()
    caller = member(state, 2)
    assert caller.say(header) == []
    assert caller.is_ended
    assert state.connected_members("rank", "0") == {2}  # until its connection has ended


@in_virtual_time
async def test_who_says_as_much_as_is_allowed_stays() -> None:
    caller = member(hall_here(), 2)
    assert caller.say(barrier(3, name="n" * 500, timeout=1e7)) == []
    assert not caller.is_ended
    caller = relay(hall_here())
    assert caller.say(part([[1, 1]], [[str(number), [[1, 1]]] for number in range(64)])) == []
    assert not caller.is_ended


@in_virtual_time
async def test_nothing_is_heard_behind_what_breaks_the_rules() -> None:
    state = hall_here()
    caller = member(state, 0)
    caller.say({"do": "dance"})
    caller.say({"do": "set", "key": "a"}, b"1")
    caller = member(state, 1)
    caller.session.close()
    caller.say({"do": "set", "key": "b"}, b"1")
    assert member(state, 2).say({"do": "keys", "prefix": ""}) == [{}]
    answers: list[bytes] = []
    state.namespaces["0"].ask({"do": "keys", "prefix": ""}, b"", lambda _, body: answers.append(bytes(body)))
    assert answers == [b"[]"]


@in_virtual_time
async def test_a_member_that_does_not_read_is_not_heard() -> None:
    caller = member(hall_here(), 0)
    caller.session.pause_writing()
    caller.session.resume_writing()
    assert caller.transport.ends == ["paused", "resumed"]
    caller.session.close()
    caller.session.resume_writing()
    assert caller.transport.ends == ["paused", "resumed", "closed"]


# what relays say


@in_virtual_time
async def test_a_relay_speaks_for_its_members_with_what_they_have_called() -> None:
    state = hall_here()
    caller = relay(state)
    assert caller.say(part([[1, 2]], [["fleet.save", [[1, 1]]]])) == []
    (waiting,) = state.namespaces["0"].pending.values()
    assert (waiting.arrived, waiting.calls) == (0b110, {"fleet.save": 0b010})
    assert caller.say(part([[1, 3]], again=True)) == []
    assert waiting.arrived == 0b1110
    member(state, 0).say(barrier(4))
    assert caller.transport.sent.headers == [
        {"slowest": 1.0, "stop": None, "number": 1, "to": ["rank", "barrier", "s"]}
    ]
    # What it says again has crossed the answer on its way: no new round begins.
    assert caller.say(part([[1, 3]], again=True)) == []
    assert not state.namespaces["0"].pending


@pytest.mark.parametrize(
    "header",
    [
        part([]),
        part([[0, 4]]),
        *(
            part([[1, 1]]) | {"calls": calls}
            for calls in (
                [["a"]],
                [[1, [[1, 1]]]],
                ["ab"],
                [["", [[1, 1]]]],
                [["a", [[2, 2]]]],
                [["a", [[4, 4]]]],
                [["a", [[1, 1]]]] * 65,
                {"a": [[1, 1]]},
            )
        ),
        {"do": "get", "key": "a"},  # without a number
        {"do": "get", "key": "a", "id": -1},
        {"do": "dance", "id": 1},
        *({"do": "join", "id": 1, "group": "rank", "member": 5, "via": via} for via in ("x", [5], ["x"] * 10)),
    ],
)
@in_virtual_time
async def test_a_relay_that_breaks_the_rules_is_closed(header: dict[str, Any]) -> None:
    caller = relay(hall_here())
    assert caller.say(header) == []
    assert caller.is_ended
