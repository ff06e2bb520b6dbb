"""What a job starts from: role makers, what its engine carries out of a profile, and its allocator."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from paddle.distributed import fleet as theirs

from fleet_train.collectives.engines import StreamEngine, ThreadEngine
from fleet_train.collectives.paddle_compat import keep_freed_memory
from fleet_train.convert.planning import fitted_to
from fleet_train.convert.role_maker import (
    PaddleCloudRoleMaker,
    Role,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
    cluster_of,
)
from fleet_train.errors import ClusterError
from fleet_train.profile import Profile, load_profile

ENDPOINTS = ["10.0.0.1:6170", "10.0.0.2:6170"]
LAUNCHED = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": ",".join(ENDPOINTS),
    "PADDLE_CURRENT_ENDPOINT": ENDPOINTS[1],
}


def test_a_script_describes_the_cluster_or_takes_the_launchers_endpoints() -> None:
    cluster = UserDefinedRoleMaker(True, current_id=1, role=Role.WORKER, worker_endpoints=ENDPOINTS).cluster({})
    assert (cluster.rank, cluster.world_size, cluster.node_num) == (1, 2, 2)
    assert cluster.endpoints == ENDPOINTS
    assert UserDefinedCollectiveRoleMaker(1, ENDPOINTS).cluster({}).this.endpoint == ENDPOINTS[1]
    assert UserDefinedRoleMaker(True, current_id=1, worker_num=2).cluster(LAUNCHED).endpoints == ENDPOINTS


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ({"current_id": 0, "worker_endpoints": ENDPOINTS}, LAUNCHED, "current_id is 0, but .*ENDPOINTS says 1"),
        ({"current_id": 1, "worker_endpoints": [*ENDPOINTS, "b:1"]}, LAUNCHED, "number of ranks is 3, but .* says 2"),
        ({"current_id": 1, "worker_endpoints": ["a:1", "b:1"]}, LAUNCHED, "worker_endpoints is .* but .* says"),
        ({"worker_num": 2}, {}, "the number of ranks is 2, but one process says 1"),
    ],
)
def test_a_launcher_that_has_started_another_cluster_is_named(
    arguments: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        UserDefinedRoleMaker(is_collective=True, **arguments).cluster(environ)


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


THREADS: Any = SimpleNamespace(side_by_side=ThreadEngine.side_by_side)
STREAMS: Any = SimpleNamespace(side_by_side=StreamEngine.side_by_side)


def test_streams_have_one_communicator_and_say_why() -> None:
    asked = load_profile("multi_node").with_settings("my script", nccl_comm_num=2)
    fitted, (told,) = fitted_to(STREAMS, asked)
    mapped = {"nccl_comm_num": 1, "collective_stream": "calc", "barrier_every_steps": 10}
    assert fitted.settings() == asked.settings() | mapped
    assert asked.nccl_comm_num == 2
    assert told.startswith("nccl_comm_num: 2 (")
    assert asked.origin("nccl_comm_num") in told
    assert "is mapped to 1 on NCCL" in told
    assert "NCCL_MIN_NCHANNELS" in told


def test_on_streams_what_stalls_a_device_is_mapped_or_told_and_what_was_asked_for_by_name_stays() -> None:
    grouped = Profile(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2)
    fitted, (told,) = fitted_to(STREAMS, grouped)
    assert not fitted.use_hierarchical_allreduce
    assert "is flat on NCCL" in told
    assert "force_hierarchical_allreduce: true carries it out" in told
    forced = grouped.with_settings(force_hierarchical_allreduce=True, barrier_every_steps=1, collective_stream="own")
    fitted, notices = fitted_to(STREAMS, forced)
    assert (fitted.use_hierarchical_allreduce, fitted.barrier_every_steps, fitted.collective_stream) == (True, 1, "own")
    assert notices == []
    assert fitted_to(THREADS, forced)[0] == forced
    assert "has no effect on Gloo" in fitted_to(THREADS, forced)[1][0]
    (told,) = fitted_to(STREAMS, Profile(compression="powersgd", powersgd_rank=4))[1]
    assert "qr lets the host wait for the GPU" in told
    assert fitted_to(STREAMS, Profile(compression="powersgd", powersgd_rank=1))[1] == []


TRIM, MMAP = (-1, 1024**3), (-3, 32 * 1024**2)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>


def test_freed_blocks_up_to_32_mib_stay_until_a_gib_is_free_unless_the_user_or_the_c_library_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[Any] = []
    asked: list[Any] = []

    def mallopt(*given: int) -> int:
        asked.append(given)
        return int(given not in refused)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt) if name is None else None)
    assert keep_freed_memory({"PATH": "/bin"}) is True
    assert asked == [TRIM, MMAP]
    for each in (TRIM, MMAP):
        refused[:] = [each]
        assert keep_freed_memory({}) is False
    asked.clear()
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        assert keep_freed_memory({name: ""}) is False
    assert asked == []
    for error in (AttributeError, OSError, TypeError):
        monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=error))
        assert keep_freed_memory({}) is False
