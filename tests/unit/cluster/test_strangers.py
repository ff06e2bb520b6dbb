"""Unauthorised connections: whatever they send, members' barriers go on and nothing is printed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_train import timeouts
from fleet_train.cluster.store import server as servers_server
from fleet_train.cluster.store import wire
from fleet_train.cluster.store.access import Access, Callers, challenge, job_secret
from fleet_train.cluster.store.client import StepNote, StoreClient
from fleet_train.cluster.store.server import StoreServer
from fleet_train.cluster.store.wire import (
    LENGTHS,
    Decoder,
    ProtocolError,
    encode,
    parse,
    raise_descriptor_limit,
)
from fleet_train.errors import ClusterError, ScheduleMismatch, WorkerFailed

SECRET = b"correct horse battery staple"
HELLO = {
    "do": "hello",
    "job": "",
    "nonce": "n",
    "namespace": "",
    "group": "rank",
    "member": 5,
    "watched": False,
}


@pytest.fixture
def server(capfd: pytest.CaptureFixture[str]) -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0).start()
    yield server
    server.stop()
    assert capfd.readouterr().err == ""  # no traceback, whatever was sent


def started(**options: Any) -> StoreServer:
    return StoreServer("127.0.0.1", 0, **options).start()


def dial(server: StoreServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=10)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection within the socket's timeout, whatever it says before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def members_meet(server: StoreServer, turns: int = 3) -> None:
    clients = [StoreClient.connect(server.endpoint, i, timeout_seconds=5, watched=False) for i in range(2)]
    for turn in range(turns):
        other = threading.Thread(target=clients[1].barrier, args=(f"step {turn}", StepNote(1, 1.0, 1.0), 2, 10))
        other.start()
        clients[0].barrier(f"step {turn}", StepNote(1, 1.0, 1.0), 2, 10)
        other.join()
    for client in clients:
        client.close()


# addresses, jobs, secrets


def test_an_address_outside_the_node_list_is_refused_and_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    server = started(callers=Callers(["127.0.0.2"]))
    try:
        for _ in range(3):
            with pytest.raises(ClusterError, match=r"accepts the addresses of the node list only, and this connection"):
                StoreClient.connect(server.endpoint, 0, timeout_seconds=2)
        node = StoreClient.connect(server.endpoint, 0, timeout_seconds=5, access=Access(source="127.0.0.2"))
        assert node.get("nothing") is None
        node.close()
    finally:
        server.stop()
    expected = "fleet_train: refused a connection from 127.0.0.1, which is not in the node list\n"
    assert capfd.readouterr().err == expected


def test_an_address_of_another_machine_is_no_hindrance() -> None:
    """Behind a translation of addresses a node's own is none of this machine's: then the kernel chooses."""
    server = started()
    try:
        node = StoreClient.connect(server.endpoint, 0, timeout_seconds=5, access=Access(source="192.0.2.7"))
        assert node.get("nothing") is None
        node.close()
    finally:
        server.stop()


def test_another_job_is_refused_by_name() -> None:
    server = started(access=Access("train.py-1"))
    try:
        with pytest.raises(ClusterError, match=r"belongs to another job, 'train.py-1', and this is 'other.py-2'"):
            StoreClient.connect(server.endpoint, 0, timeout_seconds=2, access=Access("other.py-2"))
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (SECRET, None, "requires this job's secret"),
        (SECRET, b"x" * 20, "another secret"),
        (None, SECRET, "has no job secret and this node has one"),
    ],
)
def test_who_does_not_know_the_secret_is_refused(ours: bytes | None, theirs: bytes | None, why: str) -> None:
    server = started(access=Access("job", ours))
    try:
        with pytest.raises(ClusterError, match=why):
            StoreClient.connect(server.endpoint, 0, timeout_seconds=2, access=Access("job", theirs))
    finally:
        server.stop()


def test_with_a_secret_addresses_may_differ_and_it_never_travels() -> None:
    server = started(access=Access("job", SECRET), callers=Callers(["10.0.0.1"]))
    seen = bytearray()
    proxy = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        def copy(one: socket.socket, other: socket.socket) -> None:
            while data := one.recv(65536):
                seen.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)  # the other thread may be reading from it

        inside, _ = proxy.accept()
        with inside, dial(server) as outside:
            back = threading.Thread(target=copy, args=(outside, inside), daemon=True)
            back.start()
            copy(inside, outside)
            back.join()

    threading.Thread(target=pass_on, daemon=True).start()
    try:
        endpoint = f"127.0.0.1:{proxy.getsockname()[1]}"
        client = StoreClient.connect(endpoint, 0, timeout_seconds=5, access=Access("job", SECRET))
        client.set("a", 1)
        client.close()
    finally:
        proxy.close()
    assert b'"proof"' in seen
    assert SECRET not in seen
    # What was recorded once is of no use: the server draws another nonce.
    try:
        words = [parse(head) for head, _ in Decoder().feed(bytes(seen))]
        with dial(server) as replay:
            replay.sendall(encode(next(word for word in words if word.get("do") == "hello")))
            assert is_closed(replay)
    finally:
        server.stop()


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    """It sends the caller's own proof back, as far as it can know one."""
    fake = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = fake.accept()
        sock.sendall(encode(challenge(Access("job", b"y" * 20))))
        hello = parse(sock.recv(65536)[LENGTHS.size :])
        sock.sendall(encode({"welcome": True, "proof": hello["proof"]}))
        sock.recv(65536)
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(ClusterError, match="another secret"):
            StoreClient.connect(
                f"127.0.0.1:{fake.getsockname()[1]}", 0, timeout_seconds=3, access=Access("job", SECRET)
            )
    finally:
        fake.close()
        thread.join()


