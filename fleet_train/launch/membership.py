"""This launcher's membership in the job, from the first attempt to the last: leader, connected nodes, decisions.

Every launcher hosts a server of the job store on its own node. The leader's is the root: all launchers connect to it,
each with a heartbeat from its own thread, and a machine whose heartbeat stops is lost for all. At the start node 0
leads; when the leader is lost, the first living node of the list takes over (``election.py``), and decisions are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.cluster import FAN_IN, below, parent_of
from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.client import ROUND, StoreClient
from fleet_train.cluster.store.relay import Parent
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout
from fleet_train.launch.election import (
    STATUS_KEY,
    STATUS_ROUND,
    Heard,
    Neighbours,
    State,
    Status,
    Unheard,
    elected,
    is_at_work,
    leader_among,
    may_go_on,
    silent,
)
from fleet_train.launch.node import Node
from fleet_train.launch.rendezvous import Facts
from fleet_train.launch.request import FaultPolicy
from fleet_train.log import logger

_GROUP = "member"
_DECISION = "decision"
_FACTS = "facts"
_STOPPED = "stopped"
_BEATS_PER_TIMEOUT = 4
# With a long list, a new launcher asks the first node and this many others at a time for the leader.
_ASKED_AT_A_TIME = 8

Decision = dict[str, Any]


class Membership:
    """Membership over all attempts. Raises JoinTimeout if no leader is found, ClusterError if it refuses us."""

    def __init__(
        self,
        node: Node,
        policy: FaultPolicy,
        timeout_seconds: float,
        access: Access,
        direct_ranks: int = FAN_IN,
        refuse: Callable[[], None] = lambda: None,
    ) -> None:
        """``refuse`` is called while this launcher looks for the leader, and may raise."""
        self.node = node
        self._refuse = refuse
        self.access = access
        self.leader = -1
        self.term = -1
        self.last_decision: Decision | None = None
        self._policy = policy
        self._direct_ranks = direct_ranks
        self._neighbours = Neighbours(node, access)
        self._closing = threading.Event()
        self._client: StoreClient | None = None
        self._heart: threading.Thread | None = None
        most = node.processes + max(direct_ranks, FAN_IN) + len(node.addresses)
        callers = Callers(node.every_host)
        self._server = StoreServer(node.address, node.store_port, access, callers, most).start()
        try:
            self._publish(State.FRESH)
            self._find_at_start(timeout_seconds)
        except BaseException:
            self._server.stop()
            raise

    # who leads

    @property
    def is_leader(self) -> bool:
        return self.leader == self.node.index

    @property
    def _every(self) -> range:
        return range(len(self.node.addresses))

    def _publish(self, state: State) -> None:
        self._server.publish(STATUS_ROUND, STATUS_KEY, Status(state, self.leader, self.term).to_json())

    def _find_at_start(self, timeout_seconds: float) -> None:
        """Node 0 leads, unless the job is already running under another leader."""
        if self.node.index == 0:
            can_be_at_work = self._policy.max_restarts > 0 and len(self._every) > 1
            if not (can_be_at_work and is_at_work(self._ask_at_start(timeout_seconds))):
                self._lead(0)
                return
        self.wait_for_leader(timeout_seconds)

    def _ask_at_start(self, timeout_seconds: float) -> Heard:
        """The others' states, once all living nodes know our address. Raises JoinTimeout."""
        deadline, word_at = time.monotonic() + timeout_seconds, time.monotonic() + timeouts.FIRST_WAITING_SECONDS
        while Unheard.DEAF in (heard := self._neighbours.ask(self._every)).values():
            deaf = ", ".join(self.node.describe(index) for index in heard if heard[index] is Unheard.DEAF)
            if time.monotonic() > deadline:
                raise JoinTimeout(
                    f"{deaf} refuses connections from {self.node.address}: the name {self.node.host(self.node.index)} "
                    f"still has another address there after {timeout_seconds:g} s (--join_timeout)"
                )
            if time.monotonic() > word_at:
                logger.info(f"waiting until {deaf} knows this node's new address, {self.node.address}")
                word_at = time.monotonic() + timeouts.REPORT_WAITING_SECONDS
            time.sleep(timeouts.FIND_LEADER_SECONDS)
        return heard

    def wait_for_leader(self, timeout_seconds: float) -> None:
        """Follow the leader without taking part in its election: for launchers that are not in the job yet.

        Raises JoinTimeout, and ClusterError if node 0's store belongs to another job or does not know our secret.
        """
        self._disconnect()
        self._publish(State.FRESH)
        deadline = time.monotonic() + timeout_seconds
        turn = 1
        while True:
            some = {0, *(1 + (turn + i) % max(1, len(self._every) - 1) for i in range(_ASKED_AT_A_TIME))}
            if self._follow_one_of(self._neighbours.ask(index for index in some if index in self._every), deadline):
                return
            if 0 in self._neighbours.refusals:
                raise self._neighbours.refusals[0]
            self._refuse()
            turn += _ASKED_AT_A_TIME
            if time.monotonic() > deadline:
                raise JoinTimeout(
                    f"the launcher of {self.node.describe(0)}, which hosts the job store at {self.node.store_endpoint},"
                    f" did not connect within {timeout_seconds:g} s; start it with the same --cluster_node_ips, "
                    "--nproc_per_node and --started_port, or check that this port is not blocked by a firewall"
                )
            time.sleep(timeouts.LAUNCHERS_POLL_SECONDS)

    def find_again(self, last_nodes: Iterable[int], timeout_seconds: float) -> None:
        """The leader was lost: follow another one, or the same again, or become leader. Raises JoinTimeout.

        ``last_nodes``: the nodes of the attempt that ended with it.
        """
        self._disconnect()
        self._publish(State.LOOKING)
        last_nodes = tuple(last_nodes)
        deadline, word_at = time.monotonic() + timeout_seconds, time.monotonic() + timeouts.FIRST_WAITING_SECONDS
        while True:
            heard = self._neighbours.ask(self._every)
            if self._follow_one_of(heard, deadline):
                return
            term = elected(self.node.index, self.term, heard, last_nodes)
            if term is not None:
                self._lead(term)
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise JoinTimeout(self._no_leader_message(heard, last_nodes, timeout_seconds))
            if time.monotonic() > word_at:
                away = ", ".join(map(self.node.describe, sorted(silent(heard, last_nodes) - {self.node.index})))
                logger.info(f"waiting for {away or 'a launcher'} to lead ({left:.0f} s more, --rejoin_timeout)")
                word_at = time.monotonic() + timeouts.REPORT_WAITING_SECONDS
            time.sleep(timeouts.FIND_LEADER_SECONDS)

    def _no_leader_message(self, heard: Heard, last_nodes: tuple[int, ...], timeout_seconds: float) -> str:
        away = silent(heard, [index for index in last_nodes if index != self.node.index])
        what = f"no launcher of this job became leader within {timeout_seconds:g} s (--rejoin_timeout)"
        if not away:
            return what
        names = ", ".join(map(self.node.describe, sorted(away)))
        return (
            f"{what}: {names} cannot be reached and may be alive, so this side of the network must not continue alone "
            "unless it is the larger one, or one of two halves with the first node"
        )

    def _follow_one_of(self, heard: Heard, deadline: float) -> bool:
        leader = leader_among(heard, self.term)
        if leader is None:
            return False
        status = heard[leader]
        assert isinstance(status, Status)
        with suppress(JoinTimeout):
            self._follow(leader, status.term, deadline)
            return True
        return False

    def _follow(self, leader: int, term: int, deadline: float) -> None:
        self._disconnect()
        self._connect(leader, term, deadline)
        self._publish(State.FOLLOWING)

    def _lead(self, term: int) -> None:
        self._disconnect()
        self._server.open_root(_round_of(term))
        self._connect(self.node.index, term, time.monotonic() + self._policy.lost_node_timeout_seconds)
        self._publish(State.LEADING)

    def gives_way(self) -> bool:
        """Whether another launcher leads with a later term, because this one was unreachable; then it is followed."""
        heard = self._neighbours.ask(self._every)
        later = leader_among(heard, self.term + 1)
        return later is not None and self._follow_one_of(
            {later: heard[later]}, time.monotonic() + timeouts.FIND_LEADER_SECONDS
        )

    def may_go_on_without(self, missing: Iterable[int], here: Iterable[int]) -> bool:
        """Whether the connected nodes are the larger side, of all that may be alive. A member that answers and is not
        connected counts as one of the other side: it follows another leader, or looks for one."""
        missing = set(missing)
        heard = self._neighbours.ask(missing)
        members = {index for index, how in heard.items() if isinstance(how, Status) and how.state is not State.FRESH}
        return may_go_on(set(here), silent(heard, missing) | members)

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
        self._client, self.leader, self.term = client, leader, term
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
        self._server.publish("", ROUND, round_name)
        if node.world_size <= self._direct_ranks or len(node.addresses) == 1:
            return f"{node.store_endpoint}/{round_name}"
        order = [node.leader, *(index for index in range(len(node.addresses)) if index != node.leader)]
        place = order.index(node.index)
        if place == 0:
            self._server.open_root(round_name)
        else:
            ranks = [range(index * node.processes, (index + 1) * node.processes) for index in order]
            host, port = node.addresses[order[parent_of(place)]], node.store_port
            silence = self._policy.lost_node_timeout_seconds
            parent = Parent(host, port, round_name, place, node.describe(), below(place, ranks), self.access, silence)
            self._server.open_relay(parent, timeout_seconds)
        return f"{node.address}:{node.store_port}/{round_name}"

    def close_tree(self, round_name: str) -> None:
        with suppress(FleetTrainError, TimeoutError):
            self._server.close_namespace(round_name)

    # decisions

    def decision(self) -> Decision | None:
        """The leader's last decision; None before the job has started. Raises WorkerFailed if it does not answer."""
        decision: Decision | None = self._store.get(_DECISION)
        self.last_decision = decision or self.last_decision
        return decision

    def decide(self, decision: Decision) -> None:
        self.last_decision = decision
        with suppress(FleetTrainError):
            self._store.set(_DECISION, decision)

    def set_facts(self, facts: Facts) -> None:
        self._store.set(_FACTS, facts)

    def facts(self) -> Facts:
        """How the leader was started."""
        facts: Facts = self._store.get(_FACTS) or {}
        return facts

    def stop(self, exit_code: int, message: str) -> None:
        """Report to the leader that this launcher was stopped on purpose while no rank was running."""
        with suppress(FleetTrainError):
            self._store.set(_STOPPED, {"end": exit_code, "message": message})

    def stopped(self) -> Decision | None:
        """The report of a launcher that was stopped on purpose."""
        decision: Decision | None = self._store.get(_STOPPED)
        return decision

    # connected nodes

    def ready_for(self, round_number: int) -> None:
        self._store.set(f"ready/{self.node.index}", round_number)

    def here(self, round_number: int) -> set[int]:
        """For the leader: which launchers are connected and ready for this round, itself included."""
        connected = self._server.connected_members(_GROUP, _round_of(self.term))
        ready = {index for index in connected if (self._store.get(f"ready/{index}") or 0) >= round_number}
        return {self.node.index} | ready

    # at the end

    def exit_barrier(self, seconds: float) -> None:
        """The leader keeps the store while other launchers are connected, at most this long; others leave at once."""
        deadline = time.monotonic() + seconds
        while self._others() and time.monotonic() < deadline:
            time.sleep(timeouts.LAUNCHERS_POLL_SECONDS)

    def _others(self) -> set[int]:
        if not self.is_leader:
            return set()
        return self._server.connected_members(_GROUP, _round_of(self.term)) - {self.node.index}

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
