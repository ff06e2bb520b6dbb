"""The environment of spawned ranks, and the messages between them and their parent."""

from __future__ import annotations

import os

from fleet_train.cluster import Cluster
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.launch.node import Machine, Node, build_environment
from fleet_train.spawning import shipping
from fleet_train.spawning.spawn import environs, rendezvous_of

MACHINE = Machine({"lo": ("127.0.0.1",)}, 8, False, None, {})


def told(devices: tuple[str, ...] | None, users: dict[str, str]) -> tuple[Node, list[dict[str, str]]]:
    with rendezvous_of(2, devices) as (node, access, _):
        base = build_environment(node, MACHINE, users, profile={}, join_timeout_seconds=60.0)
        return node, environs(base, node, access, users)


def test_each_rank_finds_the_cluster_and_its_place() -> None:
    node, both = told(None, {"HOME": "/home/me", "RANK": "7", "FLEET_TRAIN_JOB_SECRET_FILE": "/mine"})
    for rank, environ in enumerate(both):
        cluster = cluster_from_environ(environ)
        assert isinstance(cluster, Cluster)
        assert (cluster.rank, cluster.world_size, cluster.node_num, cluster.local_rank) == (rank, 2, 1, rank)
        assert cluster.store_endpoint == f"127.0.0.1:{node.store_port}/0"
        assert environ["OMP_NUM_THREADS"] == "4"
        assert environ["HOME"] == "/home/me"
        assert not {"RANK", "FLEET_TRAIN_JOB_SECRET_FILE", "FLAGS_selected_gpus"} & environ.keys()
    assert both[0]["FLEET_TRAIN_JOB_SECRET"] == both[1]["FLEET_TRAIN_JOB_SECRET"]


def test_two_spawns_share_neither_port_nor_id_nor_secret() -> None:
    (_, one), (_, other) = told(None, {}), told(None, {})
    for name in ("FLEET_TRAIN_JOB_ID", "FLEET_TRAIN_JOB_SECRET", "FLEET_TRAIN_LAUNCHED"):
        assert one[0][name] != other[0][name]


def test_ranks_get_their_gpu_by_its_position_among_the_visible_ones() -> None:
    _, both = told(("2", "3"), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert [environ["FLAGS_selected_gpus"] for environ in both] == ["0", "1"]
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in both] == ["2,3", "2,3"]


def test_a_message_is_read_once_it_is_complete() -> None:
    descriptor = shipping.create()
    try:
        assert shipping.read(descriptor) is None
        os.pwrite(descriptor, b"begun", 16)
        assert shipping.read(descriptor) is None
        shipping.write(descriptor, {"kind": "result"}, b"x" * 100_000)
        for _ in range(2):
            assert shipping.read(descriptor) == ({"kind": "result"}, b"x" * 100_000)
    finally:
        os.close(descriptor)
