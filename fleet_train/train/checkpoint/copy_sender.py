"""Rank 0's part of copies: sends published checkpoints to other nodes, during training; `receiving` is the other side.

The sender announces a checkpoint: its name, the SHA-256 of its marker, and its files with their sizes. A receiver that
has it answers so; otherwise the bytes of the files follow, then the SHA-256 of each: every file is read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train.convert.persistables import FILES
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copy_wire import CHUNK_BYTES, CONNECT_SECONDS, Channel, key_of

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
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in files.items()}
            channel.send({"name": storage.name_of(folder), "marker": marker, "kept": kept, "files": sizes})
            if _answer(channel) == "have":
                return False
            channel.send({"sha256": [_send_file(channel, files[name], size) for name, size in sizes.items()]})
            _answer(channel)
            return True
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{folder.name} did not get to {to}: {error}") from None


def open_files(folder: Path, stack: contextlib.ExitStack) -> dict[str, BinaryIO]:
    """The open files of a published checkpoint, consistent even if it is replaced meanwhile; marker last."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, inside)
    there = os.listdir(inside)
    return {
        name: stack.enter_context(open(os.open(name, os.O_RDONLY, dir_fd=inside), "rb"))
        for name in FILES
        if name in there or name == storage.MARKER
    }


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


def _answer(channel: Channel) -> str:
    message = channel.receive(PLACING_SECONDS)
    if "problem" in message:
        raise CheckpointError(str(message["problem"]))
    return str(message.get("answer"))


_UNDER_WAY = "the wait for its transfer was over before it ended"


class Copier:
    """Makes the receivers' folders equal to rank 0's: newest first, one transfer at a time, in its own thread.

    Args:
        checkpoints: the folder of published checkpoints.
        receivers: by name, for messages.
        source: this node's own address, used for sending.
        say: gets a message when a copy failed, from the thread.
    """

    def __init__(
        self,
        checkpoints: Path,
        receivers: Mapping[str, Address],
        source: str,
        secret: bytes | None,
        say: Callable[[str], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._receivers = receivers
        self._source, self._secret = source, secret
        self._say = say
        self._changed = threading.Condition()
        self._is_wanted = self._is_at_work = False
        self._behind = dict.fromkeys(receivers, "nothing was sent")
        self.made = 0
        """Checkpoints newly stored by receivers, summed over all receivers."""
        self.failed = 0
        """Failed attempts."""

    def offer(self) -> None:
        """Called when the folder has changed. Returns at once; the next round begins after a transfer under way."""
        with self._changed:
            self._is_wanted = bool(self._receivers)
            if self._is_at_work or not self._is_wanted:
                return
            self._is_at_work = True
        threading.Thread(target=self._work, name="fleet_train copies of checkpoints", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether everything offered has been tried; waits at most this long."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._is_at_work and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._is_at_work

    def behind(self) -> dict[str, str]:
        """The receivers that lack the newest checkpoint as far as is known, and why."""
        with self._changed:
            return dict.fromkeys(self._receivers, _UNDER_WAY) if self._is_wanted else dict(self._behind)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._is_wanted:
                    self._is_at_work = False
                    self._changed.notify_all()
                    return
                self._is_wanted = False
                self._behind = dict.fromkeys(self._receivers, _UNDER_WAY)
            for name, address in self._receivers.items():
                try:
                    self._bring(name, address)
                except Exception as error:  # any error: training goes on
                    self.failed += 1
                    if name in self._behind:
                        self._behind[name] = str(error)
                    self._say(f"no copy on {name}: {error}; training goes on, the next checkpoint tries again")

    def _bring(self, name: str, address: Address) -> None:
        published = storage.complete(self._checkpoints)
        kept = [storage.name_of(path) for path in published]
        for folder in reversed(published):
            try:
                self.made += send(address, self._source, folder, kept, self._secret)
                self._behind.pop(name, None)  # the first one is the newest
            except CheckpointError:
                if folder.is_dir():  # else the retention rule has removed it meanwhile
                    raise
