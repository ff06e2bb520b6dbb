"""Sends one published checkpoint to another node of the job, atomically; `receiving` is the other side.

The sender asks with the checkpoint's name and the SHA-256 of its marker. A receiver that has it answers so; otherwise
the list of files follows, then their bytes, then the SHA-256 of each: every file is read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copies.wire import CHUNK_BYTES, CONNECT_SECONDS, STALL_SECONDS, Channel, key_of

PLACING_SECONDS = 120.0
"""Time for the receiver to sync the data and to remove old checkpoints."""


@dataclass(frozen=True)
class Address:
    """Where a receiver listens, and the token that a sender must know. Sent only through the job's store."""

    host: str
    port: int
    token: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class File:
    """One file of a checkpoint; its bytes follow in the order of the list."""

    name: str
    size: int
    """Bytes."""


def send(
    to: Address, source: str, folder: Path, kept: Sequence[str] | None = None, secret: bytes | None = None
) -> bool:
    """Send a published checkpoint to the receiver; False if it had it already.

    ``source``: this node's own address. ``kept``: names of the checkpoints that the receiver is to keep of this run,
    others of it are removed there; None = all. Raises CheckpointError with the reason if it was not accepted.
    """
    try:
        with contextlib.ExitStack() as stack:
            files = open_files(folder, stack)
            connection = socket.create_connection((to.host, to.port), CONNECT_SECONDS, (source, 0))
            channel = Channel(stack.enter_context(connection), key_of(to.token, secret))
            channel.prove_as_sender()
            marker = hashlib.sha256(files[storage.MARKER].read()).hexdigest()
            channel.send({"name": storage.name_of(folder), "marker": marker, "kept": kept})
            if _answer(channel, PLACING_SECONDS) == "have":
                return False
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in files.items()}
            channel.send({"files": [asdict(File(name, size)) for name, size in sizes.items()]})
            _answer(channel, STALL_SECONDS)
            channel.send({"sha256": [_send_file(channel, files[name], size) for name, size in sizes.items()]})
            _answer(channel, PLACING_SECONDS)
            return True
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{folder.name} did not get to {to}: {error}") from None


def open_files(folder: Path, stack: contextlib.ExitStack) -> dict[str, BinaryIO]:
    """The open files of a published checkpoint, consistent even if it is replaced meanwhile; marker last."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, inside)

    def opened(name: str) -> BinaryIO:
        return stack.enter_context(open(os.open(name, os.O_RDONLY, dir_fd=inside), "rb"))

    marker = opened(storage.MARKER)
    try:
        names = sorted(json.loads(marker.read())["files"])
        marker.seek(0)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / storage.MARKER} cannot be read: {error}") from None
    return {name: opened(name) for name in names} | {storage.MARKER: marker}


def _send_file(channel: Channel, file: BinaryIO, size: int) -> str:
    """Its SHA-256. Raises CheckpointError when the file is shorter."""
    file.seek(0)
    digest, left = hashlib.sha256(), size
    while left:
        piece = file.read(min(CHUNK_BYTES, left))
        if not piece:
            raise CheckpointError("a file became shorter while it was sent")
        digest.update(piece)
        channel.send_bytes(piece)
        left -= len(piece)
    return digest.hexdigest()


def _answer(channel: Channel, seconds: float) -> str:
    message = channel.receive(seconds)
    if "problem" in message:
        raise CheckpointError(str(message["problem"]))
    return str(message.get("answer"))
