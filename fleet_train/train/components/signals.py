"""Turns a signal to this rank into a stop request that all ranks follow at the same step.

Kubernetes, Slurm and ``launch`` send SIGTERM before they kill; Slurm sends SIGUSR1 earlier if configured (``sbatch
--signal=USR1@120``). The first signal requests a stop; a later one ends the process at once, as by default. If Slurm
signals every process of a step, a rank gets the same signal twice, from Slurm and from its launcher: signals within 2
seconds of the first count as the same request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 2.0


@contextmanager
def listening(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Within the block, a stopping signal calls ``request_stop`` (``fleet.request_stop``) with its name.

    Python runs the handler between two steps, never inside Paddle. Outside the main thread, where Python allows no
    handlers, the block does nothing: the caller handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked_at: list[float] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if not asked_at:
            asked_at.append(time.monotonic())
            request_stop(signal.Signals(number).name)
        elif time.monotonic() - asked_at[0] > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {each: signal.signal(each, on_signal) for each in STOPPING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
