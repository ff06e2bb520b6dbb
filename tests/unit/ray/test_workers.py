"""The environment of Ray's workers, from their addresses alone."""

from __future__ import annotations

import sys

import pytest

import fleet_train.ray
from fleet_train.cluster import Cluster
from fleet_train.cluster.environment import attempt, cluster_from_environ
from fleet_train.errors import FleetTrainError
from fleet_train.launch.node import Machine
from fleet_train.spawning.ray_workers import Attempt, apply, endpoints_of, variables

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


@pytest.mark.parametrize(("rank", "node", "local"), [(0, 0, 0), (1, 0, 1), (2, 1, 0)])
def test_every_worker_finds_the_cluster_and_its_place_in_it(rank: int, node: int, local: int) -> None:
    environ = environ_of(rank)
    cluster = cluster_from_environ(environ)
    assert isinstance(cluster, Cluster)
    assert (cluster.rank, cluster.endpoints, cluster.this.node_index, cluster.local_rank) == (
        rank,
        ENDPOINTS,
        node,
        local,
    )
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