def test_the_secret_comes_from_a_file_of_its_own_user_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)}) == SECRET
    assert job_secret({"FLEET_TRAIN_JOB_SECRET": SECRET.decode()}) == SECRET
    assert job_secret({}) is None
    for mode in (0o600, 0o400, 0o640):
        file.chmod(mode)
        assert job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)}, warns=True) == SECRET
    assert capfd.readouterr().err == ""
    file.chmod(0o644)
    assert job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)}, warns=True) == SECRET
    assert job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)}) == SECRET
    warning = f"fleet_train: every user here can read the job's secret in {file} (mode 0644); chmod 600 {file}\n"
    assert capfd.readouterr().err == warning
    with monkeypatch.context() as patched:  # as Kubernetes mounts it
        patched.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
        job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)}, warns=True)
    assert capfd.readouterr().err == ""
    file.chmod(0o622)
    with pytest.raises(ClusterError, match="can be changed by other users"):
        job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)})
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ClusterError, match="has 5 bytes"):
        job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)})
    with pytest.raises(ClusterError, match="cannot be read"):
        job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(tmp_path / "none")})
    with pytest.raises(ClusterError, match="not a regular file"):
        job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": "/dev/zero"})
    with pytest.raises(ClusterError, match="both set"):
        job_secret({"FLEET_TRAIN_JOB_SECRET_FILE": str(file), "FLEET_TRAIN_JOB_SECRET": "x" * 20})
    assert SECRET.decode() not in repr(Access("job", SECRET))


def test_only_the_own_machine_can_be_lost_by_falling_silent(server: StoreServer) -> None:
    node = Access(source="127.0.0.2")
    other = StoreClient.connect(server.endpoint, 0, timeout_seconds=5, machine="127.0.0.2", access=node)
    liar = StoreClient.connect(
        server.endpoint,
        1,
        timeout_seconds=5,
        machine="127.0.0.2",
        silence_seconds=0.1,
        access=Access(source="127.0.0.3"),
    )
    while 1 not in other.gone():
        time.sleep(0.02)
    assert set(other.gone()) == {1}
    other.close()
    liar.close()


def test_more_open_files_than_there_may_be_are_refused_with_the_way_out() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this process may open as many files as it likes")
    with pytest.raises(
        ClusterError, match=r"needs \d+ open files \(ulimit -n\) for this job, and this process may have"
    ):
        started(members=hard)


# before the hello


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"do": "hello"}\n',
        struct.pack(">II", 5000, 0),
        struct.pack(">II", 10, 60 << 20),
        encode({"do": "set", "key": "a"}, b"1"),
        encode({"do": "hello"}),
        LENGTHS.pack(4000, 0) + b"[" * 4000,
        LENGTHS.pack(4000, 0) + b"1" * 4000,
        b"\x00" * 100_000,
    ],
)
def test_a_stranger_that_says_something_else_is_closed(server: StoreServer, said: bytes) -> None:
    with dial(server) as stranger:
        try:
            stranger.sendall(said)
        except ConnectionError:
            return
        assert is_closed(stranger)
    members_meet(server)


def test_a_stranger_that_says_nothing_or_half_is_closed_in_time(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "STRANGERS_SECONDS", 0.3)
    with dial(server) as silent, dial(server) as half:
        half.sendall(LENGTHS.pack(100, 0) + b'{"do": "he')
        assert is_closed(silent)
        assert is_closed(half)


