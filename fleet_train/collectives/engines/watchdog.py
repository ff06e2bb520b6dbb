"""Detects collectives that do not end, while the computing thread may be in a wait that no signal interrupts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleet_train.collectives.engines.engine import Place
from fleet_train.errors import FleetTrainError

POLL_SECONDS = 0.1
# After a collective has waited this long, ask the store. Less than half of the time for attributing a failure: a rank
# whose own timeout has not passed must learn of an attribution that another rank has started, and join it in time.
ASK_SECONDS = 2.0


class _Call:
    """A host call that may block, as a task."""

    def __init__(self) -> None:
        self.has_returned = False

    def is_completed(self) -> bool:
        return self.has_returned


class Watchdog:
    """Polls the tasks in flight on its own thread; it does not touch a device's stream.

    ``on_stuck`` is called, once and on that thread, with the oldest task's place and the seconds without progress:
    when no task has ended for ``timeout_seconds`` of that place, or earlier when ``is_hopeless``: a rank is gone, or
    another rank's watchdog has given up.
    """

    def __init__(self, on_stuck: Callable[[Place, float], None], is_hopeless: Callable[[], bool]) -> None:
        self._on_stuck = on_stuck
        self._is_hopeless = is_hopeless
        self._lock = threading.Lock()
        self._watched: list[tuple[Any, Place]] = []
        self._progressed = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, task: Any, place: Place) -> None:
        """``task``: Paddle's, with ``is_completed()``."""
        with self._lock:
            if not self._watched:
                self._progressed = time.monotonic()
            self._watched.append((task, place))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fleet_train watchdog", daemon=True)
            self._thread.start()

    @contextmanager
    def over_a_call(self, place: Place) -> Iterator[None]:
        """Watch the body: enqueueing blocks while a communicator is being created or a stream's queue is full."""
        call = _Call()
        self.watch(call, place)
        try:
            yield
        finally:
            call.has_returned = True

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        asked = time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            oldest, silence = self._look()
            if oldest is None:
                continue
            is_over = silence >= oldest.timeout_seconds
            if not is_over and silence >= ASK_SECONDS and time.monotonic() - asked >= ASK_SECONDS:
                asked, is_over = time.monotonic(), self._ask()
            if is_over:
                self._on_stuck(oldest, silence)
                return

    def _ask(self) -> bool:
        """A store that does not answer counts as gone, with the rank that hosts it."""
        try:
            return self._is_hopeless()
        except FleetTrainError:
            return True

    def _look(self) -> tuple[Place | None, float]:
        """The place of the oldest unfinished task, and the seconds since a task last ended."""
        with self._lock:
            going_on = [(task, place) for task, place in self._watched if not task.is_completed()]
            if len(going_on) < len(self._watched):
                self._progressed = time.monotonic()
            self._watched = going_on
            return (going_on[0][1] if going_on else None), time.monotonic() - self._progressed
