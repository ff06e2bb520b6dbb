"""Folders that belong to one launcher as long as it lives: the kernel lets go of them, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from fleet_train.files import read_regular
from fleet_train.launch.rendezvous.round import Say

_LOCK = ".lock"
_MOST_BYTES = 1000
# Of this process: what it has asked for -> what it has got, and its hold on it.
_taken: dict[Path, tuple[Path, BinaryIO | None]] = {}


def take_log_dir(wanted: Path, say: Say) -> Path:
    """The folder for this launcher's logs, in all attempts: ``wanted``, or beside it when another job is using it.

    Makes it. Raises OSError when nothing can be written there.
    """
    if wanted in _taken:
        return _taken[wanted][0]
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = hold(folder)
        except BlockingIOError:
            continue
        if held is not None:
            held.truncate(0)
            held.write(f"process {os.getpid()} of {socket.gethostname()}\n".encode())
        if number > 1:
            say(f"{wanted} is in use by another job ({owner(wanted)}); the logs of this one go to {folder} (--log_dir)")
        _taken[wanted] = folder, held
        break
    return _taken[wanted][0]


def hold(folder: Path) -> BinaryIO | None:
    """Hold it until the file that is returned is closed; None on a file system without locks.

    Raises BlockingIOError when somebody else holds it, OSError when nothing can be made there, or when somebody has
    placed a link under the name of the lock.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(folder / _LOCK, flags, 0o666), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        file.close()
        return None
    return file


def owner(folder: Path) -> str:
    """``process 4711 of node-3``."""
    with suppress(OSError):
        told = read_regular(folder / _LOCK, _MOST_BYTES).decode(errors="replace")
        return "".join(sign for sign in told if sign.isprintable())
    return "an unknown process"


def remove_abandoned(folder: Path) -> None:
    """Remove it where it was held by a process that has ended since; not where that cannot be told."""
    with suppress(OSError), (folder / _LOCK).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
