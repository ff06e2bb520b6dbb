"""The environment of spawned ranks and of Ray's workers, and the messages between ranks and their parent."""

from __future__ import annotations

import os
import sys

import pytest

import fleet_train.ray
from fleet_train.cluster import Cluster
from fleet_train.cluster.environment import attempt, cluster_from_environ
from fleet_train.errors import FleetTrainError
from fleet_train.launch.node import Machine, Node, build_environment
from fleet_train.spawning import shipping
from fleet_train.spawning.ray_workers import Attempt, apply, endpoints_of, variables
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


CPU = Machine({"lo": ("127.0.0.1",), "eth0": ("127.0.0.9",)}, 8, False, None, {})
ATTEMPT = Attempt("ray-abc-1", "s" * 48, "abc", 1, 60.0)
ENDPOINTS = ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7000"]


def environ_of(rank: int, users: dict[str, str] | None = None, **profile: str) -> dict[str, str]:
    environ = dict(users or {})
    told, removed = variables(ENDPOINTS, rank, ATTEMPT, profile, CPU, environ)
    apply(environ, told, removed)
    return environ


def test_workers_of_a_node_that_found_the_same_port_get_different_ones() -> None:
    told = [("10.0.0.1", 7000), ("10.0.0.1", 7000), ("10.0.0.2", 7000), ("10.0.0.1", 7001)]
    assert endpoints_of(told) == ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7000", "10.0.0.1:7002"]


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0)), (1, (0, 1)), (2, (1, 0))])
def test_every_worker_finds_the_cluster_and_its_place_in_it(rank: int, place: tuple[int, int]) -> None:
    environ = environ_of(rank)
    cluster = cluster_from_environ(environ)
    assert isinstance(cluster, Cluster)
    assert (cluster.rank, cluster.endpoints) == (rank, ENDPOINTS)
    assert (cluster.this.node_index, cluster.local_rank) == place
    assert cluster.store_endpoint == "", "rank 0 hosts the store"
    assert attempt(environ) == 1
    assert environ["FLEET_TRAIN_LAUNCHED"] == "abc"
    assert environ["FLEET_TRAIN_JOB_ID"] == "ray-abc-1"


def test_advice_is_the_launchers_and_what_is_set_wins() -> None:
    assert environ_of(2)["FLAGS_new_executor_serial_run"] == "1"
    assert environ_of(0)["OMP_NUM_THREADS"] == "4", "two workers on a node of 8 processors"
    assert environ_of(0, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1", "Ray has set it"
    assert environ_of(0, X="y")["X"] == "y"


def test_what_another_job_has_left_is_taken_out() -> None:
    left = {"FLEET_TRAIN_STORE": "a:1", "RANK": "3", "WORLD_SIZE": "9", "FLEET_TRAIN_JOB_SECRET_FILE": "/x"}
    assert not left.keys() & environ_of(0, left).keys()


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # import fails, as where it is not installed
    monkeypatch.delitem(sys.modules, "fleet_train.spawning.ray_trainer", raising=False)
    monkeypatch.delitem(vars(fleet_train.ray), "FleetTrainer", raising=False)
    with pytest.raises(ImportError, match=r'pip install "ray\[train\]"') as missing:
        _ = fleet_train.ray.FleetTrainer
    assert isinstance(missing.value, FleetTrainError)
