"""What all nodes know, brought from each to each: values that never change, under keys such as ``report/2``."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

MOST_KEYS = 4096


class Board:
    """This node's copy. Two nodes that talk give each other what the other one does not have."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.take({key: value})

    def take(self, told: dict[str, Any]) -> None:
        """What another node has told; the first value of a key stands."""
        with self._lock:
            for key, value in told.items():
                if len(self._values) < MOST_KEYS:
                    self._values.setdefault(str(key)[:100], value)
            self._lock.notify_all()

    def get(self, key: str) -> Any:
        """None: nobody has told it."""
        with self._lock:
            return self._values.get(key)

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._values)

    def beyond(self, known: Iterable[str]) -> dict[str, Any]:
        """What somebody who knows these keys does not know."""
        with self._lock:
            known = set(known)
            return {key: value for key, value in self._values.items() if key not in known}

    def nodes(self, kind: str) -> set[int]:
        """Those for whom there is a value of this kind (``report`` for ``report/2``)."""
        names = (key.partition("/") for key in self.keys())
        return {int(number) for name, _, number in names if name == kind and number.isdigit()}

    def wait(self, seconds: float) -> None:
        """Until somebody tells something, at most so long."""
        with self._lock:
            self._lock.wait(seconds)
