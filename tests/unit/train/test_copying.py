"""One checkpoint over one connection: taken whole or not at all, from nobody but the job's own sender."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fleet_train import timeouts
from fleet_train.cluster.store.access import Callers
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage, transfer
from fleet_train.train.checkpoint.copies import Copier
from fleet_train.train.checkpoint.storage import Run
from fleet_train.train.checkpoint.transfer import Address, Channel, Lost, Receiver, key_of, send, sizes_of
from tests.support.checkpoints import publish as published

HERE, THERE = "127.0.0.2", "127.0.0.3"
RUN = Run(1, 100.0, "aa")
SHA256 = hashlib.sha256(b"").hexdigest()


def publish(checkpoints: Path, step: int, content: bytes = b"tensors", run: Run = RUN) -> Path:
    return published(checkpoints, step, {"step": step}, run=run, content=content, own=b"of each rank")


def files(checkpoints: Path) -> dict[str, bytes]:
    """Everything in the folder, drafts included."""
    return {str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else []


class Two(NamedTuple):
    ours: Path
    theirs: Path
    receiver: Receiver

    def send(self, folder: Path, kept: list[str] | None = None) -> bool:
        return send(self.receiver.address, HERE, folder, kept)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """A node with checkpoints, and one that takes copies of them."""
    ours, theirs = tmp_path / "ours" / "checkpoints", tmp_path / "theirs" / "checkpoints"
    receiver = Receiver(theirs, THERE)
    yield Two(ours, theirs, receiver)
    receiver.close()


@contextlib.contextmanager
def channel(address: Address, proven: bool = True) -> Iterator[Channel]:
    """A sender that says what a test wants it to say."""
    with socket.create_connection((address.host, address.port), 5.0) as connection:
        made = Channel(connection, key_of(address.token, None))
        if proven:
            made.prove_as_sender()
        yield made


def test_a_copy_has_every_byte_is_sent_once_and_replaces_one_of_that_step(two: Two) -> None:
    folder = publish(two.ours, 10, bytes(range(256)) * 10_000)
    assert two.send(folder) is True
    assert files(two.theirs) == files(two.ours)
    assert two.send(folder) is False
    assert files(two.theirs) == files(two.ours)
    assert two.send(publish(two.ours, 10, b"after", Run(1, 101.0, "aa"))) is True
    assert files(two.theirs) == files(two.ours)


def test_what_the_sender_has_removed_is_removed_and_another_run_is_put_aside(two: Two) -> None:
    for step in (10, 20):
        two.send(publish(two.ours, step))
    publish(two.theirs, 99, run=Run(1, 50.0, "other"))
    two.theirs.joinpath(".copying-step-00000015").mkdir()
    assert two.send(publish(two.ours, 30), ["step-00000020", "step-00000030"]) is True
    assert names(two.theirs) == ["of-run-other", "step-00000020", "step-00000030"]
    assert names(two.theirs / "of-run-other") == ["step-00000099"]


def test_who_does_not_know_the_token_or_the_secret_is_told_nothing(two: Two) -> None:
    folder, address = publish(two.ours, 10), two.receiver.address
    for token, secret in (("0" * 64, None), (address.token, b"a secret of the job")):
        with pytest.raises(CheckpointError, match="is not this job's receiver: it does not know the job's token"):
            send(Address(THERE, address.port, token), HERE, folder, secret=secret)
    with channel(address, proven=False) as stranger:  # does not mind who the receiver is
        stranger.send({"nonce": "00"})
        stranger.receive()
        stranger.send({"proof": "00"})
        with pytest.raises(Lost):
            stranger.receive()
    assert names(two.theirs) == []


def test_a_proof_that_is_sent_back_proves_nothing(two: Two) -> None:
    def reflect(connection: socket.socket) -> None:
        while piece := connection.recv(65536):
            connection.sendall(piece)

    with answered_by(reflect) as port, pytest.raises(CheckpointError, match="is not this job's receiver"):
        send(Address(THERE, port, "token"), HERE, publish(two.ours, 10))


@contextlib.contextmanager
def answered_by(answer: Callable[[socket.socket], Any]) -> Iterator[int]:
    """The port of somebody else, who answers one connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            answer(connection)

    with socket.create_server((THERE, 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_strangers_that_say_nothing_keep_nobody_away(two: Two) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_connection((THERE, two.receiver.address.port), 5.0))
        for _ in range(transfer._MOST_STRANGERS):
            stack.enter_context(socket.create_connection((THERE, two.receiver.address.port), 5.0))
        assert two.send(publish(two.ours, 10)) is True
        first.settimeout(2.0)  # less than a stranger may take: the oldest one has made room
        assert first.recv(1) == b""


def test_a_stranger_has_seconds_to_prove_itself_also_byte_by_byte(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "COPY_HANDSHAKE_SECONDS", 0.5)
    began, said = time.monotonic(), b"anything"
    with socket.create_connection((THERE, two.receiver.address.port), 0.05) as stranger, contextlib.suppress(OSError):
        while said and time.monotonic() - began < 30:
            stranger.sendall(b"F")
            with contextlib.suppress(TimeoutError):
                said = stranger.recv(1)
    assert time.monotonic() - began < 20
    wait_until_forgotten(two.receiver)


def test_nobody_is_waited_for_who_says_or_takes_nothing(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def says_nothing(_: socket.socket) -> None:
        assert given_up.wait(60.0)

    def takes_nothing(connection: socket.socket) -> None:
        peer = Channel(connection, key_of("token", None))
        peer.prove_as_receiver()
        peer.receive()
        peer.send({"answer": "send"})
        assert given_up.wait(60.0)

    folder = publish(two.ours, 10, bytes(32 << 20))
    for answer, limit in ((says_nothing, "COPY_CONNECT_SECONDS"), (takes_nothing, "COPY_STALL_SECONDS")):
        monkeypatch.setattr(timeouts, limit, 0.3)
        given_up.clear()
        with answered_by(answer) as port:
            with pytest.raises(CheckpointError, match="nothing got through within 0 s"):
                send(Address(THERE, port, "token"), HERE, folder)
            given_up.set()
        monkeypatch.undo()


def wait_until_forgotten(receiver: Receiver) -> None:
    deadline = time.monotonic() + 20
    while receiver._strangers or receiver._connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_addresses_that_are_not_in_the_node_list_are_heard_with_a_secret_only(tmp_path: Path) -> None:
    folder, callers, secret = publish(tmp_path / "ours", 10), Callers([HERE, THERE]), b"a secret of the job"
    with contextlib.closing(Receiver(tmp_path / "open", THERE, None, callers)) as receiver:
        assert send(receiver.address, HERE, folder) is True
        with pytest.raises(CheckpointError, match="step-00000010 did not get to"):
            send(receiver.address, "127.0.0.9", folder)
    with contextlib.closing(Receiver(tmp_path / "secret", THERE, secret, callers)) as receiver:
        with pytest.raises(CheckpointError, match="does not know the job's token"):
            send(receiver.address, HERE, folder)
        assert send(receiver.address, "127.0.0.9", folder, secret=secret) is True


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_text_that_cannot_be_signed_ends_its_connection_without_a_word(two: Two) -> None:
    lone = "\ud800"  # JSON can hold it, bytes cannot
    for told in ({"nonce": lone}, {"nonce": "00", "proof": lone}):
        with channel(two.receiver.address, proven=False) as stranger:
            stranger.send(told)
            stranger.send({"proof": lone})
            stranger.receive()
            with pytest.raises(Lost):
                stranger.receive()
    wait_until_forgotten(two.receiver)
    assert two.send(publish(two.ours, 10)) is True


def request(**changed: Any) -> dict[str, Any]:
    return {"name": "step-00000010", "marker": SHA256, "kept": None, "files": with_state_of(0), **changed}


def with_state_of(size: int) -> dict[str, int]:
    return {"state.json": size, "complete.json": 0}


@pytest.mark.parametrize(
    ("size", "marker", "problem"),
    [
        (3, SHA256, "a file was altered on its way (SHA-256 differs)"),
        (0, "f" * 64, "step-00000010 is not the one that was announced"),
    ],
)
def test_what_is_not_as_announced_leaves_nothing(two: Two, size: int, marker: str, problem: str) -> None:
    with channel(two.receiver.address) as sender:
        sender.send(request(files=with_state_of(size), marker=marker))
        assert sender.receive() == {"answer": "send"}
        sender.send_bytes(b"abc"[:size])
        sender.send({"sha256": [SHA256, SHA256]})
        assert sender.receive() == {"problem": problem}
    folder = publish(two.ours, 10).rename(two.ours / "step-00000020")
    with pytest.raises(CheckpointError, match="step-00000020 holds the state of step 10"):
        two.send(folder)
    assert names(two.theirs) == []


def test_a_connection_that_is_cut_leaves_nothing_and_the_next_copy_is_taken(two: Two) -> None:
    with channel(two.receiver.address) as sender:
        sender.send(request(files=with_state_of(1000)))
        sender.receive()
        sender.send_bytes(b"a" * 500)
        assert names(two.theirs) == [".copying-step-00000010"]
    assert two.send(publish(two.ours, 10)) is True
    assert names(two.theirs) == ["step-00000010"]


WRONG_FILES: list[Any] = [
    *(None, "complete.json", [], {}, ["complete.json"], {"state.json": 1}),
    *({name: 1, "complete.json": 1} for name in ("../state.json", "/etc/passwd", "below/state.json", "..", ".hidden")),
    *({name: 1, "complete.json": 1} for name in ("a\n", "", "other.json")),
    *({"complete.json": size} for size in (-1, True, "1", 1.0, None)),
]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"name": "../step-00000010"}, "'../step-00000010' is not a name of a checkpoint, such as step-00000440"),
        ({"name": "/tmp/step-00000010"}, "'/tmp/step-00000010' is not a name of a checkpoint"),
        ({"name": None}, "None is not a name of a checkpoint"),
        ({"kept": [".."]}, "'..' is not a name of a checkpoint"),
        ({"marker": "0"}, "a SHA-256 is missing; it has 64 hexadecimal digits"),
        *(({"files": wrong}, "") for wrong in WRONG_FILES),
    ],
)
def test_a_request_for_another_place_or_for_no_checkpoints_files_is_refused(
    two: Two, changed: dict[str, Any], problem: str
) -> None:
    assert sizes_of(with_state_of(7)) == with_state_of(7)
    with channel(two.receiver.address) as sender:
        sender.send(request(**changed))
        assert str(sender.receive()["problem"]).startswith(problem)
    assert names(two.theirs.parent) == []


