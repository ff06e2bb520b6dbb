"""Folders locked by one launcher for its lifetime: the kernel releases the lock, however the launcher ends."""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from fleet_train.files import LOCK, hold, holder
from fleet_train.launch.rendezvous.round import Say

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
        if number > 1:
            say(
                f"{wanted} is in use by another job ({holder(wanted)}); the logs of this one go to {folder} (--log_dir)"
            )
        _taken[wanted] = folder, held
        break
    return _taken[wanted][0]


def remove_abandoned(folder: Path) -> None:
    """Remove it if the process that held it has ended; not if that is unknown."""
    with suppress(OSError), (folder / LOCK).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
