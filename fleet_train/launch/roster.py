"""This launcher's seat among the launchers of the job, from the first attempt to the last.

Node 0's launcher hosts the job store, so the store outlives the ranks. A launcher is heard of every few seconds, from a
thread of its own; a machine that falls silent is lost for all. Node 0 gives the orders, the others follow them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fleet_train.cluster.store_client import StoreClient
from fleet_train.cluster.store_server import StoreServer
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout
from fleet_train.launch.node import Node
from fleet_train.launch.request import FaultPolicy

_GROUP = "seat"
_ORDER = "order"
_FACTS = "facts"
_STOPPED = "stopped"
_POLL_SECONDS = 0.2
_BEATS_PER_TIMEOUT = 4
_GOODBYE_SECONDS = 1.5  # three looks of a launcher that is still at work

Facts = dict[str, Any]
Order = dict[str, Any]
Say = Callable[[str], None]


class Roster:
    """Who is here, over all attempts. Raises JoinTimeout when node 0's launcher does not come."""

    def __init__(self, node: Node, policy: FaultPolicy, timeout_seconds: float) -> None:
        self.node = node
        self._policy = policy
        self._closing = threading.Event()
        self._server = StoreServer(node.addresses[0], node.store_port).start() if node.index == 0 else None
        try:
            self._client = self._connect(timeout_seconds)
        except BaseException:
            if self._server is not None:
                self._server.stop()
            raise
        self._heart = self._start_heart()

    def _connect(self, timeout_seconds: float) -> StoreClient:
        deadline = time.monotonic() + timeout_seconds
        # The seat of a launcher that this one replaces may not be known to be empty yet.
        patient_until = time.monotonic() + (self._policy.lost_node_timeout_seconds if self._policy.max_restarts else 0)
        while True:
            try:
                return StoreClient.connect(
                    self.node.store_endpoint,
                    self.node.index,
                    group=_GROUP,
                    timeout_seconds=max(0.1, deadline - time.monotonic()),
                    describe=self.node.describe,
                    machine=self.node.address,
                    silence_seconds=self._policy.lost_node_timeout_seconds,
                    answer_seconds=self._policy.lost_node_timeout_seconds,
                )
            except JoinTimeout:
                raise JoinTimeout(
                    f"the launcher of {self.node.describe(0)}, which hosts the job store at "
                    f"{self.node.store_endpoint}, did not come within {timeout_seconds:g} s; start it with the same "
                    "--cluster_node_ips and --started_port, or check that this port is not blocked by a firewall"
                ) from None
            except ClusterError:
                if time.monotonic() > patient_until:
                    raise
                time.sleep(_POLL_SECONDS)

    def _start_heart(self) -> threading.Thread:
        client, pause = self._client, self._policy.lost_node_timeout_seconds / _BEATS_PER_TIMEOUT

        def beat() -> None:
            with suppress(FleetTrainError):  # the store has gone: the main thread notices at its next question
                while not self._closing.wait(pause):
                    client.beat()

        heart = threading.Thread(target=beat, name="fleet_train heartbeat", daemon=True)
        heart.start()
        return heart

    def reconnect(self, timeout_seconds: float) -> None:
        """Take the seat again after the store was lost. Raises JoinTimeout when node 0 does not answer in that time."""
        self._stop_heart()
        self._client.close()
        self._client = self._connect(timeout_seconds)
        self._heart = self._start_heart()

    def _stop_heart(self) -> None:
        self._closing.set()
        self._heart.join(timeout=self._policy.lost_node_timeout_seconds + 1.0)
        self._closing = threading.Event()

    # orders

    def order(self) -> Order | None:
        """Node 0's last order; None before the job has begun. Raises WorkerFailed when the store does not answer."""
        order: Order | None = self._client.get(_ORDER)
        return order

    def give(self, order: Order) -> None:
        with suppress(FleetTrainError):
            self._client.set(_ORDER, order)

    def set_facts(self, facts: Facts) -> None:
        self._client.set(_FACTS, facts)

    def facts(self) -> Facts:
        """How node 0 was started."""
        facts: Facts = self._client.get(_FACTS) or {}
        return facts

    def stop(self, exit_code: int, message: str) -> None:
        """Tell node 0 that this launcher was stopped on purpose while no rank was running."""
        with suppress(FleetTrainError):
            self._client.set(_STOPPED, {"end": exit_code, "message": message})

    def stopped(self) -> Order | None:
        """What a launcher that was stopped on purpose has said."""
        order: Order | None = self._client.get(_STOPPED)
        return order

    # who is here

    def ready_for(self, attempt: int) -> None:
        self._client.set(f"ready/{self.node.index}", attempt)

    def here(self, attempt: int) -> set[int]:
        """Node 0 asks: which launchers are connected and ready for this attempt, itself included."""
        assert self._server is not None
        connected = self._server.connected_members(_GROUP)
        return {0} | {i for i in connected if (self._client.get(f"ready/{i}") or 0) >= attempt}

    # at the end

    def linger(self, seconds: float) -> None:
        """Node 0 keeps the store while other launchers are connected, at most this long; the others go at once."""
        deadline = time.monotonic() + seconds
        while self._others() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _others(self) -> set[int]:
        return self._server.connected_members(_GROUP) - {0} if self._server is not None else set()

    def close(self) -> None:
        """Leave, and end the store where it is hosted here."""
        self._stop_heart()
        with suppress(FleetTrainError):
            self._client.leave()
        if self._others():
            time.sleep(_GOODBYE_SECONDS)  # so that those who are still at work can see that we left in order
        self._client.close()
        if self._server is not None:
            self._server.stop()
