"""The helper processes of ranks that another launcher started: one for few ranks, one per node for many."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fleet_train.cluster.cluster import Cluster, assign
from fleet_train.cluster.store.access import access_of
from fleet_train.cluster.store.client import StoreClient, close_after_fork
from fleet_train.cluster.store.host import BindAddress, StoreHost, endpoint_of, is_host, needs_relays
from fleet_train.errors import WorkerFailed

HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


def cluster(rank: int, ranks_per_node: int, port: int) -> Cluster:
    return Cluster(assign(HOSTS, ranks_per_node, port), rank)


@pytest.mark.parametrize(("ranks_per_node", "hosts"), [(2, [0]), (12, [0, 12, 24])])
def test_who_hosts(ranks_per_node: int, hosts: list[int]) -> None:
    size = ranks_per_node * len(HOSTS)
    assert [rank for rank in range(size) if is_host(cluster(rank, ranks_per_node, 6170))] == hosts
    assert {endpoint_of(cluster(rank, ranks_per_node, 6170)) for rank in range(size)} == {
        f"{HOSTS[rank // ranks_per_node]}:6170" for rank in hosts
    }
    launched = Cluster(assign(HOSTS, ranks_per_node, 6170), 0, "127.0.0.9:1/0")
    assert not is_host(launched)
    assert endpoint_of(launched) == "127.0.0.9:1/0"


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "relays"), [(1, 40, False), (2, 16, False), (3, 11, True), (2, 17, True)]
)
def test_more_than_32_ranks_on_several_nodes_have_relays(nodes: int, ranks_per_node: int, relays: bool) -> None:
    assert needs_relays(Cluster.imagined(nodes, ranks_per_node)) == relays


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
    os.set_blocking(reader, False)
    try:
        for _ in range(200):  # the child may not have run yet
            try:
                assert os.read(reader, 1) == b""
                break
            except BlockingIOError:
                time.sleep(0.05)
        else:
            pytest.fail("the child still holds the pipe")
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
    each = 12
    port = free_ports(each, HOSTS)
    size = each * len(HOSTS)
    hosts: list[StoreHost] = []

    def meet(rank: int) -> dict[int, int]:
        place = cluster(rank, each, port)
        endpoint = endpoint_of(place)
        client = StoreClient.connect(endpoint, rank, timeout_seconds=60, access=access_of(place, {}))
        try:
            values: dict[int, int] = client.all_gather("ranks", rank * rank, size, 60)
            client.leave()
            return values
        finally:
            client.close()

    def host(rank: int) -> None:
        hosts.append(StoreHost.of(cluster(rank, each, port), 60))

    # The last node's helper starts first, and its ranks are there before it can reach its parent.
    helpers = [threading.Thread(target=host, args=(rank,)) for rank in (24, 12, 0)]
    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(meet, rank) for rank in range(size)]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
        assert [each.result() for each in found] == [{rank: rank * rank for rank in range(size)}] * size
    for one in hosts:
        one.release()
        assert one._process.wait(timeout=120) == 0
