"""Role makers: which cluster they describe, and what they refuse."""

from __future__ import annotations

import pytest
from paddle.distributed import fleet as theirs

from fleet_train.convert.role_maker import (
    PaddleCloudRoleMaker,
    Role,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
    cluster_of,
)
from fleet_train.errors import ClusterError

ENDPOINTS = ["10.0.0.1:6170", "10.0.0.2:6170"]
LAUNCHED = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": ",".join(ENDPOINTS),
    "PADDLE_CURRENT_ENDPOINT": ENDPOINTS[1],
}


def test_a_cluster_given_by_the_script_needs_no_launcher() -> None:
    cluster = UserDefinedRoleMaker(True, current_id=1, role=Role.WORKER, worker_endpoints=ENDPOINTS).cluster({})
    assert (cluster.rank, cluster.world_size, cluster.node_num) == (1, 2, 2)
    assert cluster.endpoints == ENDPOINTS


def test_the_name_of_fleet_1_8_describes_the_same() -> None:
    assert UserDefinedCollectiveRoleMaker(1, ENDPOINTS).cluster({}).this.endpoint == ENDPOINTS[1]


def test_a_number_of_workers_takes_the_launchers_endpoints() -> None:
    cluster = UserDefinedRoleMaker(True, current_id=1, worker_num=2).cluster(LAUNCHED)
    assert cluster.endpoints == ENDPOINTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"current_id": 0, "worker_endpoints": ENDPOINTS}, "current_id is 0, but .*ENDPOINTS says 1"),
        ({"current_id": 1, "worker_endpoints": [*ENDPOINTS, "10.0.0.3:1"]}, "the number of ranks is 3, but .* says 2"),
        ({"current_id": 1, "worker_endpoints": ["10.0.0.1:1", "10.0.0.2:1"]}, "worker_endpoints is .* but .* says"),
    ],
)
def test_a_launcher_that_has_started_another_cluster_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        UserDefinedRoleMaker(is_collective=True, **arguments).cluster(LAUNCHED)  # type: ignore[arg-type]


def test_a_number_of_workers_alone_does_not_say_where_they_are() -> None:
    with pytest.raises(ClusterError, match="the number of ranks is 2, but one process says 1"):
        UserDefinedRoleMaker(is_collective=True, worker_num=2).cluster({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_collective": False, "worker_endpoints": ENDPOINTS}, "asks for parameter servers"),
        ({"role": Role.SERVER, "worker_endpoints": ENDPOINTS}, "asks for parameter servers"),
        ({"server_endpoints": ENDPOINTS, "worker_endpoints": ENDPOINTS}, "asks for parameter servers"),
        ({"worker_endpoints": ENDPOINTS, "worker_num": 3}, "worker_num=3, but worker_endpoints names 2"),
        ({"worker_endpoints": ENDPOINTS, "current_id": 2}, r"current_id=2 is not in 0 \.\. 1"),
        ({}, "needs worker_endpoints"),
        ({"worker_endpoints": ENDPOINTS, "path": "/tmp"}, "does not know path"),
        ({"worker_endpoints": ENDPOINTS, "init_gloo": True}, "does not know init_gloo"),
    ],
)
def test_what_describes_no_collective_cluster_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        UserDefinedRoleMaker(**{"is_collective": True, **arguments})  # type: ignore[arg-type]


def test_paddles_own_role_maker_with_endpoints_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    role = theirs.UserDefinedRoleMaker(
        is_collective=True, current_id=1, role=theirs.Role.WORKER, worker_endpoints=ENDPOINTS
    )
    assert cluster_of(role).this.endpoint == ENDPOINTS[1]
    servers = theirs.UserDefinedRoleMaker(current_id=0, role=theirs.Role.SERVER, server_endpoints=ENDPOINTS)
    with pytest.raises(ClusterError, match="parameter servers"):
        cluster_of(servers)


def test_roles_have_paddles_numbers() -> None:
    for name in ("WORKER", "SERVER", "HETER_WORKER", "ALL", "COORDINATOR"):
        assert getattr(Role, name) == getattr(theirs.Role, name)


def test_the_gloo_of_parameter_servers_is_refused_and_its_absence_accepted() -> None:
    PaddleCloudRoleMaker(is_collective=True, init_gloo=False)
    with pytest.raises(ClusterError, match=r"leave it out, fleet\.init forms the process groups"):
        PaddleCloudRoleMaker(is_collective=True, init_gloo=True)
