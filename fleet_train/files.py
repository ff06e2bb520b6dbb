"""Files in folders that others may write to: created without following links, read up to a limit; locked folders."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

LOCK = ".lock"
_MOST_LOCK_BYTES = 1000
_PIECE_BYTES = 1 << 16


def open_new(path: Path) -> Any:
    """A new file of this name, open for unbuffered writing. An existing file is removed first, not written to.

    Otherwise a link placed here by another user would redirect the content into another file of ours. Raises OSError.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)


def write_new(path: Path, content: bytes) -> None:
    """A new file with this content, as `open_new` makes it."""
    with open_new(path) as file:
        write_all(file, content)


def publish(path: Path, content: bytes, draft_name: str, *, synced: bool = False) -> None:
    """Write a file atomically: as ``draft_name`` in the same folder, then renamed. Raises OSError.

    ``synced``: the content is synced to the disk before the rename.
    """
    draft = path.with_name(draft_name)
    with open_new(draft) as file:
        write_all(file, content)
        if synced:
            os.fsync(file.fileno())
    os.replace(draft, path)


def sync_folder(path: Path) -> None:
    """Let the names in a folder be on the disk, in the order of their changes so far. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_where_linked(path: Path, content: bytes) -> Path:
    """``publish`` for a file that users may have linked to another disk; returns where it was written.

    This user's link to a file, or to a free name, is kept. A link made by another user is replaced, and so is one to
    ``/dev/null``, a pipe or a folder; its target is not changed. Raises OSError.
    """
    real = where_linked(path)
    publish(real, content, f".{real.name}.draft")
    return real


def where_linked(path: Path) -> Path:
    """The file that ``publish_where_linked`` writes."""
    is_own_link = path.is_symlink() and path.lstat().st_uid == os.geteuid()
    real = Path(os.path.realpath(path)) if is_own_link else path
    return path if os.path.lexists(real) and not real.is_file() else real


class NotThatFile(OSError):
    """A file is of another kind or larger than allowed; the message says which."""


def opened_regular(path: str | Path) -> BufferedReader:
    """A regular file, open for reading; never waits for a pipe. Raises OSError, or NotThatFile for other kinds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotThatFile("is not a regular file")
    return open(descriptor, "rb")


@contextmanager
def open_regular(path: str | Path) -> Iterator[BufferedReader]:
    """``opened_regular`` for ``with``."""
    with opened_regular(path) as file:
        yield file


def lines_of(path: str | Path, most_bytes: int) -> Iterator[bytes]:
    """The lines of a regular file with their ends, one after the other in memory, of at most this many bytes in all.

    Raises OSError, and NotThatFile for other kinds and, before a line is given, for a larger file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise NotThatFile(f"has {size} bytes, at most {most_bytes} are read")
        while most_bytes > 0 and (line := file.readline(most_bytes)):
            yield line
            most_bytes -= len(line)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file of at most this many bytes; a larger one is not read.

    Raises OSError, and NotThatFile for a folder, pipe or device, and for a larger file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise NotThatFile(f"has {size} bytes, at most {most_bytes} are read")
        content = bytearray()
        # In pieces: one read of this many bytes would allocate their memory first.
        while len(content) <= most_bytes and (piece := file.read(_PIECE_BYTES)):
            content += piece
    if len(content) > most_bytes:  # it grows, or is in /proc, where files report 0 bytes
        raise NotThatFile(f"has more than {most_bytes} bytes")
    return bytes(content)


def parse_json(content: bytes) -> Any:
    """The value of a JSON text that may be damaged or malicious. Raises ValueError."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_all(file: Any, content: bytes | memoryview) -> None:
    """Write all of ``content`` into an unbuffered file."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]  # a nearly full disk may accept only a part


def hold(folder: Path) -> BinaryIO | None:
    """Lock a folder until the returned file is closed, or the process ends; None on a file system without locks.

    Raises BlockingIOError if another process holds it, OSError if nothing can be created there, or if the name of
    the lock is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(folder / LOCK, flags, 0o666), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        file.close()
        return None
    with suppress(OSError):  # a full disk: the lock holds without a name
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n".encode())
    return file


def holder(folder: Path) -> str:
    """The process that has locked a folder, in words: ``process 4711 of node-3``."""
    with suppress(OSError):
        owner = read_regular(folder / LOCK, _MOST_LOCK_BYTES).decode(errors="replace")
        return "".join(sign for sign in owner if sign.isprintable()) or "an unknown process"
    return "an unknown process"
