"""A thread that runs tasks in order, in Paddle's dynamic mode, and never delays the exit of the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fleet_train.collectives.paddle_compat.modes import dynamic_mode

_STOP = None
T = TypeVar("T")


class WorkerThread:
    """Runs one task at a time; ``submit`` returns a Future.

    Not a ThreadPoolExecutor, which joins its threads at exit: a thread that waits for a lost rank would block the exit.
    """

    def __init__(self, name: str, place: Any) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._place = place
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def stop(self, timeout_seconds: float = 1.0) -> None:
        self._tasks.put(_STOP)
        self._thread.join(timeout=timeout_seconds)

    def _run(self) -> None:
        # A thread starts in its creator's mode; in static mode the calls below would build graph operators instead.
        with dynamic_mode(self._place):
            while (item := self._tasks.get()) is not _STOP:
                future, task = item
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
