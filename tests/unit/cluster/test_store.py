"""Members at real servers: one server, a tree of relays, and the helper processes that host them.

Members see the same over relays as at one server.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fleet_train.cluster.cluster import Cluster, assign, below, parent_of
from fleet_train.cluster.store.access import Access, access_of
from fleet_train.cluster.store.client import StepNote, StoreClient, close_after_fork
from fleet_train.cluster.store.host import BindAddress, StoreHost, endpoint_of, is_host, needs_relays
from fleet_train.cluster.store.relay import Parent
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import Absence, ClusterError, FleetTrainError, JoinTimeout, WorkerFailed
from tests.support.processes import clean_environ, until

# one server


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0).start()
    yield server
    server.stop()


def connect(server: StoreServer, member: int, namespace: str = "", **options: Any) -> StoreClient:
    return StoreClient.connect(f"{server.endpoint}{namespace}", member, timeout_seconds=5, **options)


def test_errors_say_what_became_of_those_who_are_missed(server: StoreServer) -> None:
    one, two = connect(server, 0, describe=lambda i: f"rank {i} (10.0.0.{i}:6170)"), connect(server, 1)
    with pytest.raises(JoinTimeout, match=r"rank 1 \(10.0.0.1:6170\) did not arrive within 0.1 s") as late:
        one.all_gather("step 4", None, 2, 0.1)
    assert late.value.absent == (Absence(1, "missing", "did not arrive at step 4 within 0.1 s"),)
    with pytest.raises(JoinTimeout, match=r"^fleet\.barrier_worker\(\): rank 1 .* within 0\.2 s; call fleet\."):
        one.all_gather("barrier 0", None, 2, 0.2, "fleet.barrier_worker()")
    two.leave()
    with pytest.raises(WorkerFailed) as left:
        one.all_gather("step 5", None, 2, 5)
    assert left.value.absent == (Absence(1, "left", "left the job while others waited for it at step 5"),)
    connect(server, 1).close()
    until(lambda: one.gone().get(1, "left") != "left")
    with pytest.raises(WorkerFailed) as lost:
        one.all_gather("step 6", None, 2, 5)
    assert [each.kind for each in lost.value.absent] == ["lost"]
    one.fail({"message": "rank 0 has said it"})
    assert one.failure() == {"message": "rank 0 has said it"}
    with pytest.raises(WorkerFailed) as told:
        one.all_gather("step 7", None, 2, 5)
    assert told.value.absent == ()


def test_another_connection_to_the_same_endpoint_is_in_the_same_namespace(server: StoreServer) -> None:
    one, of_another_attempt = connect(server, 0, "/1"), connect(server, 0, "/2")
    one.set("a collective is given up", "step 4")
    watchdogs = StoreClient.connect(one.endpoint, 0, timeout_seconds=5, watched=False)
    assert watchdogs.get("a collective is given up") == "step 4"
    assert of_another_attempt.get("a collective is given up") is None


def test_an_answer_that_comes_late_is_not_taken_for_that_of_the_next_call(server: StoreServer) -> None:
    one, late = connect(server, 0), connect(server, 1, answer_seconds=0.2)
    one.set("decision", "go on")
    resume = threading.Event()
    server._loop.call_soon_threadsafe(resume.wait)
    with pytest.raises(WorkerFailed, match="timed out"):
        late.get("another key")
    resume.set()
    assert one.get("decision") == "go on"
    with pytest.raises(WorkerFailed, match="timed out"):
        late.get("decision")


_FORKS = """
import os, sys, time
from fleet_train.cluster.store.client import StoreClient
from fleet_train.errors import ClusterError
client = StoreClient.connect(sys.argv[1], 1, describe=lambda i: f"rank {i}")
if os.fork() == 0:
    try:
        client.leave()
    except ClusterError as error:
        print(error, flush=True)
    time.sleep(60)
