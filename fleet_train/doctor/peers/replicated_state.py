"""State replicated to all nodes: values that never change, under keys such as ``report/2``."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

MOST_KEYS = 4096


class ReplicatedState:
    """This node's copy. Two connected nodes send each other the values that the other one lacks."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.take({key: value})

    def take(self, told: dict[str, Any]) -> None:
        """Values from another node; the first value of a key counts."""
        with self._lock:
            for key, value in told.items():
                if len(self._values) < MOST_KEYS:
                    self._values.setdefault(str(key)[:100], value)
            self._lock.notify_all()

    def get(self, key: str) -> Any:
        """None: there is no value yet."""
        with self._lock:
            return self._values.get(key)

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._values)

    def beyond(self, known: Iterable[str]) -> dict[str, Any]:
        """The values that a node with these keys lacks."""
        with self._lock:
            known = set(known)
            return {key: value for key, value in self._values.items() if key not in known}

    def nodes(self, kind: str) -> set[int]:
        """The nodes with a value of this kind (``report`` for ``report/2``)."""
        names = (key.partition("/") for key in self.keys())
        return {int(number) for name, _, number in names if name == kind and number.isdigit()}

    def wait(self, seconds: float) -> None:
        """Wait until a value arrives, at most this long."""
        with self._lock:
            self._lock.wait(seconds)
