"""Creates process groups, and works around problems of Paddle 3.3.1 (docs/paddle.md)."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import paddle

from fleet_train.cluster import Cluster
from fleet_train.collectives.engine import CallContext, Collective, Engine, Stage, Stages
from fleet_train.collectives.paddle_compat import backend_name, dynamic_mode
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed

_PADDLE_STORE_SECONDS = 60
"""How long a member of a process group may take to reach Paddle's own store, which is open before it tries."""


class GroupMembers(Protocol):
    """What forming a group needs from the job, which itself forms groups: its facts and its synchronizing calls."""

    cluster: Cluster
    engine: Engine
    place: Any
    timeout_seconds: float

    def communicators(self, number: int) -> list[Any]: ...

    def barrier(self, name: str) -> None: ...

    def broadcast(self, name: str, value: Any, source: int) -> Any: ...

    def count(self, name: str) -> int: ...


def new_group(job: GroupMembers, ranks: Sequence[int]) -> Any:
    """A process group over ``ranks``; called by all ranks of the job in the same order, members or not.

    Raises LinkFailed when the group cannot be formed, or a member of it is not the rank that it should be, with the
    interface that was used; ClusterError when there is no such interface.
    """
    with forming(ranks), _own_store(job, ranks):
        group = formed(job, ranks, lambda: paddle.distributed.new_group(list(ranks)))
    warm_up(job, group)
    return group


def group_inside_program(job: GroupMembers) -> Any:
    """The group of synchronised batch norm; called by all ranks in the same order.

    If communicators have threads, it is not one of the gradients': those send during the backward pass, in an order
    that does not depend on the program. On streams it is the first of them: the program has one order for all, and a
    device that runs two communicators' kernels at the same time may choose another order than its peer.
    """
    return new_group(job, list(range(job.cluster.world_size))) if job.engine.side_by_side else job.communicators(1)[0]


def all_gathered(job: GroupMembers, group: Any, row: Any) -> Stages[Any]:
    """``row`` [n] of every rank of the job, in rank order: [world_size, n]."""
    ranks = job.cluster.world_size
    rows = paddle.empty([ranks * row.shape[0]], row.dtype)
    yield Stage((Collective("all_gather", group, row, output=rows),))
    return rows.reshape([ranks, -1])


@contextmanager
def forming(ranks: Sequence[int]) -> Iterator[None]:
    """Errors of Paddle in the body are failures that a restart may overcome, unless the interface does not exist."""
    try:
        yield
    except FleetTrainError:
        raise
    except Exception as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        here = [name for _, name in socket.if_nameindex()]
        if backend_name() == "gloo" and interface and interface not in here:
            raise ClusterError(
                f"GLOO_SOCKET_IFNAME={interface}: this machine has no such interface; it has {', '.join(here)}"
            ) from error
        raise LinkFailed(
            f"the group of ranks {list(ranks)} could not be formed: {str(error).strip().splitlines()[-1]} "
            f"(interface {interface or 'chosen by the backend'}); look at the network between the ranks, and whether "
            "strangers can reach the ports of Paddle (SECURITY.md)"
        ) from error


def formed(job: GroupMembers, ranks: Sequence[int], make: Callable[[], Any]) -> Any:
    """The group of ``make``, whose members are the ranks that they should be: all ranks call this in the same order.

    Gloo listens for each member on a port of its own, from here on until that member has called, and takes the first
    caller for it, whoever that is. The ranks get the same random number over the job's store and begin together: no
    port is open while ranks wait for one that is late. Then each member sends each other one what follows from
    that number and its rank, over the connection that later collectives use.
    """
    if backend_name() != "gloo":
        with dynamic_mode():
            return _kept(make())
    number = secrets.token_hex(16) if job.cluster.rank == ranks[0] else None
    number = job.broadcast(f"number of group {job.count('number')}", number, ranks[0])
    with dynamic_mode():
        group = _kept(make())
        if job.cluster.rank in ranks:
            _refuse_strangers(job, group, sorted(ranks), str(number))
    return group


