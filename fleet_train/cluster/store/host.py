"""Hosts the rendezvous store in a small process next to rank 0, for launch forms without our launcher.

The same process is the witness of its node's ranks; nodes without a store have one that is nothing else.

Not in rank 0 itself: Paddle holds the interpreter lock while it waits for peers in C++, and a store that shares that
lock could not respond during that time. The process ends by itself once its parent and all members are gone. In a job
of many ranks each node has one, next to its first rank; all but rank 0's are relays.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_train import timeouts
from fleet_train.cluster.cluster import FAN_IN, Cluster, below, parent_of
from fleet_train.cluster.flight.witness import Seen, Witness, is_alive, ranks_here, write_if_possible, write_job
from fleet_train.cluster.store.access import JOB_ID, Access, Callers, access_of, number_of_job
from fleet_train.cluster.store.client import StoreClient, close_after_fork
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout

if TYPE_CHECKING:
    from fleet_train.cluster.store.server import StoreServer

_STORE_OUTLIVES_SECONDS = 300.0
"""How long the store's process stays for connected members after its parent has ended."""
_STORE_QUIET_SECONDS = 0.5
"""How long the store's process, whose parent has ended, stays without members: one that lost its connection may
reconnect to report."""
_STORE_POLL_SECONDS = 0.05
"""Pause between two looks of the store's process, whose parent has ended, at whether members are connected."""

_READY = "listening"


@dataclass(frozen=True)
class BindAddress:
    """The address at which a node's server listens and, unless it is the root, that of its parent."""

    host: str
    port: int
    hosts: list[str] | None
    """The addresses it accepts; None: every process that knows the job's id, or its secret."""
    members: int
    node: int = 0
    parent: str = ""
    below: str = "0"
    timeout_seconds: float = 300.0
    """How long a relay tries to reach its parent: that node's first rank may start much later."""

    @classmethod
    def of(cls, cluster: Cluster, timeout_seconds: float) -> BindAddress:
        firsts = [cluster.ranks[cluster.ranks_on_node(node)[0]] for node in range(cluster.node_num)]
        node = cluster.this.node_index
        hosts = list(dict.fromkeys(rank.host for rank in cluster.ranks))
        most = FAN_IN + max(FAN_IN, len(cluster.ranks_on_node(node)))
        place = cls(firsts[node].host, firsts[node].port, hosts, most, node, timeout_seconds=timeout_seconds)
        if node == 0 or not needs_relays(cluster):
            return place
        ranks = [cluster.ranks_on_node(index) for index in range(cluster.node_num)]
        return replace(place, parent=firsts[parent_of(node)].endpoint, below=hex(below(node, ranks)))


def needs_relays(cluster: Cluster) -> bool:
    """Whether relays are between ranks and root: a few ranks connect to the root directly, the shortest path."""
    return cluster.world_size > FAN_IN and cluster.node_num > 1


def endpoint_of(cluster: Cluster) -> str:
    """The endpoint of the store's server for this rank."""
    if cluster.store_endpoint:
        return cluster.store_endpoint
    node = cluster.this.node_index if needs_relays(cluster) else 0
    return cluster.ranks[cluster.ranks_on_node(node)[0]].endpoint


def is_host(cluster: Cluster) -> bool:
    """Whether this rank hosts a server of the store: no launcher does, and it is the first of its node."""
    if cluster.store_endpoint:
        return False
    return cluster.rank == 0 or (needs_relays(cluster) and cluster.local_rank == 0)


def has_helper(cluster: Cluster) -> bool:
    """Whether this rank starts the process beside it: no launcher of ours has, and it is the first of its node."""
    return not cluster.store_endpoint and cluster.local_rank == 0


