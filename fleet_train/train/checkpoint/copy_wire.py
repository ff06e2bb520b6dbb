"""A connection between two nodes of a job that share a token: both authenticate, and every message is signed.

    4 bytes "FTC1", 4 bytes length (big endian), 32 bytes HMAC-SHA256 (zeros before both have proven themselves), JSON

Bytes of files are sent raw after the signed message with their sizes and SHA-256. Challenge and response as in
`fleet_train.cluster.store.access`; the two sides' proofs use different words, so that neither can be reflected to its
sender.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import time
from typing import Any

from fleet_train.cluster.store.access import is_proof, new_nonce, proof
from fleet_train.errors import CheckpointError

CONNECT_SECONDS = 10.0
"""Time to connect, and for the receiver to prove that it knows the token."""
HANDSHAKE_SECONDS = 5.0
"""Time for a caller to prove that it knows the token."""
STALL_SECONDS = 30.0
"""Time for one message, or one piece of a file, to be sent; or for the answer to a quick request."""
CHUNK_BYTES = 1 << 20
"""Bytes of a file sent or received at a time."""
MOST_MESSAGE_BYTES = 4 << 20
"""The size limit of an authenticated message. It may list the files of a checkpoint."""
_MOST_UNPROVEN_BYTES = 4096
_HEADER = struct.Struct("!4sI32s")
_MAGIC = b"FTC1"
_SENDER, _RECEIVER = "sends copies", "receives copies"


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
        self._session: bytes | None = None
        self._role = self._peers_role = ""
        self._sent = self._received = 0

    def prove_as_sender(self) -> None:
        """Authenticate with a receiver. CheckpointError if it does not know the token."""
        mine = new_nonce()
        self.send({"nonce": mine})
        answer = self.receive(CONNECT_SECONDS)
        theirs = str(answer.get("nonce"))
        if not is_proof(answer.get("proof"), self._key, _RECEIVER, mine, theirs):
            raise CheckpointError("the program there is not this job's receiver: it does not know the job's token")
        self.send({"proof": proof(self._key, _SENDER, mine, theirs)})
        self._begin_session(_SENDER, _RECEIVER, mine, theirs)

    def prove_as_receiver(self) -> None:
        """Authenticate a sender, within HANDSHAKE_SECONDS. CheckpointError if it does not know the token."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        theirs, mine = str(self.receive(HANDSHAKE_SECONDS).get("nonce")), new_nonce()
        self.send({"nonce": mine, "proof": proof(self._key, _RECEIVER, theirs, mine)})
        told = self.receive(max(0.001, deadline - time.monotonic())).get("proof")
        if not is_proof(told, self._key, _SENDER, theirs, mine):
            raise CheckpointError("the sender does not know the job's token")
        self._begin_session(_RECEIVER, _SENDER, theirs, mine)

    def _begin_session(self, role: str, peers_role: str, *nonces: str) -> None:
        self._session = proof(self._key, "session", *nonces).encode()
        self._role, self._peers_role = role, peers_role
        self._sent = self._received = 0

    def send(self, message: dict[str, Any]) -> None:
        """A JSON object; at most STALL_SECONDS."""
        body = json.dumps(message).encode()
        if len(body) > MOST_MESSAGE_BYTES:
            raise CheckpointError(f"a message of {len(body)} bytes is too large; {MOST_MESSAGE_BYTES} are the limit")
        self.send_bytes(_HEADER.pack(_MAGIC, len(body), self._signature(self._role, self._sent, body)) + body)
        self._sent += 1

    def receive(self, seconds: float = STALL_SECONDS) -> dict[str, Any]:
        """The other side's next message."""
        deadline = time.monotonic() + seconds
        magic, length, signature = _HEADER.unpack(self._exactly(_HEADER.size, seconds))
        most = _MOST_UNPROVEN_BYTES if self._session is None else MOST_MESSAGE_BYTES
        if magic != _MAGIC or length > most:
            raise CheckpointError(f"the other side sent no message of this protocol, or one of more than {most} bytes")
        body = self._exactly(length, deadline - time.monotonic())
        if not hmac.compare_digest(signature, self._signature(self._peers_role, self._received, body)):
            raise CheckpointError("a message was altered on its way (its HMAC differs)")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise CheckpointError("the other side sent something that is no JSON object")
        return message

    def send_bytes(self, content: bytes | memoryview) -> None:
        """All of it, within STALL_SECONDS."""
        try:
            self._connection.settimeout(STALL_SECONDS)
            self._connection.sendall(content)
        except OSError as error:
            raise _lost(error, STALL_SECONDS) from None

    def receive_bytes(self, count: int) -> bytes:
        """Exactly this many bytes of a file, at most CHUNK_BYTES, within STALL_SECONDS."""
        return self._exactly(count, STALL_SECONDS)

    def _signature(self, role: str, number: int, body: bytes) -> bytes:
        if self._session is None:
            return bytes(32)
        return hmac.digest(self._session, f"{role} {number} ".encode() + body, hashlib.sha256)

    def _exactly(self, count: int, seconds: float) -> bytes:
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


def _lost(error: OSError, seconds: float) -> Lost:
    return Lost(f"nothing got through within {seconds:.0f} s" if isinstance(error, TimeoutError) else str(error))
