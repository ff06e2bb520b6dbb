"""Folders locked by one launcher for its lifetime: the kernel releases the lock, however the launcher ends."""

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
# Of this process: requested folder -> assigned folder, and its lock.
_taken: dict[Path, tuple[Path, BinaryIO | None]] = {}


def take_log_dir(wanted: Path, say: Say) -> Path:
    """The folder for this launcher's logs, in all attempts: ``wanted``, or one next to it if another job uses it.

    Creates it. Raises OSError if it is not writable.
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
    """Lock it until the returned file is closed; None on a file system without locks.

    Raises BlockingIOError if another process holds it, OSError if nothing can be created there, or if the name of
    the lock is a link.
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
    """Remove it if the process that held it has ended; not if that is unknown."""
    with suppress(OSError), (folder / _LOCK).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
