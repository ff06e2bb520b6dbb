"""Memory that worker processes write and this process reads without a copy.

Anonymous files (memfd) instead of names in /dev/shm: nothing remains after a process ends in any way, and a container's
64 MB limit on /dev/shm does not apply.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray


class Slot:
    """One piece of shared memory."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(f"fleet_train-batch-{number}")
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)


class SlotPool:
    """Slots that are returned automatically when the arrays over them are no longer used."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        # The garbage collector's callbacks may run on any thread: appending to a deque is atomic.
        self._free: deque[Slot] = deque()

    def take(self, num_bytes: int) -> Slot:
        """A free slot of at least that size."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if slot.num_bytes >= num_bytes:
                return slot
            self._free.append(slot)
        self._slots.append(Slot(len(self._slots), num_bytes))
        return self._slots[-1]

    def lend(self, slot: Slot, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The slot as an array; it is free again when the array and all views of it are gone."""
        whole = np.frombuffer(slot.memory, np.float32, int(np.prod(shape)))
        weakref.finalize(whole, self._free.append, slot).atexit = False
        return whole.reshape(shape)

    def give_back(self, slot: Slot) -> None:
        """Return a slot that was taken and not lent."""
        self._free.append(slot)

    def close(self) -> None:
        """Release all slots. Lent arrays stay valid: the memory is freed with the last of them."""
        for slot in self._slots:
            os.close(slot.descriptor)
        self._slots.clear()
        self._free.clear()
