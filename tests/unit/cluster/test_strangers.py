"""Unauthorised connections: whatever they send, members' barriers go on and nothing is printed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_train.cluster.store.access import Access, job_secret
from fleet_train.cluster.store.client import StepNote, StoreClient
from fleet_train.cluster.store.server import StoreServer, StoreSession
from fleet_train.cluster.store.wire import encode
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


def members_meet(server: StoreServer) -> None:
    clients = [StoreClient.connect(server.endpoint, i, timeout_seconds=5, watched=False) for i in range(2)]
    other = threading.Thread(target=clients[1].barrier, args=("step 1", StepNote(1, 1.0, 1.0), 2, 10))
    other.start()
    clients[0].barrier("step 1", StepNote(1, 1.0, 1.0), 2, 10)
    other.join()
    for client in clients:
        client.close()


# addresses, jobs, secrets


def test_behind_a_translation_of_addresses_the_kernel_chooses_the_own_one(server: StoreServer) -> None:
    node = StoreClient.connect(server.endpoint, 0, timeout_seconds=5, access=Access(source="192.0.2.7"))
    assert node.get("nothing") is None
    node.close()


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
        (SECRET, 0o600, {FILE: "pipe"}, "not a regular file"),
        (SECRET, 0o600, {FILE: "link to a pipe"}, "not a regular file"),
        (SECRET, 0o600, {FILE: "."}, "not a regular file"),
        (SECRET, 0o600, {FILE: "a\0b"}, "cannot be read"),
        (SECRET, 0o600, {VARIABLE: "x" * 20}, "both set"),
        (SECRET, 0o600, {FILE: "", VARIABLE: "short"}, "^FLEET_TRAIN_JOB_SECRET: "),
    ],
)
def test_a_secret_that_is_none_is_refused(
    secret_file: Path,
    content: bytes,
    mode: int,
    environ: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(secret_file.parent)
    os.mkfifo("pipe")
    os.symlink("pipe", "link to a pipe")
    secret_file.write_bytes(content)
    secret_file.chmod(mode)
    with pytest.raises(ClusterError, match=words):
        job_secret({FILE: str(secret_file), **environ})


def test_an_error_of_the_server_itself_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], server: StoreServer
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault of this test")

    monkeypatch.setattr(StoreSession, "hear", broken)
    for _ in range(3):
        with dial(server) as stranger:
            stranger.sendall(encode(HELLO))
            assert is_closed(stranger)
    assert capfd.readouterr().err.count("ZeroDivisionError: a fault of this test") == 1


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
    members_meet(server)


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