def _refuse_strangers(job: GroupMembers, group: Any, ranks: Sequence[int], number: str) -> None:
    """Every two members send each other their proof: each is the root of a gather once."""
    this = job.cluster.rank
    mine = paddle.to_tensor(np.frombuffer(_proof(number, this), "uint8"), place=job.place)
    for root in ranks:
        arrived: list[Any] = []
        Collective("gather", group, mine, root, output=arrived if root == this else None).begin(sync_op=True)
        proofs = [each.numpy().tobytes() for each in arrived]
        wrong = [rank for rank, proof in zip(ranks, proofs, strict=bool(proofs)) if proof != _proof(number, rank)]
        if wrong:
            raise LinkFailed(
                f"the group of ranks {list(ranks)} could not be formed: {job.cluster.describe(this)} is connected to "
                f"another process than {', '.join(map(job.cluster.describe, wrong))}; close the ports of Paddle to "
                "strangers (SECURITY.md)"
            )


def _proof(number: str, rank: int) -> bytes:
    return hashlib.sha256(f"{number} {rank}".encode()).digest()


def warm_up(job: GroupMembers, group: Any) -> None:
    """Create a new group's communicator now, where calls are enqueued: on all ranks, one group after the other.

    NCCL creates it at the group's first collective, and all groups share one connection to Paddle's store without a
    lock. The host blocks in this call until all ranks reach it; a missing rank is named.
    """
    if job.engine.side_by_side:
        return
    if group.is_member():
        context = CallContext(
            f"group {group.id}", f"forming the group of ranks {list(group.ranks)}", job.timeout_seconds
        )
        job.engine.run_here(_one_sum(job, group), context)
    job.barrier(f"group {group.id} formed")


def _one_sum(job: GroupMembers, group: Any) -> Stages[None]:
    tensor = paddle.ones([1], "float32").to(job.place)
    yield Stage((Collective("all_reduce", group, tensor),))


@contextmanager
def _own_store(job: GroupMembers, ranks: Sequence[int]) -> Iterator[None]:
    """Give the next group its own Paddle store.

    Gloo groups publish their addresses under the bare rank, with no prefix per group, so that a second group in one
    store reads the addresses of the first (tests/integration/launch/test_access.py). NCCL's keys are distinct.
    """
    if backend_name() != "gloo":
        yield
        return
    collective = paddle.distributed.collective
    shared = collective._default_store
    collective._default_store = _open_store(job, ranks)
    try:
        yield
    finally:
        collective._default_store = shared


def _open_store(job: GroupMembers, ranks: Sequence[int]) -> Any:
    """A TCP store on the group's first rank, set to wait for no member: its wait would hold the GIL."""
    first = ranks[0]
    host = job.cluster.ranks[first].host
    store = None
    port = 0
    if job.cluster.rank == first:
        with held_port() as port:
            store = paddle.base.core.TCPStore(host, port, True, 1, _PADDLE_STORE_SECONDS)
    port = job.broadcast(f"store of group {job.count('group')}", port, first)
    if store is None and job.cluster.rank in ranks:
        store = paddle.base.core.TCPStore(host, port, False, 1, _PADDLE_STORE_SECONDS)
    send_at_once(port)
    return _kept(store)


def send_at_once(port: int) -> None:
    """Make this process's connections to Paddle's store at this port send small pieces without delay.

    Paddle writes each request in three pieces and leaves Nagle's algorithm on: the second one waits until the other
    side has acknowledged the first, 40 ms or more, eight times for each group.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _socket_of(int(entry)) as connection:
            if connection.getpeername()[1:2] == (port,):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _socket_of(descriptor: int) -> socket.socket:
    """Another descriptor of the same socket. Raises OSError if there is none."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _kept(value: Any) -> Any:
    """Keep ``value`` as long as the process lives: its threads must not be joined at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


@contextmanager
def held_port() -> Iterator[int]:
    """A port that is free on all addresses of this machine and reserved while the body runs.

    Paddle's store listens on 0.0.0.0, whatever its host, and ends the process (SIGABRT) if it cannot, even if only a
    connection from another address of this machine has the port. The port stays bound here, so the system does not
    assign it; with SO_REUSEADDR on both, and no listener here, the store can bind and listen as well.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", 0))
        yield int(holder.getsockname()[1])
