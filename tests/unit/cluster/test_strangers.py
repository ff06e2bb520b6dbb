"""Unauthorised connections: whatever they send, members' barriers go on and nothing is printed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_train.cluster.store.access import Access, Callers, job_secret
from fleet_train.cluster.store.client import StepNote, StoreClient
from fleet_train.cluster.store.server import Session, StoreServer
from fleet_train.cluster.store.wire import LENGTHS, Decoder, ProtocolError, encode, parse
from fleet_train.errors import ClusterError, ScheduleMismatch, WorkerFailed
from tests.unit.fuzz import fixed

SECRET = b"correct horse battery staple"
FILE, VARIABLE = "FLEET_TRAIN_JOB_SECRET_FILE", "FLEET_TRAIN_JOB_SECRET"
STEP = {"do": "barrier", "name": "step 1", "count": 8, "timeout": 1}
HELLO = {"do": "hello", "job": "", "nonce": "n", "group": "rank", "member": 5, "watched": False}


@pytest.fixture
def server(capfd: pytest.CaptureFixture[str]) -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0).start()
    yield server
    server.stop()
    assert capfd.readouterr().err == ""  # no traceback, whatever was sent


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


@contextlib.contextmanager
def started(**options: Any) -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0, **options).start()
    try:
        yield server
    finally:
        server.stop()


def test_an_address_outside_the_node_list_is_refused_and_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with started(callers=Callers(["127.0.0.2"])) as server:
        for _ in range(3):
            with pytest.raises(ClusterError, match=r"accepts the addresses of the node list only, and this connection"):
                StoreClient.connect(server.endpoint, 0, timeout_seconds=2)
        node = StoreClient.connect(server.endpoint, 0, timeout_seconds=5, access=Access(source="127.0.0.2"))
        assert node.get("nothing") is None
        node.close()
    expected = "fleet_train: refused a connection from 127.0.0.1, which is not in the node list\n"
    assert capfd.readouterr().err == expected


def test_behind_a_translation_of_addresses_the_kernel_chooses_the_own_one(server: StoreServer) -> None:
    node = StoreClient.connect(server.endpoint, 0, timeout_seconds=5, access=Access(source="192.0.2.7"))
    assert node.get("nothing") is None
    node.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (Access("one"), Access("other"), "belongs to another job, 'one', and this is 'other'"),
        (Access("job", SECRET), Access("job"), "requires this job's secret"),
        (Access("job", SECRET), Access("job", b"x" * 20), "another secret"),
        (Access("job"), Access("job", SECRET), "has no job secret and this node has one"),
    ],
)
def test_who_is_of_another_job_or_does_not_know_the_secret_is_refused(ours: Access, theirs: Access, why: str) -> None:
    with started(access=ours) as server, pytest.raises(ClusterError, match=why):
        StoreClient.connect(server.endpoint, 0, timeout_seconds=2, access=theirs)


def test_with_a_secret_addresses_may_differ_and_it_never_travels() -> None:
    seen = bytearray()

    def copy(one: socket.socket, other: socket.socket) -> None:
        while data := one.recv(65536):
            seen.extend(data)
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)  # the other thread may be reading from it

    def pass_on(server: StoreServer) -> None:
        inside, _ = proxy.accept()
        with inside, dial(server) as outside:
            back = threading.Thread(target=copy, args=(outside, inside), daemon=True)
            back.start()
            copy(inside, outside)
            back.join()

    with started(access=Access("job", SECRET), callers=Callers(["10.0.0.1"])) as server:
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            threading.Thread(target=pass_on, args=(server,), daemon=True).start()
            endpoint = f"127.0.0.1:{proxy.getsockname()[1]}"
            client = StoreClient.connect(endpoint, 0, timeout_seconds=5, access=Access("job", SECRET))
            client.set("a", 1)
            client.close()
        assert b'"proof"' in seen
        assert SECRET not in seen
        # What was recorded once is of no use: the server draws another nonce.
        words = [parse(head) for head, _ in Decoder().feed(bytes(seen))]
        with dial(server) as replay:
            replay.sendall(encode(next(word for word in words if word.get("do") == "hello")))
            assert is_closed(replay)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    return file


def test_the_secret_comes_from_a_file_of_its_own_user_or_a_variable(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert job_secret({VARIABLE: SECRET.decode()}) == SECRET
    assert job_secret({}) is None
    environ = {FILE: str(secret_file)}
    for mode in (0o600, 0o400, 0o640):
        secret_file.chmod(mode)
        assert job_secret(environ, warns=True) == SECRET
    assert capfd.readouterr().err == ""
    secret_file.chmod(0o644)
    assert job_secret(environ, warns=True) == job_secret(environ) == SECRET
    said = f"every user here can read the job's secret in {secret_file} (mode 0644); chmod 600 {secret_file}"
    assert capfd.readouterr().err == f"fleet_train: {said}\n"
    # as Kubernetes mounts it
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    job_secret(environ, warns=True)
    assert capfd.readouterr().err == ""
    assert SECRET.decode() not in repr(Access("job", SECRET))


@pytest.mark.parametrize(
    ("content", "mode", "environ", "words"),
    [
        (SECRET, 0o622, {}, "can be changed by other users"),
        (b"short", 0o600, {}, r"SECRET_FILE=/\S+secret: the job's secret has 5 bytes; it must have 16 to 4096"),
        (SECRET, 0o600, {FILE: "/none"}, "cannot be read"),
        (SECRET, 0o600, {FILE: "/dev/zero"}, "not a regular file"),
        (SECRET, 0o600, {VARIABLE: "x" * 20}, "both set"),
        (SECRET, 0o600, {FILE: "", VARIABLE: "short"}, "^FLEET_TRAIN_JOB_SECRET: "),
    ],
)
def test_a_secret_that_is_none_is_refused(
    secret_file: Path, content: bytes, mode: int, environ: dict[str, str], words: str
) -> None:
    secret_file.write_bytes(content)
    secret_file.chmod(mode)
    with pytest.raises(ClusterError, match=words):
        job_secret({FILE: str(secret_file), **environ})


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


def test_an_error_of_the_server_itself_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault of this test")

    monkeypatch.setattr(Session, "hear", broken)
    with started() as server:
        for _ in range(3):
            with dial(server) as stranger:
                stranger.sendall(encode(HELLO))
                assert is_closed(stranger)
    assert capfd.readouterr().err.count("ZeroDivisionError: a fault of this test") == 1


# after the hello


def test_a_value_may_be_large_and_too_large_is_refused_before_it_travels(server: StoreServer) -> None:
    client = StoreClient.connect(server.endpoint, 0, timeout_seconds=5)
    client.set("large", "x" * (20 << 20))
    assert len(client.get("large")) == 20 << 20
    with pytest.raises(ClusterError, match="takes 64 MB"):
        client.set("larger", "x" * (65 << 20))
    with pytest.raises(ClusterError, match="can hold no more values"):
        client.set("large 2", "x" * (50 << 20))
    for value in (None, 1.5, "é\n", [1, [2]], {"a": None}):
        client.set("value", value)
        assert client.get("value") == value
    with pytest.raises(WorkerFailed):
        client.fail({"message": {"deep": []}})
    client.close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=5,
)
_WORDS = "hello barrier all_gather compare set get fail failures clock gone ended join depart times beat leave".split()
_FIELDS = (
    "name count timeout via members calls again slowest stop digest times key known group member number id version how "
    "role namespace job"
).split()
_HEADERS = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5)
_FRAMES = st.builds(
    lambda do, header, plain, body: encode({**STEP, **plain, **header, "do": do}, body),
    st.sampled_from(_WORDS),
    _HEADERS,
    st.fixed_dictionaries({}, optional={"count": st.integers(1, 9), "id": st.integers(0, 8)}),
    st.binary(max_size=60),
)


@fixed(60)
@given(role=st.sampled_from(["member", "relay"]), frames=st.lists(_FRAMES | st.binary(max_size=40), max_size=6))
def test_whatever_a_connection_sends_the_others_pass_the_barrier(
    server: StoreServer, role: str, frames: list[bytes]
) -> None:
    server.open_root("fuzzed")
    with dial(server) as member, contextlib.suppress(ConnectionError):
        member.recv(65536)
        member.sendall(encode({**HELLO, "role": role, "namespace": "fuzzed"}))
        member.recv(65536)
        for frame in frames:
            member.sendall(frame)
    members_meet(server, 1)


@fixed(100)
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


@fixed(100)
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
