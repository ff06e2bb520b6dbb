"""Signals to a launcher: a graceful stop while ranks run, an immediate end otherwise."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fleet_train.errors import Preempted
from fleet_train.launch.report.worker_result import signal_name

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1)
"""Kubernetes, Slurm and ``kill`` send SIGTERM; Slurm's ``--signal=USR1@seconds`` comes earlier."""
_HANDLED = (signal.SIGINT, signal.SIGHUP, *GRACEFUL)


class StopRequested(BaseException):
    """Ctrl-C, a closed terminal, or a second signal. Not an Exception, so that no handler swallows it.

    ``may_go_on``: a graceful signal between two attempts: there is nothing to save beyond what earlier ones saved.
    """

    def __init__(self, number: int, may_go_on: bool = False) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = Preempted.exit_code if may_go_on else 128 + number


class Stopping:
    """``asked``: the graceful signal that arrived while ranks were monitored; 0 if none did."""

    def __init__(self) -> None:
        self.asked = 0
        self._watching = False
        self._has_watched = False

    @contextmanager
    def gracefully(self) -> Iterator[None]:
        """Within the block the first graceful signal is only recorded, so that the ranks can save their state."""
        self._watching = self._has_watched = True
        try:
            yield
        finally:
            self._watching = False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if number in GRACEFUL and self._watching and not self.asked:
            self.asked = number
            return
        for each in _HANDLED:
            signal.signal(each, signal.SIG_IGN)
        may_go_on = number in GRACEFUL and self._has_watched and not self._watching and not self.asked
        raise StopRequested(number, may_go_on)


@contextmanager
def stopping_signals() -> Iterator[Stopping]:
    """Deliver signals to the given Stopping; after one that raises StopRequested, later ones have no effect."""
    stopping = Stopping()
    before = {number: signal.getsignal(number) for number in _HANDLED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number == signal.SIGTERM:  # nohup ignores SIGHUP: keep that
            signal.signal(number, stopping.on_signal)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def request_name(number: int) -> str:
    """``SIGTERM``; ``Ctrl-C`` for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number)
