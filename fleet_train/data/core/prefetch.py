"""Prepare the next items in a thread while the current one is being used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _End:
    """The last item in the queue: the source is exhausted, or failed with `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetcher(Generic[Item]):
    """Iterate over `source` with up to `depth` items ready in advance; order and exceptions are preserved.

    Use it in a `with` statement, or call `close`: a loop that stops early must not leave a thread behind.
    `close` sets `closing`, which a source that may wait for long should check.
    """

    def __init__(self, source: Iterable[Item], depth: int = 2, closing: threading.Event | None = None) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}; at least 1 item must be prefetched")
        self._queue: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._closing = closing or threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._fill, args=(source,), name="fleet_train-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; prepared items are dropped. May be called twice."""
        self._finished = True
        self._closing.set()
        self._thread.join()
        with self._queue.mutex:
            self._queue.queue.clear()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, source: Iterable[Item]) -> None:
        try:
            self._copy(source)
            self._put(_End())
        except BaseException as error:
            self._put(_End(error))

    def _copy(self, source: Iterable[Item]) -> None:
        for item in source:
            if not self._put(item):
                break
            del item  # the consumer has the last reference: memory is freed when the consumer is done
        if isinstance(source, Generator):
            source.close()  # now, on the thread on which it ran

    def _put(self, item: Item | _End) -> bool:
        """False if the consumer has gone: a plain put() would wait forever on a full queue."""
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False
