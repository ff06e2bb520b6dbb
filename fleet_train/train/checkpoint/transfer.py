"""One checkpoint from one node of a job to another: taken whole or not at all, from nobody but the job's own sender.

A `Receiver` listens on a free port. Its token travels only through the job's store, and both sides of a connection
prove that they know it (challenge and response as in `fleet_train.cluster.store.access`; the two sides' proofs use
different words, so that neither can be reflected to its sender). From then on every message is signed:

    4 bytes "FTC1", 4 bytes length (big endian), 32 bytes HMAC-SHA256 (zeros before both have proven themselves), JSON

The sender announces a checkpoint: its name, the SHA-256 of its marker, and its files with their sizes. A receiver that
has it answers so; otherwise the bytes of the files follow as they are, then the SHA-256 of each: every file is read
once. The receiver writes a draft, which is verified and synced, then renamed into place.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fleet_train import timeouts
from fleet_train.cluster.store.access import Callers, Strangers, is_proof, new_nonce, proof
from fleet_train.convert.persistables import FILES
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage

SPARE_BYTES = 1 << 20
"""Space that must stay free on the receiver's disk."""
_CHUNK_BYTES = 1 << 20
"""Bytes of a file sent or received at a time."""
_CHUNKS_BETWEEN_SYNCS = 128
_MOST_MESSAGE_BYTES = 4 << 20
"""The size limit of an authenticated message. It may list the files of a checkpoint."""
_MOST_UNPROVEN_BYTES = 4096
_MOST_STRANGERS = 128
"""The most unauthenticated connections: beyond these the oldest one is closed."""
_HEADER = struct.Struct("!4sI32s")
_MAGIC = b"FTC1"
_SENDER, _RECEIVER = "sends copies", "receives copies"
_NAME = re.compile(r"step-[0-9]{8,20}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Address(NamedTuple):
    """Where a receiver listens, and the token that a sender must know. Sent only through the job's store."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def send(
    to: Address, source: str, folder: Path, kept: Sequence[str] | None = None, secret: bytes | None = None
) -> bool:
    """Send a published checkpoint to the receiver; False if it had it already.

    ``source``: this node's own address. ``kept``: names of the checkpoints that the receiver is to keep of this run,
    others of it are removed there; None = all. Raises CheckpointError with the reason if it was not accepted.
    """
    try:
        with contextlib.ExitStack() as stack:
            files = _open_files(folder, stack)
            reached = socket.create_connection((to.host, to.port), timeouts.COPY_CONNECT_SECONDS, (source, 0))
            channel = Channel(stack.enter_context(reached), key_of(to.token, secret))
            channel.prove_as_sender()
            marker = hashlib.sha256(files[storage.MARKER].read()).hexdigest()
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in files.items()}
            channel.send({"name": storage.name_of(folder), "marker": marker, "kept": kept, "files": sizes})
            if _answer(channel) == "have":
                return False
            channel.send({"sha256": [_send_file(channel, files[name], size) for name, size in sizes.items()]})
            _answer(channel)
            return True
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{folder.name} did not get to {to}: {error}") from None


def _open_files(folder: Path, stack: contextlib.ExitStack) -> dict[str, BinaryIO]:
    """The open files of a published checkpoint, consistent even if it is replaced meanwhile; marker last."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, inside)
    present = {storage.MARKER, *os.listdir(inside)}
    return {
        name: stack.enter_context(open(os.open(name, os.O_RDONLY, dir_fd=inside), "rb"))
        for name in FILES
        if name in present
    }


def _send_file(channel: Channel, file: BinaryIO, size: int) -> str:
    """Its SHA-256. Raises CheckpointError when the file is shorter."""
    file.seek(0)
    digest, left = hashlib.sha256(), size
    while left:
        piece = file.read(min(_CHUNK_BYTES, left))
        if not piece:
            raise CheckpointError("a file became shorter while it was sent")
        digest.update(piece)
        channel.send_bytes(piece)
        left -= len(piece)
    return digest.hexdigest()


def _answer(channel: Channel) -> str:
    message = channel.receive(timeouts.COPY_PLACING_SECONDS)
    if "problem" in message:
        raise CheckpointError(str(message["problem"]))
    return str(message.get("answer"))


class Receiver:
    """Receives checkpoints into ``checkpoints`` of this node, in daemon threads; one at a time.

    ``host``: this node's own address; the port is a free one. ``callers``: the accepted addresses; with a secret they
    are ignored, as in the job's store. Raises OSError if it cannot listen there.
    """

    def __init__(
        self, checkpoints: Path, host: str, secret: bytes | None = None, callers: Callers | None = None
    ) -> None:
        self._checkpoints = checkpoints
        self._listener = socket.create_server((host, 0))
        self.address = Address(host, int(self._listener.getsockname()[1]), new_nonce())
        self._key = key_of(self.address.token, secret)
        self._callers = callers if secret is None else None
        self._strangers: Strangers[socket.socket] = Strangers(_MOST_STRANGERS, _disconnect)
        self._receiving = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="fleet_train copies", daemon=True).start()

    def close(self) -> None:
        """Receive nothing more; a copy under way is aborted."""
        self._closed.set()
        _disconnect(self._listener)  # wakes accept
        self._listener.close()
        for connection in list(self._connections):
            _disconnect(connection)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, (address, _) = self._listener.accept()
            except OSError:
                if self._closed.wait(timeouts.COPY_ACCEPT_AGAIN_SECONDS):
                    return
                continue
            if self._callers is not None and not self._callers.hears(address):
                connection.close()
                continue
            self._strangers.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="fleet_train copy", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        with connection, contextlib.suppress(Exception):  # whatever was sent, only this connection ends
            channel = Channel(connection, self._key)
            try:
                channel.prove_as_receiver()
            finally:
                self._strangers.remove(connection)
            with self._receiving:
                try:
                    _receive(channel, self._checkpoints)
                except Exception as error:  # any error: this node's training goes on
                    channel.send({"problem": str(error)})
        self._connections.discard(connection)


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # its thread closes it


