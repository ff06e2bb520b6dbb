from __future__ import annotations

import pytest

from fleet_train.cluster.cluster import Cluster, Rank, assign, from_endpoints
from fleet_train.errors import ClusterError


def test_assign_counts_ranks_through_the_hosts() -> None:
    assert assign(["a", "b"], 2, 6170) == (
        Rank(0, "a", 6170, 0, 0),
        Rank(1, "a", 6171, 0, 1),
        Rank(2, "b", 6170, 1, 0),
        Rank(3, "b", 6171, 1, 1),
    )


def test_endpoints_on_one_host_form_a_node() -> None:
    ranks = from_endpoints(["a:1", "a:2", "b:1"])
    assert [(rank.node_index, rank.local_index) for rank in ranks] == [(0, 0), (0, 1), (1, 0)]


def test_two_launchers_on_one_host_are_two_nodes() -> None:
    ranks = from_endpoints(["a:1", "a:2", "a:3", "a:4"], node_num=2)
    assert [(rank.node_index, rank.local_index) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_endpoint_twice_is_refused() -> None:
    with pytest.raises(ClusterError, match="endpoint a:1 is given for two ranks"):
        from_endpoints(["a:1", "a:1"])


def test_endpoint_without_port_is_refused() -> None:
    with pytest.raises(ClusterError, match="'a' is not of the form host:port"):
        from_endpoints(["a"])


def test_cluster_answers_where_this_process_is() -> None:
    cluster = Cluster(assign(["10.0.0.1", "10.0.0.2"], 2, 6170), rank=3)
    assert (cluster.world_size, cluster.node_num, cluster.local_rank) == (4, 2, 1)
    assert cluster.ranks_on_node(1) == [2, 3]
    assert cluster.describe(2) == "rank 2 (10.0.0.2:6170)"
    assert cluster.endpoints == ["10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.2:6171"]


def test_single_process_is_a_cluster_of_one() -> None:
    assert (Cluster.single().world_size, Cluster.single().node_num) == (1, 1)


def test_ranks_are_described_with_their_places_and_strangers_by_number() -> None:
    cluster = Cluster(assign(["10.0.0.1", "10.0.0.2"], 1, 6170), 0)
    assert [cluster.describe(rank) for rank in (-1, 0, 1, 2)] == [
        "rank -1",
        "rank 0 (10.0.0.1:6170)",
        "rank 1 (10.0.0.2:6170)",
        "rank 2",
    ]
