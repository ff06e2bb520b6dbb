"""The helpers beside ranks that were started by another launcher: one for few ranks, one per node for many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleet_train.cluster.cluster import Cluster, assign
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.protocol.access import access_of
from fleet_train.cluster.store.servers.host import StoreHost, endpoint_of, is_host

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


def test_many_ranks_meet_over_the_helpers_of_their_nodes(free_ports: Callable[..., int]) -> None:
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