class StoreHost:
    """The handle of the process beside a rank. Raises ClusterError if the address cannot be bound, or the parent cannot
    be reached."""

    def __init__(self, place: BindAddress | None, job_id: str) -> None:
        """Start the process. Without ``place`` it hosts nothing, and is a witness only."""
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "fleet_train.cluster.store.host", json.dumps(place and vars(place))]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), JOB_ID: job_id},
                # Ctrl-C reaches the ranks first; the store outlives them to name the root cause
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"the process of the rendezvous store cannot be started: {error}") from error
        close_after_fork(self)  # it ends with its parent; a child that the parent has forked must not hold it
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        self._process.stdout.close()
        if answer != _READY:
            self._process.wait()
            where = f" on {place.host}:{place.port}" if place is not None else ""
            raise ClusterError(answer or f"the process of the rendezvous store{where} did not start")

    @classmethod
    def of(cls, cluster: Cluster, timeout_seconds: float) -> StoreHost:
        """The host for the node of this rank, in a cluster whose ranks are all known."""
        place = BindAddress.of(cluster, timeout_seconds) if is_host(cluster) else None
        return cls(place, access_of(cluster).job)

    def watch(self, cluster: Cluster, log_dir: Path | None) -> None:
        """Make the process the witness of this node's ranks from now on; it writes what it sees into ``log_dir``."""
        node = cluster.this.node_index
        ranks = Watched(
            store=endpoint_of(cluster),
            address=cluster.this.host,
            node=node,
            nodes=cluster.node_num,
            ranks=len(cluster.ranks_on_node(node)),
            job=number_of_job(cluster),
            log_dir=str(log_dir or ""),
        )
        if self._process.stdin is not None:
            with suppress(OSError):  # it has ended: joining says so
                self._process.stdin.write(json.dumps(vars(ranks)).encode() + b"\n")
                self._process.stdin.flush()

    def release(self) -> None:
        """Let the process end once the members have left; does not wait for that."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    close_in_child = release


@dataclass(frozen=True)
class Watched:
    """The ranks of a node that a process is the witness of. ``job``: see `number_of_job`; ``log_dir``: empty = none."""

    store: str
    address: str
    node: int
    nodes: int
    ranks: int
    job: int
    log_dir: str


class NodeWitness:
    """A witness that answers for a node's ranks, as a member of the job's store beside them."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._folder = Path(watched.log_dir) if watched.log_dir else None
        self._witness: Witness | None = None
        self._next_at = 0.0
        self._is_over = False

    def answer(self) -> None:
        """Called often; asks the store twice a second, less often in a job of many nodes."""
        if self._is_over or time.monotonic() < self._next_at:
            return
        seldom = self._watched.nodes / timeouts.STORE_QUESTIONS_PER_SECOND
        self._next_at = time.monotonic() + max(timeouts.ASK_STORE_SECONDS, seldom)
        try:
            if self._witness is None:
                self._witness = self._connected()
            self._witness.answer()
        except JoinTimeout:  # the store does not listen yet
            pass
        except FleetTrainError:
            self._is_over = True

    def _connected(self) -> Witness:
        ranks = self._watched
        access = Access.of(os.environ, ranks.address)
        client = StoreClient.connect(
            ranks.store, ranks.node, group="witness", timeout_seconds=0, watched=False, access=access
        )
        if self._folder is not None and ranks.node == 0:
            with suppress(OSError):
                write_job(self._folder, ranks.store, access.job)
        return Witness(client, ranks.node, ranks.ranks, self._find, write=partial(write_if_possible, self._folder))

    def _find(self) -> list[Seen]:
        found = ranks_here()
        ours = [each for each in found if each.ring().job == self._watched.job]
        for other in set(found).difference(ours):
            other.close()
        return ours

    @property
    def has_ranks(self) -> bool:
        return self._witness is not None and any(is_alive(each.pid) for each in self._witness.seen())


def _start(place: BindAddress) -> StoreServer:
    # Only the process that serves imports it, and asyncio with it: every rank imports this module.
    from fleet_train.cluster.store.relay import Parent
    from fleet_train.cluster.store.server import StoreServer

    access = Access.of(os.environ, place.host)
    callers = None if place.hosts is None else Callers(place.hosts)
    is_root = not place.parent
    server = StoreServer(place.host, place.port, access, callers, place.members, begins_namespaces=is_root).start()
    if is_root:
        server.open_root("")
        return server
    host, port = place.parent.rsplit(":", 1)
    machine = f"node {place.node} ({place.host})"
    server.open_relay(
        Parent(host, int(port), "", place.node, machine, int(place.below, 16), access), place.timeout_seconds
    )
    return server


def _serve(place: BindAddress | None) -> None:
    server: StoreServer | None = None
    try:
        server = _start(place) if place is not None else None
    except ClusterError as error:
        print(error, flush=True)
        return
    print(_READY, flush=True)
    witness = _witness_while_parent_lives()
    deadline = time.monotonic() + _STORE_OUTLIVES_SECONDS
    quiet_since = None
    while time.monotonic() < deadline:
        if witness is not None:
            witness.answer()
        is_needed = server.has_members() if server is not None else witness is not None and witness.has_ranks
        if is_needed:
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > _STORE_QUIET_SECONDS:
            break
        time.sleep(_STORE_POLL_SECONDS)
    if server is not None:
        server.stop()


def _witness_while_parent_lives() -> NodeWitness | None:
    """Serve as witness until the parent ends, however it does. It may say, in a line, which ranks to be the witness
    of."""
    witness: NodeWitness | None = None
    said = b""
    while True:
        if select.select([0], [], [], timeouts.ASK_STORE_SECONDS)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                return witness
            said += piece
            if said.endswith(b"\n"):
                witness, said = NodeWitness(Watched(**json.loads(said))), b""
        if witness is not None:
            witness.answer()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _serve(None if given is None else BindAddress(**given))
