"""Receives checkpoints from another node of the job: data is verified and synced, then renamed into place.

All data from a sender is validated before use: names, sizes that fit on the disk, hashes.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet_train.cluster.store.access import Callers, Strangers, new_nonce
from fleet_train.convert.persistables import FILES
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copy_sender import Address
from fleet_train.train.checkpoint.copy_wire import CHUNK_BYTES, Channel, key_of

SPARE_BYTES = 1 << 20
"""Space that must stay free on the receiver's disk."""
_MOST_STRANGERS = 128
"""The most unauthenticated connections: beyond these the oldest one is closed."""
_CHUNKS_BETWEEN_SYNCS = 128
_NAME = re.compile(r"step-[0-9]{8,20}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
        self._strangers: Strangers[socket.socket] = Strangers(_MOST_STRANGERS, _hang_up)
        self._taking = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="fleet_train copies", daemon=True).start()

    def close(self) -> None:
        """Receive nothing more; a copy under way is aborted."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for connection in list(self._connections):
            _hang_up(connection)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, (address, _) = self._listener.accept()
            except OSError:
                if self._closed.wait(0.1):  # too many open files: there will be fewer
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
            with self._taking:
                try:
                    take(channel, self._checkpoints)
                except Exception as error:  # any error: this node's training goes on
                    channel.send({"problem": str(error)})
        self._connections.discard(connection)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # its thread closes it


def take(channel: Channel, checkpoints: Path) -> None:
    """One checkpoint from an authenticated sender. Raises CheckpointError or OSError with nothing changed."""
    request = channel.receive()
    name, marker, kept = _name(request.get("name")), _digest(request.get("marker")), _kept(request.get("kept"))
    sizes = sizes_of(request.get("files"))
    final = checkpoints / name
    if (final / storage.MARKER).is_file() and storage.marker_digest(final) == marker:
        _tidy(checkpoints, final, kept)
        channel.send({"answer": "have"})
        return
    checkpoints.mkdir(parents=True, exist_ok=True)
    _refuse_full_disk(checkpoints, sum(sizes.values()))
    draft = storage.begin_draft(storage.copy_of(checkpoints, name))
    try:
        channel.send({"answer": "send"})
        _receive_files(channel, draft, sizes)
        if storage.marker_digest(draft) != marker:
            raise CheckpointError(f"{name} is not the one that was announced")
        _check(draft, name)
        storage.put_in_place(draft, final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _tidy(checkpoints, final, kept)
    channel.send({"answer": "ok"})


def sizes_of(told: object) -> dict[str, int]:
    """Bytes by file, as a sender lists them. CheckpointError for names that no checkpoint has, such as ``../name``."""
    if not isinstance(told, dict) or storage.MARKER not in told or told.keys() - {*FILES}:
        raise CheckpointError(f"the files of a checkpoint are {storage.MARKER} and others of {', '.join(FILES)}")
    if not all(type(size) is int and size >= 0 for size in told.values()):
        raise CheckpointError("a file has no size")
    return told


def _name(told: object) -> str:
    if not isinstance(told, str) or not _NAME.fullmatch(told):
        raise CheckpointError(f"{told!r} is not a name of a checkpoint, such as step-00000440")
    return told


def _digest(told: object) -> str:
    if not isinstance(told, str) or not _SHA256.fullmatch(told):
        raise CheckpointError("a SHA-256 is missing; it has 64 hexadecimal digits")
    return told


def _kept(told: object) -> set[str] | None:
    return {_name(one) for one in told} if isinstance(told, list) else None


def _refuse_full_disk(folder: Path, size: int) -> None:
    """Raise CheckpointError unless this many bytes fit on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise CheckpointError(
            f"the disk of {folder} has {free} bytes free, and the checkpoint has {size}; make room there"
        )


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
    told = channel.receive().get("sha256")
    if problem is not None:
        raise problem
    if digests != told:
        raise CheckpointError("a file was altered on its way (SHA-256 differs)")


def _hashed(channel: Channel, size: int, digest: Any) -> Iterator[bytes]:
    for start in range(0, size, CHUNK_BYTES):
        piece = channel.receive_bytes(min(CHUNK_BYTES, size - start))
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


def _check(draft: Path, name: str) -> None:
    """Check that it is a checkpoint of that step, as far as possible without its tensors."""
    state = storage.read(draft).state
    if storage.folder_of(draft.parent, int(state.get("step", -1))).name != name:
        raise CheckpointError(f"{name} holds the state of step {state.get('step')}")


def _tidy(checkpoints: Path, final: Path, kept: set[str] | None) -> None:
    """Remove what the sender's retention rule has removed; move other runs aside."""
    if kept is not None:
        storage.set_aside(checkpoints, storage.read(final).run)
        storage.keep_only(checkpoints, {*kept, final.name})