def test_of_many_idle_connections_only_a_few_are_kept(server: StoreServer) -> None:
    raise_descriptor_limit(4000)
    idle = [dial(server) for _ in range(1500)]
    try:
        members_meet(server)
        assert 0 < len(server._strangers) <= 256
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.parametrize(
    ("hello", "proof"),
    [
        ({"nonce": "\ud800"}, "00"),  # a text in JSON, and in no encoding of bytes
        ({"nonce": "n"}, "\ud800"),
        ({"nonce": "n", "group": "\ud800"}, "00"),
        ({"nonce": "n", "member": [0]}, "00"),
    ],
)
def test_what_cannot_be_signed_is_refused_without_a_word(
    hello: dict[str, Any], proof: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server = started(access=Access("job", SECRET))
    try:
        with dial(server) as stranger:
            stranger.sendall(encode({"do": "hello", "job": "job", "proof": proof, **hello}))
            assert is_closed(stranger)
        StoreClient.connect(server.endpoint, 0, timeout_seconds=5, access=Access("job", SECRET)).close()
    finally:
        server.stop()
    assert capfd.readouterr().err == ""


def test_an_error_of_the_server_itself_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault of this test")

    monkeypatch.setattr(servers_server.Session, "hear", broken)
    server = started()
    try:
        for _ in range(3):
            with dial(server) as stranger:
                stranger.sendall(encode(HELLO))
                assert is_closed(stranger)
    finally:
        server.stop()
    assert capfd.readouterr().err.count("ZeroDivisionError: a fault of this test") == 1


# after the hello


def greet(server: StoreServer, **more: Any) -> socket.socket:
    sock = dial(server)
    sock.recv(65536)
    sock.sendall(encode({**HELLO, **more}))
    sock.recv(65536)
    return sock


STEP = {"do": "barrier", "name": "step 1", "count": 8, "timeout": 1}


@pytest.mark.parametrize(
    "broken",
    [
        {"count": 0},
        {"count": -1},
        {"count": 10**9},
        {"count": 5},  # it is member 5
        {"count": "8"},
        {"count": True},
        {"name": 3},
        {"name": "x" * 100_000},
        {"timeout": "soon"},
        {"timeout": -1},
        {"calls": ["a"]},
        {"calls": [["a", [[4, 4]]]]},
        {"members": [[4, 4]]},
        {"group": "supervisor"},
        {"slowest": "fast"},
        {"slowest": -1},
        {"stop": "now"},
        {"stop": [9, "now"]},
        {"stop": [1, 2]},
        {"digest": "5"},
        {"digest": -1},
        {"digest": 1 << 32},
        {"do": "broadcast", "source": 1},
        {"do": "join", "group": "rank", "member": 1},
        {"do": "depart", "via": "m at 127.0.0.1", "how": "left"},
        {"do": "hello"},
        {"do": "dance"},
        {"do": ["set"]},
        {"do": "failures", "known": -1},
        {"do": "get", "key": None},
        {"do": "ended", "group": "rank", "member": 10**12},
    ],
)
def test_a_member_that_breaks_the_rules_is_closed(server: StoreServer, broken: dict[str, Any]) -> None:
    with greet(server) as member:
        member.sendall(encode({**STEP, **broken}))
        assert is_closed(member)
    members_meet(server)


def test_a_value_may_be_large_and_too_large_is_refused_before_it_travels(server: StoreServer) -> None:
    client = StoreClient.connect(server.endpoint, 0, timeout_seconds=5)
    client.set("large", "x" * (20 << 20))
    assert len(client.get("large")) == 20 << 20
    with pytest.raises(ClusterError, match="takes 64 MB"):
        client.set("larger", "x" * (65 << 20))
    client.set("large 1", "x" * (40 << 20))
    with pytest.raises(ClusterError, match="can hold no more values"):
        client.set("large 2", "x" * (20 << 20))
    assert client.get("large 2") is None
    client.close()


def test_what_all_members_bring_together_is_bounded(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_GATHERED_BYTES", 1000)
    clients = [StoreClient.connect(server.endpoint, i, timeout_seconds=5) for i in range(3)]
    found: list[str] = []

    def gather(client: StoreClient) -> None:
        with contextlib.suppress(ScheduleMismatch):
            try:
                client.all_gather("values", "x" * 400, 3, 10)
            except ClusterError as error:
                found.append(str(error))

    threads = [threading.Thread(target=gather, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["the values of all members together exceed what the rendezvous store can hold"] * 3
    for client in clients:
        client.close()


def test_a_value_costs_the_store_no_parsing(server: StoreServer) -> None:
    """Deep or endless as it may be: it is a matter between those who write and read it."""
    with greet(server) as member:
        member.sendall(encode({"do": "set", "key": "deep"}, b"[" * 1_000_000))
        assert b"error" not in member.recv(65536)
    members_meet(server)


def test_a_failure_is_never_a_success_and_prints_no_control_characters(server: StoreServer) -> None:
    client = StoreClient.connect(server.endpoint, 0, timeout_seconds=5)
    client.fail({"message": "\x1b[2Jall is\rwell\x07", "exit_code": 0, "traceback": ["\x1b]0;title\x07"]})
    client.fail({"message": "m", "exit_code": 256})
    client.fail({"message": "m" * 100_000, "exit_code": 137})
    (first, _), (second, _), (third, _) = client.failures()
    assert first == {"message": "\\x1b[2Jall is\\rwell\\x07", "exit_code": 1, "traceback": ["\\x1b]0;title\\x07"]}
    assert (second["exit_code"], third["exit_code"]) == (1, 137)
    assert len(third["message"]) < 10_000
    with pytest.raises(WorkerFailed):
        client.fail({"message": {"deep": []}})
    client.close()


@pytest.mark.parametrize("body", [b"", b"[]", b"1" * 60_000, b"[" * 60_000, b'{"exit_code": 1' + b"0" * 5000 + b"}"])
def test_a_failure_report_that_is_none_ends_its_connection_only(server: StoreServer, body: bytes) -> None:
    with greet(server) as member:
        member.sendall(encode({"do": "fail"}, body))
        assert is_closed(member)
    client = StoreClient.connect(server.endpoint, 0, timeout_seconds=5)
    assert client.failures() == []
    client.close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
_WORDS = ["hello", "barrier", "all_gather", "compare", "set", "get", "fail", "failures", "clock", "gone"]
_WORDS += ["ended", "join", "depart", "times", "beat", "leave"]
_FIELDS = ["name", "count", "timeout", "via", "members", "calls", "again", "slowest"]
_FIELDS += [
    "stop",
    "digest",
    "times",
    "key",
    "known",
    "group",
    "member",
    "number",
    "id",
    "version",
    "how",
    "role",
    "namespace",
    "job",
]
_HEADERS = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=8)
_FRAMES = st.builds(
    lambda do, header, plain, body: encode({**STEP, **plain, **header, "do": do}, body),
    st.sampled_from(_WORDS),
    _HEADERS,
    st.fixed_dictionaries({}, optional={"count": st.integers(1, 9), "id": st.integers(0, 8)}),
    st.binary(max_size=60),
)


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(role=st.sampled_from(["member", "relay"]), frames=st.lists(_FRAMES | st.binary(max_size=40), max_size=6))
def test_whatever_a_connection_sends_the_others_pass_the_barrier(
    server: StoreServer, role: str, frames: list[bytes]
) -> None:
    server.open_root("fuzzed")
    with greet(server, role=role, namespace="fuzzed") as member:
        try:
            for frame in frames:
                member.sendall(frame)
        except ConnectionError:
            pass
    members_meet(server, 1)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(said=st.lists(st.binary(max_size=200) | _FRAMES, max_size=5), cut=st.integers(1, 50))
def test_a_decoder_gives_frames_or_refuses(said: list[bytes], cut: int) -> None:

    decoder = Decoder(4096)
    data = b"".join(said)
    try:
        for at in range(0, len(data), cut):
            for head, _ in decoder.feed(data[at : at + cut]):
                parse(head)
    except ProtocolError:
        pass
    assert len(decoder._buffer) < 3 * 4096


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(answer=_HEADERS, body=st.binary(max_size=60))
def test_a_client_survives_a_server_that_talks_nonsense(answer: dict[str, Any], body: bytes) -> None:
    ours, theirs = socket.socketpair()
    client = StoreClient(ours, "there:1", 0, "rank", lambda i: f"rank {i}", 1.0)
    calls: list[Callable[[], Any]] = [
        client.clock,
        client.gone,
        client.failures,
        lambda: client.get("a"),
        lambda: client.barrier("step 1", None, 2, 1),
        lambda: client.all_gather("step 1", None, 2, 1),
        lambda: client.compare("step 1", None, 2, 1),
    ]
    try:
        for call in calls:
            theirs.sendall(encode(answer, body))
            with contextlib.suppress(ClusterError, WorkerFailed, ScheduleMismatch):
                call()
    finally:
        client.close()
        theirs.close()


def test_json_that_travels_is_what_was_meant(server: StoreServer) -> None:
    client = StoreClient.connect(server.endpoint, 0, timeout_seconds=5)
    for value in (None, 0, 1.5, "é\n", [1, [2]], {"a": None}):
        client.set("value", value)
        assert client.get("value") == json.loads(json.dumps(value))
    client.close()
