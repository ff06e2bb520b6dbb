"""This launcher's connections in the job, from the first attempt to the last; `job` decides what they are used for.

Every launcher hosts a server of the job store on its own node. The leader's is the root: all launchers connect to it,
each with a heartbeat from its own thread, and a machine whose heartbeat stops is lost for all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.cluster import FAN_IN, below, parent_of
from fleet_train.cluster.store.access import Access, Callers, Refused
from fleet_train.cluster.store.client import ROUND, StoreClient
from fleet_train.cluster.store.relay import Parent
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout
from fleet_train.launch.election import Status, Unheard
from fleet_train.launch.events import Look
from fleet_train.launch.node import Node
from fleet_train.launch.rendezvous import Facts, difference_of
from fleet_train.launch.request import FaultPolicy

_GROUP = "member"
_DECISION, _FACTS, _STOPPED, _STATUS = "decision", "facts", "stopped", "status"
_BEATS_PER_TIMEOUT = 4
_ASKED_AT_ONCE = 64


class Membership:
    """The server of this node, and the connection to the leader's."""

    def __init__(
        self, node: Node, policy: FaultPolicy, access: Access, facts: Facts, direct_ranks: int = FAN_IN
    ) -> None:
        self.node = node
        self.access = access
        self.leader = -1
        self._term = -1
        self._policy = policy
        self._facts = facts
        self._direct_ranks = direct_ranks
        self._closing = threading.Event()
        self._client: StoreClient | None = None
        self._heart: threading.Thread | None = None
        most = node.processes + max(direct_ranks, FAN_IN) + len(node.addresses)
        callers = Callers(node.every_host)
        self._server = StoreServer(node.address, node.store_port, access, callers, most).start()

    # the other launchers

    def publish(self, status: Status) -> None:
        """Show the others this state."""
        self._server.publish(_STATUS, _STATUS, status.to_json())

    def ask(self, nodes: Iterable[int]) -> tuple[dict[int, Status | Unheard], str]:
        """The state of these nodes, or why it is unknown; and why node 0's store has refused us, if it has. Takes about
        a second if some are silent."""
        asked = [index for index in nodes if index != self.node.index]
        if not asked:
            return {}, ""
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(asked))) as pool:
            told = dict(zip(asked, pool.map(self._ask, asked), strict=True))
        refusal = told.get(0)
        heard = {index: Unheard.DEAD if isinstance(how, str) else how for index, how in told.items()}
        return heard, refusal if isinstance(refusal, str) else ""

    def _ask(self, index: int) -> Status | Unheard | str:
        """A text: another job's store listens there, or one that does not know our secret."""
        try:
            client = StoreClient.connect(
                f"{self.node.store_of(index)}/{_STATUS}",
                self.node.index,
                group="node",
                timeout_seconds=0.0,
                watched=False,
                answer_seconds=timeouts.ASK_LAUNCHER_SECONDS,
                dial_seconds=timeouts.ASK_LAUNCHER_SECONDS,
                access=self.access,
            )
        except JoinTimeout as error:
            if isinstance(error.__cause__, Refused) and error.__cause__.kind == "address":
                return Unheard.DEAF
            is_dead = isinstance(error.__cause__, (ConnectionRefusedError, ConnectionResetError))
            return Unheard.DEAD if is_dead else Unheard.SILENT
        except ClusterError as refusal:
            return str(refusal)
        except FleetTrainError:
            return Unheard.SILENT
        try:
            return Status.from_json(client.get(_STATUS))
        except (FleetTrainError, ValueError, TypeError, KeyError):
            return Unheard.SILENT
        finally:
            client.close()

    # the leader's store

    def follow(self, leader: int, term: int, deadline: float) -> bool:
        """Use the store of another launcher that leads; False if it does not answer until ``deadline``. Raises
        ClusterError if it refuses this launcher."""
        self._disconnect()
        try:
            self._connect(leader, term, deadline)
        except JoinTimeout:
            return False
        return True

    def lead(self, term: int) -> None:
        """Use the store of this node as the leader's."""
        self._disconnect()
        self._server.open_root(_round_of(term))
        self._connect(self.node.index, term, time.monotonic() + self._policy.lost_node_timeout_seconds)

    def _connect(self, leader: int, term: int, deadline: float) -> None:
        # The leader may not have noticed yet that the launcher which this one replaces is gone.
        patient_until = time.monotonic() + (self._policy.lost_node_timeout_seconds if self._policy.max_restarts else 0)
        timeout = self._policy.lost_node_timeout_seconds
        while True:
            try:
                client = StoreClient.connect(
                    f"{self.node.store_of(leader)}/{_round_of(term)}",
                    self.node.index,
                    group=_GROUP,
                    timeout_seconds=max(0.1, deadline - time.monotonic()),
                    describe=self.node.describe,
                    machine=self.node.address,
                    silence_seconds=None if leader == self.node.index else timeout,
                    answer_seconds=timeout,
                    access=self.access,
                )
                break
            except JoinTimeout:
                raise
            except ClusterError:
                if time.monotonic() > patient_until:
                    raise
                time.sleep(timeouts.LAUNCHERS_POLL_SECONDS)
        self._client, self.leader, self._term = client, leader, term
        self._heart = self._start_heart(client)

    def _start_heart(self, client: StoreClient) -> threading.Thread:
        pause = self._policy.lost_node_timeout_seconds / _BEATS_PER_TIMEOUT

        def beat() -> None:
            with suppress(FleetTrainError):  # the store is gone: the main thread notices at its next request
                while not self._closing.wait(pause):
                    client.beat()

        heart = threading.Thread(target=beat, name="fleet_train heartbeat", daemon=True)
        heart.start()
        return heart

    def _disconnect(self) -> None:
        self._stop_heart()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _stop_heart(self) -> None:
        if self._heart is not None:
            self._closing.set()
            self._heart.join(timeout=self._policy.lost_node_timeout_seconds + 1.0)
            self._heart = None
            self._closing = threading.Event()

    @property
    def _store(self) -> StoreClient:
        if self._client is not None and self._client.broken and self.leader == self.node.index:
            self.lead(self._term)  # this process was frozen during a call
        assert self._client is not None
        return self._client

    # the rendezvous of an attempt

    def learn(self, nodes: tuple[int, ...], addresses: tuple[str, ...]) -> None:
        """The current addresses of these nodes."""
        now = dict(zip(nodes, addresses, strict=True))
        addresses = tuple(now.get(index, old) for index, old in enumerate(self.node.addresses))
        self.node = replace(self.node, addresses=addresses)

    def place_of(self, nodes: tuple[int, ...]) -> Node:
        """This node in a job of these nodes, whose rendezvous is the leader's."""
        return replace(self.node, leader=self.leader).among(nodes)

    def open_tree(self, node: Node, round_name: str, timeout_seconds: float) -> str:
        """The server for this node's ranks in that round: the leader's if they are few, else their own node's, which
        relays. Raises ClusterError if its parent does not answer."""
        is_direct = node.world_size <= self._direct_ranks or len(node.addresses) == 1
        root = f"{node.store_endpoint}/{round_name}"
        self._server.publish("", ROUND, root if is_direct and not node.is_leader else round_name)
        if is_direct:
            return root
        order = [node.leader, *(index for index in range(len(node.addresses)) if index != node.leader)]
        place = order.index(node.index)
        if place == 0:
            self._server.open_root(round_name)
        else:
            ranks = [node.ranks_of(index) for index in order]
            above = order[parent_of(place)]
            host, port = node.addresses[above], node.store_port_of(above)
            silence = self._policy.lost_node_timeout_seconds
            parent = Parent(host, port, round_name, place, node.describe(), below(place, ranks), self.access, silence)
            self._server.open_relay(parent, timeout_seconds)
        return f"{node.address}:{node.store_port}/{round_name}"

    def close_tree(self, round_name: str) -> None:
        with suppress(FleetTrainError, TimeoutError):
            self._server.close_namespace(round_name)

    # decisions

    def look(self, look: Look) -> dict[str, Any]:
        """The fields of `Seen`. Raises FleetTrainError if the leader's store does not answer."""
        store = self._store
        if look.ready is not None:
            store.set(f"ready/{self.node.index}", look.ready)
        seen: dict[str, Any] = {"decision": store.get(_DECISION)}
        if look.here is not None:
            stopped = store.get(_STOPPED)
            seen["stopped"] = None if stopped is None else str(stopped["message"])
            seen["here"] = frozenset(self.here(look.here))
        if look.with_facts and (theirs := store.get(_FACTS)) is not None:
            there, here = self.node.describe(self.leader), self.node.describe()
            seen["difference"] = difference_of(there, here, self._facts, theirs)
        return seen

    def write(self, decision: Mapping[str, Any], with_facts: bool = False) -> None:
        """The leader's decision; ``with_facts``: also how it was started."""
        with suppress(FleetTrainError):
            if with_facts:
                self._store.set(_FACTS, self._facts)
            self._store.set(_DECISION, dict(decision))

    def stop(self, message: str) -> None:
        """Report to the leader that this launcher was stopped on purpose while no rank was running."""
        with suppress(FleetTrainError):
            self._store.set(_STOPPED, {"message": message})

    def here(self, round_number: int) -> set[int]:
        """For the leader: which launchers are connected and ready for this round, itself included."""
        connected = self._server.connected_members(_GROUP, _round_of(self._term))
        ready = {index for index in connected if (self._store.get(f"ready/{index}") or 0) >= round_number}
        return {self.node.index} | ready

    # at the end

    def exit_barrier(self, seconds: float) -> None:
        """The leader keeps the store while other launchers are connected, at most this long; others leave at once."""
        deadline = time.monotonic() + seconds
        while self._others() and time.monotonic() < deadline:
            time.sleep(timeouts.LAUNCHERS_POLL_SECONDS)

    def _others(self) -> set[int]:
        if self.leader != self.node.index:
            return set()
        return self._server.connected_members(_GROUP, _round_of(self._term)) - {self.node.index}

    def close(self) -> None:
        """Leave, and stop this node's server."""
        self._stop_heart()
        if self._client is not None:
            with suppress(FleetTrainError):
                self._client.leave()
            if self._others():
                time.sleep(
                    timeouts.LEAVE_NOTICE_SECONDS
                )  # so that launchers still running can see that this one left properly
            self._client.close()
        self._server.stop()


def _round_of(term: int) -> str:
    return f"term-{term}"
