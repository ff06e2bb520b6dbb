"""Rank 0's part of copies: sends published checkpoints to the nodes that keep them, during training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fleet_train.errors import CheckpointError, printable
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copies.sending import Address, send

_UNDER_WAY = "the wait for its transfer was over before it ended"


class Copier:
    """Makes the receivers' folders equal to rank 0's: newest first, one transfer at a time, in its own thread.

    Args:
        checkpoints: the folder of published checkpoints.
        receivers: by name, for messages.
        source: this node's own address, used for sending.
        say: gets a message when a copy failed, from the thread. None = standard error.
    """

    def __init__(
        self,
        checkpoints: Path,
        receivers: Mapping[str, Address],
        source: str,
        secret: bytes | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._receivers = receivers
        self._source, self._secret = source, secret
        self._say = say or _warn
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


def _warn(message: str) -> None:
    with suppress(OSError, ValueError):  # standard error is closed
        print(f"fleet_train: {printable(message)}", file=sys.stderr, flush=True)