def test_a_message_has_a_limit_lower_before_the_token_is_proven_and_is_not_altered(two: Two) -> None:
    with channel(two.receiver.address, proven=False) as stranger:
        stranger.send({"nonce": "0" * 5000})
        with pytest.raises(Lost):
            stranger.receive()
    with channel(two.receiver.address) as sender:
        with pytest.raises(CheckpointError, match="is too large; 4194304 are the limit"):
            sender.send({"files": "a" * (4 << 20)})
        sender.send_bytes(transfer._HEADER.pack(b"FTC1", (4 << 20) + 1, bytes(32)))
        assert "more than 4194304 bytes" in sender.receive()["problem"]
    with channel(two.receiver.address) as sender:
        body = b'{"name": "step-00000010"}'
        sender.send_bytes(transfer._HEADER.pack(b"FTC1", len(body), bytes(32)) + body)
        assert sender.receive() == {"problem": "a message was altered on its way (its HMAC differs)"}
    assert names(two.theirs) == []


def test_a_disk_without_room_is_asked_first_and_one_that_fills_up_keeps_what_was_there(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, pieces: Iterator[bytes]) -> None:
        next(pieces)
        raise OSError(28, "No space left on device", str(path))

    folder, room = publish(two.ours, 10), SimpleNamespace(free=transfer.SPARE_BYTES + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(CheckpointError, match=r"has 1048577 bytes free, and the checkpoint has \d+; make room there"):
        two.send(folder)
    assert names(two.theirs) == []
    monkeypatch.undo()
    assert two.send(folder) is True
    monkeypatch.setattr(transfer, "_write_file", fails)
    with pytest.raises(CheckpointError, match="No space left on device"):
        two.send(publish(two.ours, 20, bytes(5 << 20)))
    assert names(two.theirs) == ["step-00000010"]


def copier(ours: Path, *receivers: Receiver, said: list[str]) -> Copier:
    return Copier(ours, {f"node {n}": each.address for n, each in enumerate(receivers, 1)}, HERE, None, said.append)


def test_two_receivers_become_what_the_first_node_is_while_one_that_is_gone_is_said(tmp_path: Path) -> None:
    ours, said = tmp_path / "ours", []
    gone, *others = (Receiver(tmp_path / str(n), f"127.0.0.{n}") for n in (2, 3, 4))
    gone.close()
    made = copier(ours, gone, *others, said=said)
    for step in (10, 20, 30):
        publish(ours, step)
        storage.prune(ours, keep=2)
        made.offer()
        assert made.wait(60.0)
    for n in (3, 4):
        assert names(tmp_path / str(n)) == ["step-00000020", "step-00000030"]
        assert files(tmp_path / str(n)) == files(ours)
    assert (made.made, made.failed) == (6, 3)
    assert said[0].startswith(f"no copy on node 1: step-00000010 did not get to {gone.address}: ")
    assert said[0].endswith("; training goes on, the next checkpoint tries again")
    for each in others:
        each.close()


def test_training_does_not_wait_and_one_transfer_is_under_way(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    go, threads = threading.Event(), set()

    def waits(*arguments: Any) -> bool:
        threads.add(threading.current_thread())
        assert go.wait(60.0)
        return send(*arguments)

    monkeypatch.setattr("fleet_train.train.checkpoint.copies.send", waits)
    made = copier(two.ours, two.receiver, said=[])
    for step in (10, 20, 30):
        publish(two.ours, step)
        made.offer()
    assert (made.wait(0.1), names(two.theirs)) == (False, [])
    go.set()
    assert made.wait(60.0) is True
    assert (made.made, len(threads)) == (3, 1)
    assert files(two.theirs) == files(two.ours)


def test_what_is_removed_while_it_is_sent_is_no_failure(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(*arguments: Any) -> bool:
        if arguments[2].name == "step-00000010":
            shutil.rmtree(arguments[2])
        return send(*arguments)

    monkeypatch.setattr("fleet_train.train.checkpoint.copies.send", removed)
    said: list[str] = []
    made = copier(two.ours, two.receiver, said=said)
    for step in (10, 20):
        publish(two.ours, step)
    made.offer()
    assert made.wait(60.0)
    assert (made.made, made.failed, said) == (1, 0, [])
