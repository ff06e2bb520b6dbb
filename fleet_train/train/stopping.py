"""A signal that asks this rank to stop becomes a request that all ranks answer at the same step.

SIGTERM is what Kubernetes, Slurm and ``launch`` send before they kill; Slurm sends SIGUSR1 earlier where asked to
(``sbatch --signal=USR1@120``). The first signal asks; a second one ends the process at once, as it would without us.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def listening(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Within the block, a stopping signal calls ``request_stop`` (``fleet.request_stop``) with its name.

    Python runs the handler between two steps, never inside Paddle. Outside the main thread, where Python allows no
    handlers, the block listens to nothing: its owner decides what signals mean.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        for each in STOPPING_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        request_stop(signal.Signals(number).name)

    before = {each: signal.signal(each, on_signal) for each in STOPPING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
