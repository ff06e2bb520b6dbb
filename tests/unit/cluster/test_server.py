"""What the connections of a server share: strangers, namespaces, members; and the server's start and end."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading

import pytest

from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.relay import Parent, Relay
from fleet_train.cluster.store.server import StoreServer
from fleet_train.cluster.store.wire import raise_descriptor_limit
from fleet_train.errors import ClusterError
from tests.support.connections import Caller, Waiting, gone, hall_here, in_virtual_time, member
from tests.support.processes import ROOT, clean_environ


@in_virtual_time
async def test_of_too_many_strangers_the_oldest_is_closed() -> None:
    state = hall_here()
    known, strangers = member(state, 0), [Caller(state) for _ in range(4)]
    strangers[0].lose()
    strangers += [Caller(state) for _ in range(254)]
    assert [number for number, stranger in enumerate(strangers) if stranger.is_ended] == [1]
    assert not known.is_ended
    state._close_all()
    assert [each.transport.ends.count("aborted") for each in (known, *strangers[:3])] == [1, 0, 1, 1]


@in_virtual_time
async def test_refused_addresses_are_logged_once_each_and_not_all(capsys: pytest.CaptureFixture[str]) -> None:
    state = hall_here(callers=Callers(["10.0.0.1"]))
    assert all(Caller(state, f"10.0.0.{last}").is_ended for last in [*range(2, 12), 2, 3])
    # an address that may be heard a moment later is not named
    assert Caller(hall_here(callers=Callers(["localhost"])), "10.0.0.2").is_ended
    assert not Caller(hall_here(access=Access(secret=b"x" * 20), callers=Callers(["10.0.0.1"])), "10.0.0.2").is_ended
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
