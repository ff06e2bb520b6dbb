"""A folder of checkpoints belongs to one process at a time: two runs in it would replace each other's checkpoints.

The kernel releases the lock when the process ends, however it ends. On a file system without locks there is none.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fleet_train import fleet, timeouts
from fleet_train.cluster.environment import attempt
from fleet_train.errors import CheckpointError
from fleet_train.files import hold, holder
from fleet_train.log import logger
from fleet_train.train.agree import together
from fleet_train.train.checkpoint import storage

_FOLDER_ELSEWHERE_SECONDS = 120.0
"""How long to wait for a process of another machine that has the folder of checkpoints: a file server releases the lock
of one that lost its power after a minute and a half."""
_FOLDER_POLL_SECONDS = 0.2
"""Pause between two attempts to lock the folder of checkpoints."""

_held: dict[tuple[int, int], BinaryIO | None] = {}
"""The locks of this process, by device and inode of the folder."""


def _leave_to_parent() -> None:
    """Drop the locks in a forked process, which may outlive its parent: closing a copy does not release the lock."""
    while _held:
        if (file := _held.popitem()[1]) is not None:
            file.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def claim(checkpoints: Path, is_mine: bool, seconds: float, *, must_be_writable: bool) -> bool:
    """Lock the folder for this process on the ranks for which it ``is_mine``; all ranks call it.

    Whether all have it now: without ``must_be_writable``, a disk that takes no file is left to the write that follows.
    CheckpointError on every rank names the process that holds the folder, or what is wrong with it. ``seconds``: how
    long a disk may take.
    """
    work = partial(_lock, checkpoints, must_be_writable) if is_mine else None
    outcomes = together(work, seconds + _FOLDER_ELSEWHERE_SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome["problem"] is not None:
            where = "" if rank == 0 else f"rank {rank} ({fleet.worker_endpoints()[rank]}): "
            raise CheckpointError(f"{where}{outcome['problem']}")
    return all(outcome["value"] is not False for outcome in outcomes)


def release(checkpoints: Path) -> None:
    """Unlock the folder: another process may have it."""
    with suppress(OSError):
        if (file := _held.pop(_key(checkpoints), None)) is not None:
            file.close()


def _lock(checkpoints: Path, must_be_writable: bool) -> bool:
    storage.refuse_no_folder(checkpoints)
    until = None
    while True:
        try:
            if not checkpoints.is_dir():
                checkpoints.mkdir(parents=True, exist_ok=True)
            if (key := _key(checkpoints)) not in _held:
                _held[key] = hold(checkpoints)
            return True
        except BlockingIOError:
            who = holder(checkpoints)
            if until is None:
                is_here = who.endswith(f" of {socket.gethostname()}")
                is_brief = is_here and attempt(os.environ) == 0
                most = timeouts.FOLDER_HERE_SECONDS if is_brief else _FOLDER_ELSEWHERE_SECONDS
                until = time.monotonic() + most
                logger.info("%s is in use by %s; waiting for its end, at most %g s", checkpoints, who, most)
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{checkpoints} is in use by {who}: two runs in one folder would replace each other's checkpoints; "
                    "end that run, or give another folder (--output_dir)"
                ) from None
            time.sleep(_FOLDER_POLL_SECONDS)
        except OSError as error:
            if must_be_writable and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(
                    f"{checkpoints} cannot be written: {error.strerror}; make it writable, or give another folder "
                    "(--output_dir)"
                ) from None
            return False


def _key(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