def _receive(channel: Channel, checkpoints: Path) -> None:
    """One checkpoint from an authenticated sender. Raises CheckpointError or OSError with nothing changed."""
    request = channel.receive()
    name, marker, kept = _name(request.get("name")), request.get("marker"), request.get("kept")
    if not isinstance(marker, str) or not _SHA256.fullmatch(marker):
        raise CheckpointError("a SHA-256 is missing; it has 64 hexadecimal digits")
    kept = set(map(_name, kept)) if isinstance(kept, list) else None
    sizes = sizes_of(request.get("files"))
    final = checkpoints / name
    has_it = (final / storage.MARKER).is_file() and storage.marker_digest(final) == marker
    if not has_it:
        _receive_new(channel, final, sizes, marker)
    if kept is not None:  # what the sender's retention rule has removed goes, other runs are moved aside
        storage.set_aside(checkpoints, storage.read(final).run)
        storage.keep_only(checkpoints, {*kept, name})
    channel.send({"answer": "have" if has_it else "ok"})


def _receive_new(channel: Channel, final: Path, sizes: Mapping[str, int], marker: str) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    free, size = shutil.disk_usage(final.parent).free, sum(sizes.values())
    if free < size + SPARE_BYTES:
        raise CheckpointError(
            f"the disk of {final.parent} has {free} bytes free, and the checkpoint has {size}; make room there"
        )
    draft = storage.begin_draft(storage.copy_of(final.parent, final.name))
    try:
        channel.send({"answer": "send"})
        _receive_files(channel, draft, sizes)
        if storage.marker_digest(draft) != marker:
            raise CheckpointError(f"{final.name} is not the one that was announced")
        step = storage.read(draft).state.get("step", -1)
        if storage.folder_of(final.parent, int(step)) != final:
            raise CheckpointError(f"{final.name} holds the state of step {step}")
        storage.put_in_place(draft, final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def sizes_of(listed: object) -> dict[str, int]:
    """Bytes by file, as a sender lists them. CheckpointError for names that no checkpoint has, such as ``../name``."""
    if not isinstance(listed, dict) or storage.MARKER not in listed or listed.keys() - {*FILES}:
        raise CheckpointError(f"the files of a checkpoint are {storage.MARKER} and others of {', '.join(FILES)}")
    if not all(type(size) is int and size >= 0 for size in listed.values()):
        raise CheckpointError("a file has no size")
    return listed


def _name(text: object) -> str:
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise CheckpointError(f"{text!r} is not a name of a checkpoint, such as step-00000440")
    return text


def _receive_files(channel: Channel, draft: Path, sizes: Mapping[str, int]) -> None:
    """Read all bytes from the connection even if the disk does not take them, so that the sender gets the reason."""
    problem: OSError | None = None
    digests = []
    for name, size in sizes.items():
        digest = hashlib.sha256()
        pieces = _hashed(channel, size, digest)
        try:
            _write_file(draft / name, pieces)
        except OSError as error:
            problem = problem or error
            collections.deque(pieces, maxlen=0)
        digests.append(digest.hexdigest())
    expected = channel.receive().get("sha256")
    if problem is not None:
        raise problem
    if digests != expected:
        raise CheckpointError("a file was altered on its way (SHA-256 differs)")


def _hashed(channel: Channel, size: int, digest: Any) -> Iterator[bytes]:
    for start in range(0, size, _CHUNK_BYTES):
        piece = channel.receive_bytes(min(_CHUNK_BYTES, size - start))
        digest.update(piece)
        yield piece


def _write_file(path: Path, pieces: Iterator[bytes]) -> None:
    """Synced at intervals: one sync of everything might take longer than the sender waits."""
    with path.open("xb") as file:
        for number, piece in enumerate(pieces, start=1):
            file.write(piece)
            if number % _CHUNKS_BETWEEN_SYNCS == 0:
                file.flush()
                os.fsync(file.fileno())
        file.flush()
        os.fsync(file.fileno())


def key_of(token: str, secret: bytes | None) -> bytes:
    """What both sides must know: the receiver's token, mixed with the job's secret where there is one."""
    return token.encode() if secret is None else proof(secret, "copies", token).encode()


class Lost(CheckpointError):
    """The connection is gone or stalled."""


class Channel:
    """One side of a connection. Raises CheckpointError for an invalid message, Lost if nothing arrives."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self._keys: tuple[bytes, bytes] | None = None
        """For what is sent and what is received, once both have proven themselves."""
        self._sent = self._received = 0

    def prove_as_sender(self) -> None:
        """Authenticate with a receiver. CheckpointError if it does not know the token."""
        mine = new_nonce()
        self.send({"nonce": mine})
        answer = self.receive(timeouts.COPY_CONNECT_SECONDS)
        theirs = str(answer.get("nonce"))
        if not is_proof(answer.get("proof"), self._key, _RECEIVER, mine, theirs):
            raise CheckpointError("the program there is not this job's receiver: it does not know the job's token")
        self.send({"proof": proof(self._key, _SENDER, mine, theirs)})
        self._begin_session(_SENDER, _RECEIVER, mine, theirs)

    def prove_as_receiver(self) -> None:
        """Authenticate a sender, within COPY_HANDSHAKE_SECONDS. CheckpointError if it does not know the token."""
        deadline = time.monotonic() + timeouts.COPY_HANDSHAKE_SECONDS
        theirs, mine = str(self.receive(timeouts.COPY_HANDSHAKE_SECONDS).get("nonce")), new_nonce()
        self.send({"nonce": mine, "proof": proof(self._key, _RECEIVER, theirs, mine)})
        answer = self.receive(deadline - time.monotonic())
        if not is_proof(answer.get("proof"), self._key, _SENDER, theirs, mine):
            raise CheckpointError("the sender does not know the job's token")
        self._begin_session(_RECEIVER, _SENDER, theirs, mine)

    def _begin_session(self, role: str, peers_role: str, *nonces: str) -> None:
        mine, theirs = (proof(self._key, "session", each, *nonces).encode() for each in (role, peers_role))
        self._keys, self._sent, self._received = (mine, theirs), 0, 0

    def send(self, message: dict[str, Any]) -> None:
        """A JSON object; at most COPY_STALL_SECONDS."""
        body = json.dumps(message).encode()
        if len(body) > _MOST_MESSAGE_BYTES:
            raise CheckpointError(f"a message of {len(body)} bytes is too large; {_MOST_MESSAGE_BYTES} are the limit")
        signature = bytes(32) if self._keys is None else _signature(self._keys[0], self._sent, body)
        self.send_bytes(_HEADER.pack(_MAGIC, len(body), signature) + body)
        self._sent += 1

    def receive(self, seconds: float = timeouts.COPY_STALL_SECONDS) -> dict[str, Any]:
        """The other side's next message."""
        deadline = time.monotonic() + seconds
        magic, length, signature = _HEADER.unpack(self.receive_bytes(_HEADER.size, seconds))
        most = _MOST_UNPROVEN_BYTES if self._keys is None else _MOST_MESSAGE_BYTES
        if magic != _MAGIC or length > most:
            raise CheckpointError(f"the other side sent no message of this protocol, or one of more than {most} bytes")
        body = self.receive_bytes(length, deadline - time.monotonic())
        expected = bytes(32) if self._keys is None else _signature(self._keys[1], self._received, body)
        if not hmac.compare_digest(signature, expected):
            raise CheckpointError("a message was altered on its way (its HMAC differs)")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise CheckpointError("the other side sent something that is no JSON object")
        return message

    def send_bytes(self, content: bytes) -> None:
        """All of it, within COPY_STALL_SECONDS."""
        try:
            self._connection.settimeout(timeouts.COPY_STALL_SECONDS)
            self._connection.sendall(content)
        except OSError as error:
            raise _lost(error, timeouts.COPY_STALL_SECONDS) from None

    def receive_bytes(self, count: int, seconds: float = timeouts.COPY_STALL_SECONDS) -> bytes:
        """Exactly this many bytes."""
        deadline = time.monotonic() + seconds
        content = bytearray(count)
        view, filled = memoryview(content), 0
        try:
            while filled < count:
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                received = self._connection.recv_into(view[filled:])
                if received == 0:
                    raise Lost("the other side closed the connection")
                filled += received
        except OSError as error:
            raise _lost(error, seconds) from None
        return bytes(content)


def _signature(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, f"{number} ".encode() + body, hashlib.sha256)


def _lost(error: OSError, seconds: float) -> Lost:
    return Lost(f"nothing got through within {seconds:.0f} s" if isinstance(error, TimeoutError) else str(error))
