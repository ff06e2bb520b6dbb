"""Receives checkpoints from another node of the job: data is verified and synced, then renamed into place.

All data from a sender is validated before use: names without folders, sizes that fit on the disk, hashes.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet_train.cluster.store.access import Callers, Strangers, new_nonce
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copy_sender import PLACING_SECONDS, Address, File
from fleet_train.train.checkpoint.copy_wire import CHUNK_BYTES, Channel, key_of

MOST_FILES = 1000
"""In one checkpoint."""
SPARE_BYTES = 1 << 20
"""Space that must stay free on the receiver's disk."""
_MOST_STRANGERS = 128
"""The most unauthenticated connections: beyond these the oldest one is closed."""
_CHUNKS_BETWEEN_SYNCS = 128
_NAME = re.compile(r"step-[0-9]{8,20}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
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
    final = checkpoints / name
    if (final / storage.MARKER).is_file() and storage.marker_digest(final) == marker:
        _tidy(checkpoints, final, kept)
        channel.send({"answer": "have"})
        return
    channel.send({"answer": "send"})
    files = listed(channel.receive(PLACING_SECONDS).get("files"))
    checkpoints.mkdir(parents=True, exist_ok=True)
    refuse_full_disk(checkpoints, sum(one.size for one in files))
    channel.send({"answer": "go"})
    draft = storage.begin_draft(storage.copy_of(checkpoints, name))
    try:
        _receive_files(channel, draft, files)
        if storage.marker_digest(draft) != marker:
            raise CheckpointError(f"{name} is not the one that was announced")
        _check(draft, name)
        storage.put_in_place(draft, final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _tidy(checkpoints, final, kept)
    channel.send({"answer": "ok"})


def listed(told: object) -> list[File]:
    """The files that a sender lists. CheckpointError for names that no checkpoint can have, such as ``../name``."""
    if not isinstance(told, list) or not 0 < len(told) <= MOST_FILES:
        raise CheckpointError(f"a checkpoint has 1 to {MOST_FILES} files, and these are listed")
    files = [_file(one) for one in told]
    names = {one.name for one in files}
    if len(names) < len(files) or storage.MARKER not in names:
        raise CheckpointError(f"a file is listed twice, or {storage.MARKER} is not listed")
    return files


def _file(told: object) -> File:
    entry: Mapping[str, Any] = told if isinstance(told, dict) else {}
    name, size = entry.get("name"), entry.get("size")
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is not a name of a checkpoint's file: no folder, no leading dot, at most 200 characters"
        )
    if type(size) is not int or size < 0:
        raise CheckpointError(f"{name} has no size")
    return File(name, size)


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


def refuse_full_disk(folder: Path, size: int) -> None:
    """Raise CheckpointError unless this many bytes fit on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise CheckpointError(
            f"the disk of {folder} has {free} bytes free, and the checkpoint has {size}; make room there"
        )


def _receive_files(channel: Channel, draft: Path, files: Sequence[File]) -> None:
    """Read all bytes from the connection even if the disk does not take them, so that the sender gets the reason."""
    problem: OSError | None = None
    digests = []
    for one in files:
        digest = hashlib.sha256()
        pieces = _hashed(channel, one.size, digest)
        try:
            _write_file(draft / one.name, pieces)
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
    state = storage.read_state(draft)
    if storage.folder_of(draft.parent, int(state.get("step", -1))).name != name:
        raise CheckpointError(f"{name} holds the state of step {state.get('step')}")


def _tidy(checkpoints: Path, final: Path, kept: set[str] | None) -> None:
    """Remove what the sender's retention rule has removed; move other runs aside."""
    if kept is not None:
        run = storage.run_of(final)
        storage.set_aside(checkpoints, run)
        storage.keep_only(checkpoints, {*kept, final.name})
