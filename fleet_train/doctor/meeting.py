"""The doctors of all nodes meet in a store that node 0 hosts: what each publishes there, all others read.

Every wait has a bound. A node that does not find the store, or loses it, has nobody else to ask: JoinTimeout and
WorkerFailed say why.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from fleet_train import timeouts
from fleet_train.cluster.flight.stands import from_json
from fleet_train.cluster.store.access import Callers
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.server import StoreServer
from fleet_train.doctor.facts import PortTry
from fleet_train.doctor.pairs import dial
from fleet_train.doctor.participants import Participants
from fleet_train.doctor.sockets import Door
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout
from fleet_train.log import logger

_DOCTOR_PAUSE_SECONDS = 0.25
"""Pause between two looks at which doctors have come."""
_DOCTOR_FIRST_WORD_SECONDS, _DOCTOR_NEXT_WORD_SECONDS = 3.0, 5.0
"""How long the doctor waits until a message names the missing nodes, and between two of these messages."""

_GROUP, _OPEN = "doctor", "open"
T = TypeVar("T")


class Meeting:
    """The meeting of the nodes' doctors. ``free``: this node's ports of the job that are free; on node 0 the store
    takes the first one.

    ``waits_in_vain``: whether it is known that a missing node will not come.
    """

    def __init__(self, there: Participants, free: Sequence[int], waits_in_vain: Callable[[], object]) -> None:
        self.port = 0
        """The port of node 0's store, once this node has connected to it."""
        self.dialled: tuple[PortTry, ...] = ()
        """Connections to the job's ports of the others, for as long as node 0 was not reached."""
        self._there = there
        self._waits_in_vain = waits_in_vain
        self._client: StoreClient
        self._server: StoreServer | None = None
        self._closing = contextlib.ExitStack()
        self._word_at = time.monotonic() + _DOCTOR_FIRST_WORD_SECONDS
        if there.node.index == 0 and free:
            callers, count = Callers(there.node.addresses), len(there.node.addresses)
            self._server = StoreServer(there.node.address, free[0], there.access, callers, count).start()
            self._closing.callback(self._server.stop)

    def join(self, door: Door, seconds: float) -> dict[int, Door]:
        """Publish this node's door; returns those of all nodes present, or come once one has waited so long."""
        if self._there.node.index == 0 and self._server is None:
            raise JoinTimeout("has no free port of the job for the store")
        deadline = time.monotonic() + seconds
        self._client = self._connected(deadline)
        self._closing.callback(self._client.close)
        self._put("here", asdict(door))
        everybody = set(range(len(self._there.node.addresses)))
        while not (present := self._client.get("present")):
            now, missing = time.monotonic(), everybody - self._who("here")
            if now > deadline or self._waits_in_vain():
                self._client.set("over", True)
            if self._there.node.index == 0 and (not missing or self._client.get("over")):
                self._client.set("present", sorted(everybody - missing))
                continue
            if now > deadline + timeouts.DOCTOR_EXCHANGE_SECONDS:
                raise JoinTimeout("has not said which nodes are present")
            self._say(missing, deadline)
            time.sleep(_DOCTOR_PAUSE_SECONDS)
        if self._there.node.index not in present:
            raise JoinTimeout("had begun without this node, which came too late")
        return {node: door for node, door in self.read("here", Door).items() if node in present}

    def _connected(self, deadline: float) -> StoreClient:
        """Connect to node 0's store, at the first of its ports that has one: another program may have earlier ones."""
        there, refusals, turn = self._there, dict[int, str](), 0
        while True:
            outcomes = {each.port: each.outcome for each in dial(there.node, {0: there.ports[0]})}
            if self._server is not None:
                outcomes = {self._server.port: _OPEN}
            if ports := [port for port, outcome in outcomes.items() if outcome == _OPEN]:
                self.port, turn = ports[turn % len(ports)], turn + 1
                try:
                    return self._client_at(self.port)
                except JoinTimeout as error:
                    refusals[self.port] = f"open, and no store answers ({error.__cause__})"
                except ClusterError as refusal:
                    refusals[self.port] = str(refusal)
            if time.monotonic() > deadline or self._waits_in_vain():
                told = outcomes | {port: why for port, why in refusals.items() if port in ports}
                raise JoinTimeout(f"cannot be reached from here: {'; '.join(f'port {p}: {told[p]}' for p in told)}")
            if self._say({0}, deadline):  # and not at the end: the others may have ended before
                dialled = dial(there.node, dict(enumerate(there.ports)))
                self.dialled = max(
                    self.dialled, dialled, key=lambda tries: sum(each.outcome == _OPEN for each in tries)
                )
            time.sleep(_DOCTOR_PAUSE_SECONDS)

    def _client_at(self, port: int) -> StoreClient:
        node = self._there.node
        return StoreClient.connect(
            f"{node.addresses[0]}:{port}",
            node.index,
            group=_GROUP,
            timeout_seconds=0,
            describe=node.describe,
            machine=node.address,
            answer_seconds=timeouts.DOCTOR_STORE_SECONDS,
            dial_seconds=timeouts.DOCTOR_CONNECT_SECONDS,
            access=self._there.access,
        )

    def _say(self, missing: Iterable[int], deadline: float) -> bool:
        """Log, from time to time, which nodes are missing; returns whether it has."""
        now = time.monotonic()
        if now <= self._word_at:
            return False
        names = ", ".join(map(self._there.node.describe, sorted(missing)[:5]))
        logger.info(f"waiting for {names} ({max(0.0, deadline - now):.0f} s more)")
        self._word_at = now + _DOCTOR_NEXT_WORD_SECONDS
        return True

    def share(self, kind: str, value: Any, nodes: Iterable[int], seconds: float) -> set[int]:
        """Publish this node's value of a kind, and wait until these have published theirs, too; returns those that have
        not: they are lost, or too late."""
        self._put(kind, value)
        wanted, deadline = set(nodes), time.monotonic() + seconds
        while True:
            gone = set(self._client.gone())
            missing = wanted - self._who(kind)
            if not missing - gone or time.monotonic() > deadline:
                return missing
            time.sleep(max(timeouts.DOCTOR_POLL_SECONDS, len(wanted) / timeouts.STORE_QUESTIONS_PER_SECOND))

    def _put(self, kind: str, value: Any) -> None:
        self._client.set(f"{kind}/{self._there.node.index}", value)

    def _who(self, kind: str) -> set[int]:
        return {int(key.rpartition("/")[2]) for key in self._client.keys(f"{kind}/")}

    def read(self, kind: str, of: type[T]) -> dict[int, T]:
        """The values of this kind, by node; without those that are none."""
        values = {}
        for node in sorted(self._who(kind)):
            with contextlib.suppress(ValueError):
                values[node] = from_json(of, self._client.get(f"{kind}/{node}"))
        return values

    def leave(self, seconds: float) -> None:
        """Leave when all is read. Node 0 waits for the others to say so, too, at most this long."""
        with contextlib.suppress(FleetTrainError):
            self._client.leave()
        deadline = time.monotonic() + seconds
        while self._server is not None and self._server.has_members() and time.monotonic() < deadline:
            time.sleep(timeouts.DOCTOR_POLL_SECONDS)

    def close(self) -> None:
        """Close the connection and the store: whoever is still there has lost this node."""
        self._closing.close()