client.set("forked", True)
time.sleep(60)
"""


def test_a_forked_child_neither_sends_for_its_parent_nor_hides_its_death(server: StoreServer) -> None:
    one = connect(server, 0)
    command = [sys.executable, "-c", _FORKS, server.endpoint]
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": clean_environ()}
    with subprocess.Popen(command, **options) as parent:  # type: ignore[call-overload]
        try:
            assert parent.stdout is not None
            assert "was forked from rank 1 and has no place in the job" in parent.stdout.readline()
            until(lambda: one.get("forked") is not None)
            assert one.gone() == {}
            parent.kill()  # its child lives on, with what it has inherited
            with pytest.raises(WorkerFailed, match=r"^step 1: rank 1 was lost"):
                one.all_gather("step 1", None, 2, 20)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_server_that_is_not_there_cannot_be_or_is_no_more_is_named(server: StoreServer) -> None:
    with pytest.raises(JoinTimeout, match=r"nobody answers at 127\.0\.0\.1:9"):
        StoreClient.connect("127.0.0.1:9", 0, timeout_seconds=0.2)
    with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        StoreServer("127.0.0.1", server.port).start()
    client = connect(server, 0)
    server.stop()
    with pytest.raises(WorkerFailed, match=f"store at {server.endpoint} no longer answers"):
        client.get("x")


# a tree of servers: seven nodes with a fan-in of two, a root, two relays below it, four below these; two members each

NODES, FAN_IN, EACH = 7, 2, 2
SIZE = NODES * EACH
SILENCE_SECONDS = 1.0
RANKS = [range(node * EACH, (node + 1) * EACH) for node in range(NODES)]


class Tree:
    """The servers, and a client of each member at its own node's."""

    def __init__(self) -> None:
        self.servers = [StoreServer("127.0.0.1", 0).start() for _ in range(NODES)]
        self.servers[0].open_root("0")
        for node in range(1, NODES):
            parent = self.servers[parent_of(node, FAN_IN)]
            mask = below(node, RANKS, FAN_IN)
            place = Parent("127.0.0.1", parent.port, "0", node, f"node {node}", mask, Access(), SILENCE_SECONDS)
            self.servers[node].open_relay(place, 5.0)
        self.clients = [self.connect(member) for member in range(SIZE)]

    def connect(self, member: int, namespace: str = "/0", **options: Any) -> StoreClient:
        return connect(self.servers[member // EACH], member, namespace, **options)

    def all(
        self,
        call: Callable[[StoreClient], Any],
        members: range | list[int] = range(SIZE),
        meanwhile: Callable[[], Any] | None = None,
    ) -> list[Any]:
        """What each member's call gives or raises; ``meanwhile`` is called once they all wait."""

        def one(member: int) -> Any:
            try:
                return call(self.clients[member])
            except FleetTrainError as error:
                return error

        with ThreadPoolExecutor(SIZE) as pool:
            found = pool.map(one, members)
            if meanwhile is not None:
                until(lambda: all(map(self.waits, members)))
                meanwhile()
            return list(found)

    def waits(self, member: int) -> bool:
        """At the server of its own node."""
        barriers = self.servers[member // EACH].namespaces["0"].pending.copy().values()
        return any(barrier.arrived >> member & 1 for barrier in barriers)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in reversed(self.servers):
            server.stop()


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.close()


def test_every_member_gets_all_values_or_that_of_one(tree: Tree) -> None:
    for turn in range(3):
        found = tree.all(lambda client, turn=turn: client.all_gather("values", [client.member, turn], SIZE, 10))
        assert found == [{member: [member, turn] for member in range(SIZE)}] * SIZE
    for source in (0, 5, SIZE - 1):
        found = tree.all(lambda client, of=source: client.broadcast("port", client.member * 10, of, SIZE, 10))
        assert found == [source * 10] * SIZE


def test_different_values_are_reported_with_the_members_that_have_them(tree: Tree) -> None:
    assert tree.all(lambda client: client.compare("facts", {"a": 1}, SIZE, 10)) == [[]] * SIZE
    found = tree.all(lambda client: client.compare("facts", client.member in (3, 4, 9), SIZE, 10))
    assert found == [[([[0, 2], [5, 8], [10, 13]], False), ([[3, 4], [9, 9]], True)]] * SIZE
    found = tree.all(lambda client: client.compare("facts", client.member, SIZE, 10))
    assert sorted(who[0][0] for who, _ in found[0]) == list(range(SIZE))
    assert sum(value is not None for _, value in found[0]) == 4, "of many, the first few are shown"


def test_a_step_barrier_reduces_and_each_members_payload_can_be_read(tree: Tree) -> None:
    def step(client: StoreClient, number: int) -> Any:
        stop = "SIGTERM" if number == 2 and client.member in (6, 11) else None
        digest = {1: 5, 2: min(client.member, 1), 3: 0 if client.member else None}[number]
        note = StepNote(1 + client.member % 2, 10.0 * client.member, float(number), stop, digest)
        return client.barrier(f"step {number}", note, SIZE, 10)

    answers = [tree.all(lambda client, number=number: step(client, number)) for number in (1, 2, 3)]
    for found in answers:
        assert found == [found[0]] * SIZE
    assert [found[0].slowest_ms for found in answers] == [120.0] * 3  # member 12 makes one step of 120 ms
    assert [found[0].stop for found in answers] == [None, (6, "SIGTERM"), None]
    assert [found[0].same_gradients for found in answers] == [True, False, False]
    sums = {member: [3.0 * (1 + member % 2), 30.0 * member, 6.0] for member in range(SIZE)}
    assert tree.clients[13].times(answers[2][0].number) == sums  # nobody else asks
    earlier = {member: [2.0 * (1 + member % 2), 20.0 * member, 3.0] for member in range(SIZE)}
    assert tree.all(lambda client: client.times(answers[1][0].number)) == [earlier] * SIZE


@pytest.mark.parametrize(
    ("frozen", "waiting", "words"),
    [
        (2, [*RANKS[0], *RANKS[1], *RANKS[3], *RANKS[4]], "the relay of node 2 was not heard of for 1 s"),
        (0, [*RANKS[6]], "no longer answers"),
    ],
)
def test_a_frozen_server_is_named_within_its_silence(tree: Tree, frozen: int, waiting: list[int], words: str) -> None:
    resume = threading.Event()
    tree.servers[frozen]._loop.call_soon_threadsafe(resume.wait)
    began = time.monotonic()
    try:
        found = tree.all(lambda client: client.barrier("step 6", None, SIZE, 60), waiting)
    finally:
        resume.set()
    assert time.monotonic() - began < 40 * SILENCE_SECONDS
    assert all(words in str(error) for error in found), found


def test_values_failures_and_the_clock_are_those_of_the_root(tree: Tree) -> None:
    with pytest.raises(ClusterError, match="rank 9 has joined this job already"):
        tree.connect(9)
    tree.clients[13].set("port", 6170)
    assert tree.all(lambda client: client.get("port")) == [6170] * SIZE
    assert tree.clients[12].get("nothing") is None
    before = tree.clients[0].clock()

    def fail() -> None:
        tree.connect(5, watched=False).fail({"message": "rank 5 ran out of memory"})

    found = tree.all(lambda client: client.barrier("step", None, SIZE, 30), [0, 7, 13], fail)
    assert [str(error) for error in found] == ["rank 5 ran out of memory"] * 3
    (report, at), *_ = tree.clients[13].failures()
    assert report == {"message": "rank 5 ran out of memory"}
    assert before <= at <= tree.clients[13].clock() <= tree.clients[0].clock()


def test_a_namespace_within_a_namespace_has_its_tree(tree: Tree) -> None:
    def meet(member: int) -> Any:
        with contextlib.closing(tree.connect(member, "/0.selftest", group="supervisor")) as client:
            return client.all_gather("facts", member, SIZE, 10)

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(meet, range(SIZE))) == [{member: member for member in range(SIZE)}] * SIZE


# the helper processes of ranks that another launcher started: one for few ranks, one per node for many

HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


def cluster(rank: int, ranks_per_node: int, port: int) -> Cluster:
    return Cluster(assign(HOSTS, ranks_per_node, port), rank)


@pytest.mark.parametrize(("ranks_per_node", "hosts"), [(2, [0]), (12, [0, 12, 24])])
def test_who_hosts(ranks_per_node: int, hosts: list[int]) -> None:
    ranks = [cluster(rank, ranks_per_node, 6170) for rank in range(ranks_per_node * len(HOSTS))]
    assert [each.rank for each in ranks if is_host(each)] == hosts
    assert {endpoint_of(each) for each in ranks} == {f"{HOSTS[rank // ranks_per_node]}:6170" for rank in hosts}
    launched = Cluster(ranks[0].ranks, 0, "127.0.0.9:1/0")
    assert not is_host(launched)
    assert endpoint_of(launched) == "127.0.0.9:1/0"
    shapes = [(1, 40), (2, 16), (3, 11), (2, 17)]
    assert [needs_relays(Cluster.imagined(*shape)) for shape in shapes] == [False, False, True, True]


def test_where_a_nodes_server_listens_and_which_ranks_it_serves() -> None:
    root = BindAddress.of(cluster(5, 12, 7000), 60.0)
    # 32 relays below it at most, and as many members.
    assert root == BindAddress("127.0.0.2", 7000, HOSTS, 64, timeout_seconds=60.0)
    second = BindAddress.of(cluster(12, 12, 7000), 60.0)
    assert (second.host, second.port, second.node, second.parent) == ("127.0.0.3", 7000, 1, "127.0.0.2:7000")
    assert int(second.below, 16) == sum(2**rank for rank in range(12, 24))
    few = BindAddress.of(cluster(3, 2, 7000), 60.0)
    assert (few.parent, few.below, few.members) == ("", "0", 64)
    assert BindAddress.of(Cluster(assign(HOSTS, 40, 7000), 119), 60.0).members == 72


def test_a_forked_child_does_not_hold_the_server_that_its_parent_has_started() -> None:
    """The pipe is the parent's word that it lives; the server sees its end once the parent has closed it."""
    reader, writer = os.pipe()
    alive, child_ends = os.pipe()
    host = StoreHost.__new__(StoreHost)
    host._process = SimpleNamespace(stdin=os.fdopen(writer, "wb"))  # type: ignore[assignment]
    close_after_fork(host)
    child = os.fork()
    if child == 0:
        os.close(child_ends)
        os.read(alive, 1)  # until the parent lets go
        os._exit(0)
    os.close(alive)
    host.release()
    try:
        assert select.select([reader], [], [], 30.0)[0], "the child still holds the pipe"
        assert os.read(reader, 1) == b""
    finally:
        os.close(child_ends)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.mark.parametrize("seconds", [pytest.param(12.0, marks=pytest.mark.long), 0.0])
def test_a_server_that_stands_still_is_waited_for_unless_it_does_for_too_long(
    seconds: float, free_ports: Callable[..., int]
) -> None:
    """A machine that swaps, or is paused by its hypervisor, must not end the job; a server that hangs must."""
    member = cluster(0, 1, free_ports(1, HOSTS))
    host = StoreHost.of(member, 30.0)
    patience = {} if seconds else {"answer_seconds": 0.5}
    client = StoreClient.connect(endpoint_of(member), 0, access=access_of(member), timeout_seconds=30.0, **patience)
    os.kill(host._process.pid, signal.SIGSTOP)
    os.waitpid(host._process.pid, os.WUNTRACED)  # a process that is yet to be scheduled may still answer
    try:
        if seconds:
            threading.Timer(seconds, os.kill, (host._process.pid, signal.SIGCONT)).start()
            began = time.monotonic()
            client.set("key", "value")
            assert time.monotonic() - began > seconds - 1
            assert client.get("key") == "value"
        else:
            with pytest.raises(WorkerFailed, match=r"no longer answers \(timed out"):
                client.set("key", "value")
    finally:
        os.kill(host._process.pid, signal.SIGCONT)
        client.close()
        host.release()
        host._process.wait(30)


def test_many_ranks_reach_barriers_over_the_helpers_of_their_nodes(free_ports: Callable[..., int]) -> None:
    each, port, size = 12, free_ports(12, HOSTS), 12 * len(HOSTS)

    def meet(rank: int) -> dict[int, int]:
        place = cluster(rank, each, port)
        joined = StoreClient.connect(endpoint_of(place), rank, timeout_seconds=60, access=access_of(place, {}))
        with contextlib.closing(joined) as client:
            values: dict[int, int] = client.all_gather("ranks", rank * rank, size, 60)
            client.leave()
            return values

    with ThreadPoolExecutor(size + 3) as pool:
        found = [pool.submit(meet, rank) for rank in range(size)]
        # The last node's helper starts first, and its ranks are there before it can reach its parent.
        hosts = list(pool.map(lambda rank: StoreHost.of(cluster(rank, each, port), 60), (24, 12, 0)))
        assert [each.result() for each in found] == [{rank: rank * rank for rank in range(size)}] * size
    for one in hosts:
        one.release()
        assert one._process.wait(timeout=120) == 0
