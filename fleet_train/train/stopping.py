"""How a training is asked to stop, and what it says once its state is saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fleet_train import timeouts
from fleet_train.convert.session import current
from fleet_train.errors import NotSaved, Preempted
from fleet_train.train.checkpoint.manager import Checkpoints

_COPIES_STOP_SECONDS = 20.0
"""How long other nodes have to write their checkpoints at a graceful stop: less than the launcher's grace of 30 s."""
_SAME_KEY_SECONDS = 0.2
"""How far apart Ctrl-C that was typed once may come twice: from the terminal, and from a program that passes it on."""

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def preempted(checkpoints: Checkpoints | None, step: int, why: str) -> Preempted:
    """What ends a training that was asked to stop and has saved after ``step``; all ranks call it, and raise it.

    Waits for the write, and for copies on other nodes. Raises NotSaved if the state could not be written.
    """
    saved, lacking = None, ""
    try:
        if checkpoints is not None:
            saved, lacking = checkpoints.wait(_COPIES_STOP_SECONDS)
    except NotSaved as error:
        raise NotSaved(f"stopped after step {step}: {why}; {error}") from None
    current().job.notes.forget_stop()
    kept = "nothing was saved" if saved is None else f"resume from {saved}"
    message = f"stopped after step {step}: {why}; {kept}"
    return Preempted(f"{message}; note: {lacking}" if lacking else message)


@contextmanager
def listening(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Within the block, a stopping signal calls ``request_stop`` (``fleet.request_stop``) with its name.

    Kubernetes, Slurm and ``launch`` send SIGTERM before they kill; Slurm sends SIGUSR1 earlier if configured (``sbatch
    --signal=USR1@120``); a terminal sends SIGINT at Ctrl-C. The first signal requests a stop; a later one ends the
    process at once, as by default. If Slurm signals every process of a step, a rank gets the same signal twice, from
    Slurm and from its launcher: signals within SAME_STOP_SECONDS of the first count as the same request. Two of
    Ctrl-C are two unless they come faster than anybody types. A process in the background, which ignores Ctrl-C, goes
    on doing so.

    Python runs the handler between two steps, never inside Paddle. Outside the main thread, where Python allows no
    handlers, the block does nothing: the caller handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked: list[tuple[int, float]] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if not asked:
            asked.append((number, time.monotonic()))
            request_stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
            if number == signal.SIGINT:
                os.write(2, b"\nfleet_train: Ctrl-C: stopping after this step; a second one ends it at once\n")
            return
        typed_twice = number == asked[0][0] == signal.SIGINT
        same_seconds = _SAME_KEY_SECONDS if typed_twice else timeouts.SAME_STOP_SECONDS
        if time.monotonic() - asked[0][1] > same_seconds:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    before = {
        each: signal.signal(each, on_signal) for each in STOPPING_SIGNALS if each != signal.SIGINT or not is_ignored
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
