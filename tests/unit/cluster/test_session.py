"""One connection to a server of the store, on a virtual clock: which messages it may send, and their effects."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.namespace import Reply
from fleet_train.cluster.store.relay import Parent, Relay
from fleet_train.cluster.store.server import Session, StoreServer
from fleet_train.cluster.store.wire import LENGTHS, encode, pack_times, raise_descriptor_limit
from fleet_train.errors import ClusterError
from tests.support.connections import Transport, in_virtual_time
from tests.support.processes import ROOT, clean_environ

WELCOME = {"welcome": True, "proof": ""}


def hall_here(**options: Any) -> StoreServer:
    """A server on this loop, without a port."""
    state = StoreServer("10.0.0.1", 0, **options)
    state._begin()
    if options.get("begins_namespaces", True):
        state.root("0")
    return state


class Caller:
    """Whoever has connected: it says frames, and keeps what it hears."""

    def __init__(self, state: StoreServer, address: str = "10.0.0.9") -> None:
        self.transport = Transport(address)
        self.session = Session(state)
        self._state = state
        self.session.connection_made(self.transport)

    def write(self, data: bytes) -> None:
        self.session.data_received(data)

    def say(self, header: dict[str, Any], body: bytes = b"") -> list[dict[str, Any]]:
        """The headers of what it is answered at once."""
        self.transport.sent.take()
        self.write(encode(header, body))
        return self.transport.sent.headers

    def hello(self, **fields: Any) -> list[dict[str, Any]]:
        told = {"do": "hello", "job": "", "nonce": "n", "namespace": "0", "group": "rank", "member": 0, "watched": True}
        return self.say(told | fields)

    def lose(self) -> None:
        self.session.connection_lost(None)

    @property
    def is_ended(self) -> bool:
        return self.transport.is_closing()


def member(state: StoreServer, number: int, **fields: Any) -> Caller:
    caller = Caller(state)
    assert caller.hello(member=number, **fields) == [WELCOME]
    return caller


def relay(state: StoreServer, number: int = 1, **fields: Any) -> Caller:
    return member(state, number, role="relay", group="relay", machine=f"node {number}", **fields)


class Waiting(Relay):
    """A relay whose parent answers nothing; ``asked``: what waits for it."""

    def __init__(self, state: StoreServer) -> None:
        super().__init__(state.clock, Parent("10.0.0.1", 6170, "0", 1, "node 1", 0b11, Access()))
        self.asked: list[tuple[dict[str, Any], Reply]] = []
        state.namespaces["0"] = self

    def ask(self, request: dict[str, Any], body: bytes, reply: Reply) -> None:  # noqa: ARG002
        self.asked.append((request, reply))


def gone(state: StoreServer, group: str = "rank") -> Any:
    answers: list[bytes] = []
    state.namespaces["0"].ask({"do": "gone", "group": group}, b"", lambda _, body: answers.append(bytes(body)))
    return json.loads(answers[0])


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


@pytest.mark.parametrize("hello", [{"nonce": "\ud800"}, {"proof": "\ud800"}, {"group": "\ud800"}, {"member": [0]}])
@in_virtual_time
async def test_what_cannot_be_signed_is_refused_without_a_word(hello: dict[str, Any]) -> None:
    """Half a surrogate pair is a text in JSON, and in no encoding of bytes."""
    caller = Caller(hall_here(access=Access("job", b"x" * 20)))
    caller.hello(**({"job": "job", "proof": "00"} | hello))
    assert caller.is_ended


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


@in_virtual_time
async def test_large_frames_are_for_those_who_are_known_and_values_are_not_parsed() -> None:
    state = hall_here()
    stranger = Caller(state)
    stranger.write(encode({"do": "hello"}, bytes(4097)))
    assert stranger.is_ended
    known = member(state, 0, watched=False)
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


@in_virtual_time
async def test_a_silent_relay_is_lost_with_all_below_it() -> None:
    state = hall_here()
    caller = relay(state, silence=3.0)
    for number in (4, 5):
        join = {"do": "join", "group": "rank", "member": number, "via": ["x", f"connection {number}"]}
        assert caller.say(join | {"id": number}) == [{"id": number}]
    assert state.has_members()
    leave = {"do": "depart", "via": "connection 5", "how": "left"}
    assert caller.say(leave | {"id": 6}) == [{"id": 6}]
    await asyncio.sleep(3.1)
    assert caller.transport.ends == ["aborted"]
    caller.lose()
    assert gone(state) == [[[[4, 4]], "the relay of node 1 was not heard of for 3 s"], [[[5, 5]], "left"]]
    assert not state.has_members()


@in_virtual_time
async def test_a_relay_whose_connection_breaks_is_named_with_those_that_had_joined() -> None:
    state = hall_here()
    caller = relay(state)
    member(state, 7)
    for number in (4, 7):
        caller.say({"do": "join", "id": number, "group": "rank", "member": number, "via": ["x"]})
    assert caller.transport.sent.headers == [{"error": "twice", "id": 7}]
    caller.lose()
    assert gone(state) == [[[[4, 4]], "the relay of node 1 was lost"]]
    assert state.connected_members("rank", "0") == {7}


# what is said


@in_virtual_time
async def test_members_meet_and_their_times_are_kept() -> None:
    state = hall_here()
    one, two = member(state, 0), member(state, 1)
    assert one.say(barrier(2, calls=[["fleet.save", [[0, 0]]]]), pack_times(0, [1, 10, 5])) == []
    answer = {"slowest": 1.0, "stop": None, "number": 1, "to": ["rank", "barrier", "s"]}
    assert two.say(barrier(2), pack_times(1, [2, 20, 6])) == [answer]
    assert one.transport.sent.headers == [answer]
    one.say({"do": "times", "group": "rank", "number": 1})
    assert json.loads(one.transport.sent.frames[0][1]) == [[0, [1.0, 10.0, 5.0]], [1, [2.0, 20.0, 6.0]]]


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
        barrier(3, slowest=-1),
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


@in_virtual_time
async def test_a_lost_relay_loses_those_that_joined_by_way_of_it_over_several_levels() -> None:
    state = hall_here()
    near, far = relay(state, 1), relay(state, 2)
    for number, caller in ((4, near), (5, far)):
        caller.say(
            {"do": "join", "id": 1, "group": "rank", "member": number, "via": ["m", f"c{number}", "relay below"]}
        )
    near.say({"do": "depart", "id": 2, "via": "c4", "how": "left"})
    far.say({"do": "depart", "id": 2, "via": "relay below", "how": "the relay of node 9 was lost"})
    assert gone(state) == [[[[4, 4]], "left"], [[[5, 5]], "the relay of node 9 was lost"]]
    assert not state.has_members()


# what connections share


class Stranger:
    """A connection, as far as the hall knows it."""

    stands_for_members = False

    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1

    def tick(self, now: float) -> None:
        pass


@in_virtual_time
async def test_of_too_many_strangers_the_oldest_is_closed() -> None:
    state = hall_here()
    known, strangers = Stranger(), [Stranger() for _ in range(258)]
    state.admit(known, "10.0.0.9")
    state.know(known)
    for number, stranger in enumerate(strangers):
        assert state.admit(stranger, "10.0.0.9")
        if number == 3:
            state.forget(strangers[0])
    assert [number for number, stranger in enumerate(strangers) if stranger.aborted] == [1]
    assert not known.aborted
    state._close_all()
    assert [stranger.aborted for stranger in (known, *strangers[:3])] == [1, 0, 1, 1]


@in_virtual_time
async def test_refused_addresses_are_logged_once_each_and_not_all(capsys: pytest.CaptureFixture[str]) -> None:
    state = hall_here(callers=Callers(["10.0.0.1"]))
    for last in [*range(2, 12), 2, 3]:
        assert not state.admit(Stranger(), f"10.0.0.{last}")
    # an address that may be heard a moment later is not named
    assert not hall_here(callers=Callers(["localhost"])).admit(Stranger(), "10.0.0.2")
    assert hall_here(access=Access(secret=b"x" * 20), callers=Callers(["10.0.0.1"])).admit(Stranger(), "10.0.0.2")
    assert capsys.readouterr().err.splitlines() == [
        f"fleet_train: refused a connection from 10.0.0.{last}, which is not in the node list" for last in range(2, 10)
    ]


@in_virtual_time
async def test_who_may_begin_a_namespace() -> None:
    state = hall_here()
    assert state.find("0", is_relay=False) is state.namespaces["0"]
    assert state.find("1", is_relay=True) is None
    assert state.find("0.selftest", is_relay=True) is state.namespaces["0.selftest"]
    assert state.find("1", is_relay=False) is state.namespaces["1"]
    assert state.find("1", is_relay=True) is state.namespaces["1"]
    assert len({id(namespace) for namespace in state.namespaces.values()}) == 3
    closed = hall_here(begins_namespaces=False)
    assert closed.find("0", is_relay=False) is closed.find("0.selftest", is_relay=False) is None
    closed.root("0")
    assert closed.find("0.selftest", is_relay=False) is closed.namespaces["0.selftest"]
    assert closed.root("0") is closed.namespaces["0"]


@in_virtual_time
async def test_namespaces_are_bounded() -> None:
    state = hall_here()
    for number in range(4097):
        state.find(str(number), is_relay=False)
    assert len(state.namespaces) == 4096
    assert state.find("0.inner", is_relay=False) is state.find("4096", is_relay=False) is None


@in_virtual_time
async def test_a_namespace_within_a_relays_is_opened_once_for_all_who_ask() -> None:
    state = hall_here(begins_namespaces=False)
    Waiting(state)
    may_open = threading.Event()
    opened: list[tuple[str, int, float]] = []

    def open_relay(parent: Parent, timeout_seconds: float) -> None:
        opened.append((parent.namespace, parent.number, timeout_seconds))
        may_open.wait(30)
        if parent.namespace == "0.closed":
            raise ClusterError("not opened")
        state.namespaces[parent.namespace] = Relay(state.clock, parent)

    def open_all() -> None:
        may_open.set()
        for thread in [each for each in threading.enumerate() if each.name == "fleet_train relay"]:
            thread.join(30)

    state.open_relay = open_relay  # type: ignore[method-assign]
    for name in ("0.selftest", "0.selftest", "0.closed"):
        caller = Caller(state)
        assert caller.hello(namespace=name) == [{"error": "closed"}]  # for now: it asks again
        assert caller.is_ended
    open_all()
    assert state.find("0.selftest", is_relay=False) is state.namespaces["0.selftest"]
    assert sorted(opened) == [("0.closed", 1, 30.0), ("0.selftest", 1, 30.0)]
    # One that could not be opened may be tried again.
    assert state.find("0.closed", is_relay=False) is None
    open_all()
    assert len(opened) == 3
    state.root("1")
    state._close_namespace("0")
    state._close_namespace("1")
    assert set(state.namespaces) == {"1"}


@in_virtual_time
async def test_members_are_lost_in_every_namespace_and_seen_by_their_group() -> None:
    state = hall_here()
    one, two = member(state, 0, machine="m"), member(state, 1, machine="m", namespace="1")
    member(state, 2, machine="other")
    assert (state.connected_members("rank", "0"), state.connected_members("rank", "1")) == ({0, 2}, {1})
    assert state.connected_members("supervisor", "0") == state.connected_members("rank", "2") == set()
    state.lose("m at 10.0.0.9", "silent")
    assert (state.connected_members("rank", "0"), state.connected_members("rank", "1")) == ({2}, set())
    assert gone(state) == [[[[0, 0]], "silent"]]
    assert not one.is_ended
    assert not two.is_ended


# the server


def test_a_server_that_has_stopped_is_not_there_any_more() -> None:
    server = StoreServer("127.0.0.1", 0)
    assert (server.has_members(), server.connected_members()) == (False, set())  # nor before it is started
    server.start()
    with socket.create_connection((server.host, server.port), timeout=10):
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((server.host, server.port), timeout=10)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((server.host, server.port))
        again.listen()
    server.stop()


@pytest.mark.parametrize(
    ("limits", "wanted", "made"),
    [
        ((1024, 4096), 1024, None),
        ((1024, 4096), 1025, (1025, 4096)),
        ((1024, 4096), 4096, (4096, 4096)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 5000, None),
        ((1024, resource.RLIM_INFINITY), 5000, (5000, resource.RLIM_INFINITY)),
    ],
)
def test_as_many_files_may_be_open_as_members_need(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, made: tuple[int, int] | None
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, now: found.append(now))
    raise_descriptor_limit(wanted)
    assert found == ([] if made is None else [made])
    if limits[1] == 4096:
        with pytest.raises(ClusterError, match=r"needs 4097 open files .* may have 4096 at most"):
            raise_descriptor_limit(4097)
        with pytest.raises(ClusterError, match=r"needs \d+ open files"):
            StoreServer("127.0.0.1", 0, members=4096).start()


def test_a_process_ends_although_its_server_was_never_stopped() -> None:
    code = (
        "from fleet_train.cluster.store.server import StoreServer\n"
        "server = StoreServer('127.0.0.1', 0).start()\n"
        "assert server.has_members() is False\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean_environ(), check=True, timeout=300)
