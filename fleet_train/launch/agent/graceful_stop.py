"""The graceful stop of one attempt: who requested it, which nodes are notified, how long ranks may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet_train.launch.rendezvous.round import Rendezvous
from fleet_train.launch.workers import processes
from fleet_train.launch.workers.signals import Stopping, request_name
from fleet_train.launch.workers.watching import RankFiles

# In addition to another node's grace: how long the notice of its end may take.
_NEWS_SECONDS = 5.0
# Before that, ranks may still be starting and have no handler for SIGTERM.
_SETTLED_SECONDS = 20.0

WaitingNodes = Callable[[], str | None]


class GracefulStop:
    """Once a stop has been requested, on any node, the ranks of this node have a bounded time to end.

    A signal to this launcher ends the job. Waiting nodes (the leader sees which have come back and are ready) cause
    another attempt that includes them.
    """

    def __init__(
        self,
        files: RankFiles,
        rendezvous: Rendezvous,
        stopping: Stopping,
        grace_seconds: float,
        waiting_nodes: WaitingNodes,
        clock: Callable[[], float],
    ) -> None:
        self.by_signal = False
        self.for_waiting_nodes = ""
        self._files = files
        self._rendezvous = rendezvous
        self._stopping = stopping
        self._grace_seconds = grace_seconds
        self._waiting_nodes = waiting_nodes
        self._clock = clock
        self._until: float | None = None
        self.is_announced = False
        """Announced on some node: ranks that end or are lost within the bound count as part of it."""

    @property
    def wanted_here(self) -> bool:
        return self.by_signal or bool(self.for_waiting_nodes)

    @property
    def signal_number(self) -> int:
        return self._stopping.asked

    @property
    def is_over(self) -> bool:
        """Whether the ranks' time is over."""
        return self._until is not None and self._clock() > self._until

    def heed(self, *, one_has_stopped: bool) -> None:
        """Once per tick: signals, and ranks that another process asked to stop."""
        if self._stopping.asked and not self.by_signal:
            self.by_signal = True
            self._ask(f"{self._files.node.describe()} was asked to stop by {request_name(self._stopping.asked)}")
        elif one_has_stopped and self._until is None:
            self._until = self._clock() + self._grace_seconds

    def ask_store(self) -> None:
        """Periodically: what other nodes have announced, and which nodes have come back."""
        if self._until is not None:
            return
        notice: dict[str, Any] | None = self._rendezvous.stop_announced()
        if notice is not None:
            self._until = self._clock() + float(notice["grace_seconds"]) + _NEWS_SECONDS
            self.is_announced = True
        elif self._clock() > self._rendezvous.start + _SETTLED_SECONDS and (why := self._waiting_nodes()):
            self.for_waiting_nodes = why
            self._ask(why)

    def _ask(self, why: str) -> None:
        self._until = self._clock() + self._grace_seconds
        self.is_announced = True
        self._rendezvous.announce_stop(why, self._grace_seconds, again=not self.by_signal)
        processes.ask_to_stop(self._files.wrapper_pids())
