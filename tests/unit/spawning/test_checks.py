"""Before ranks of spawn or workers of Ray start: mistakes in the call, what travels to them, and their environment."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fleet_train.ray
from fleet_train.cluster import Cluster
from fleet_train.cluster.at_import import advised
from fleet_train.cluster.environment import attempt, cluster_from_environ
from fleet_train.cluster.partial import PartialCluster
from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ClusterError, FleetTrainError, ProfileError
from fleet_train.launch.prepare import Launch, prepare
from fleet_train.profile import Profile
from fleet_train.spawning import shipping
from fleet_train.spawning.ray_workers import RayAttempt, become_rank
from fleet_train.spawning.shipping import NotSerializable, ship, ship_result, unship
from fleet_train.spawning.spawn import (
    check_call,
    check_ranks,
    check_seconds,
    profile_of,
    refuse_within_a_rank,
    request_of,
)
from fleet_train.spawning.spawn import environ_of as environ_of_spawn

LOCK = threading.Lock()


def two(a: int, b: int = 0) -> int:
    return a + b


async def later() -> None: ...


def many() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("train", "args", "said"),
    [
        (None, (), r"given None, which is not a function; give the function itself, as in spawn\(train\)"),
        (two, (), r"two\(a: 'int', b: 'int' = 0\) -> 'int' cannot be called with args=\(\): missing .* 'a'"),
        (two, (1, 2, 3), r"args=\(int, int, int\): too many positional arguments"),
        (two, "ab", r"args='ab' is not a tuple; one argument is written as args=\(value,\)"),
        (lambda rank: rank, (), r"the lambda\(rank\) .* passes a function its args and no rank: .*fleet.worker_index"),
        (later, (), "is an async function or a generator"),
        (many, (), "is an async function or a generator"),
    ],
)
def test_a_call_that_cannot_be_made(train: Any, args: Any, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        check_call(train, args)
    assert check_call(two, [1]) == (1,)
    assert check_call(functools.partial(two, 1), ()) == ()
    assert check_call(max, (3, 4)) == (3, 4)


def test_ranks_gpus_and_bounds() -> None:
    for nprocs in (0, -1, "2", 2.0, True, 5000):
        with pytest.raises(ClusterError, match=f"nprocs={nprocs!r}"):
            check_ranks(nprocs, None)
    for value in (0, -1.0, "5", True, float("nan"), float("inf")):
        with pytest.raises(ClusterError, match="join_timeout_seconds="):
            check_seconds("join_timeout_seconds", value)  # type: ignore[arg-type]
    check_ranks(8, None)
    check_ranks(8, ())  # a GPU build on a machine without GPUs computes on its processors
    check_ranks(2, ("0", "1", "3"))
    with pytest.raises(ClusterError, match=r"nprocs=3, but the visible GPUs are 0,1 \(2\)"):
        check_ranks(3, ("0", "1"))


def test_the_strategy_is_a_profile_in_any_form(tmp_path: Path) -> None:
    strategy = DistributedStrategy()
    strategy.nccl_comm_num = 2
    mine = tmp_path / "mine.yaml"
    mine.write_text("nccl_comm_num: 2\n")
    assert profile_of(None) is None
    assert profile_of("unfused").name == "unfused"
    for given in (strategy, strategy.to_profile(), mine, str(mine)):
        assert profile_of(given).nccl_comm_num == 2
    with pytest.raises(ClusterError, match="strategy=a value of type dict: it takes a profile's name"):
        profile_of({})


def test_a_profile_is_the_same_after_its_journey() -> None:
    profile = profile_of("hierarchical").with_notes(["a note"])
    _, _, arrived = unship(ship(two, (1,), profile))
    assert arrived == profile
    assert (arrived.digest(), arrived.explicit, arrived.notes) == (profile.digest(), profile.explicit, profile.notes)
    assert arrived.origin("use_hierarchical_allreduce") == profile.origin("use_hierarchical_allreduce")


def test_what_a_closure_captures_and_cannot_travel_is_named() -> None:
    held = threading.Lock()

    def helper() -> Any:
        return held

    namespace: dict[str, Any] = {"__name__": "__main__", "lock": LOCK}
    exec("def train():\n    return lock", namespace)
    for train, args, said in (
        (lambda: helper(), (), r"'held', which helper captures, cannot be sent .* type _thread\.lock"),
        (lambda: held, (), "'held', which the lambda captures"),
        (two, (1, LOCK), r"args\[1\] cannot be sent to the ranks: it is a value of type _thread\.lock"),
        (functools.partial(two, LOCK), (), r"argument 0 of the functools\.partial"),
        (namespace["train"], (), "'lock', which train uses as a global"),
    ):
        with pytest.raises(NotSerializable, match=said):
            ship(train, args)
    with pytest.raises(
        NotSerializable, match=r"train returned a value of type list, .*: item 1 is a value of type _th"
    ):
        ship_result([1, LOCK], "train")


def test_a_rank_is_recognised_by_its_environment() -> None:
    refuse_within_a_rank({})
    refuse_within_a_rank({"PADDLE_TRAINERS_NUM": "1", "PADDLE_TRAINER_ID": "0"})
    for environ in ({"FLEET_TRAIN_STORE": "a:1/0"}, {"PADDLE_TRAINERS_NUM": "4"}):
        with pytest.raises(ClusterError, match="in rank 3 of a job"):
            refuse_within_a_rank({"PADDLE_TRAINER_ID": "3", **environ})
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ClusterError, match="process 1 of 2 that whoever set RANK and WORLD_SIZE has started"):
        refuse_within_a_rank(torchrun)


def test_a_call_while_the_rank_imports_names_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "loading", "train")
    with pytest.raises(shipping.CalledWhileImported, match=rf"at the top level of {__name__} \(.*test_checks.py:"):
        refuse_within_a_rank({})


def test_source_lines_of_cells_travel_and_those_of_files_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"<cell 1>": (2, None, ["a\n"], "<cell 1>"), sys.executable: (2, 1.0, ["b\n"], sys.executable)}
    monkeypatch.setattr(linecache, "cache", cache)
    assert shipping.sources() == {"<cell 1>": ["a\n"]}
    shipping.take_sources({"<cell 2>": ["c\n"]})
    assert linecache.getline("<cell 2>", 1) == "c\n"


# the environment of spawned ranks, and of Ray's workers


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[dict[str, str]], tuple[Launch, list[dict[str, str]]]]:
    """The launch of two ranks by somebody with these variables, and their environments."""

    def asked_with(users: dict[str, str]) -> tuple[Launch, list[dict[str, str]]]:
        environ = environ_of_spawn(users)
        launch = prepare(request_of("/greeting", 2, tmp_path, 60.0), environ, Profile(environment={"X": "y"}))
        common = launch.environ_of(launch.node.store_endpoint + "/0", 0, "abc", environ)
        return launch, [common | launch.variables_of(local) for local in (0, 1)]

    return asked_with


def test_each_rank_finds_the_cluster_and_its_place(asked: Any) -> None:
    launch, both = asked({"HOME": "/home/me", "RANK": "7", "FLEET_TRAIN_JOB_SECRET_FILE": "/mine"})
    for rank, environ in enumerate(both):
        cluster = cluster_from_environ(environ)
        assert isinstance(cluster, Cluster)
        assert (cluster.rank, cluster.world_size, cluster.node_num, cluster.local_rank) == (rank, 2, 1, rank)
        assert cluster.store_endpoint == f"{launch.node.store_endpoint}/0"
        assert (environ["HOME"], environ["X"]) == ("/home/me", "y")
        assert not {"RANK", "FLEET_TRAIN_JOB_SECRET_FILE", "FLEET_TRAIN_STRATEGY"} & environ.keys()
    assert both[0]["FLEET_TRAIN_JOB_SECRET"] == both[1]["FLEET_TRAIN_JOB_SECRET"]
    assert launch.access.secret == both[0]["FLEET_TRAIN_JOB_SECRET"].encode()


def test_two_spawns_share_neither_address_nor_id_nor_secret(asked: Any) -> None:
    (one, (first, _)), (other, (second, _)) = asked({}), asked({})
    for name in ("FLEET_TRAIN_JOB_ID", "FLEET_TRAIN_JOB_SECRET"):
        assert first[name] != second[name]
    assert one.node.address != other.node.address
    assert one.request.run != other.request.run


def test_a_message_is_read_once_it_is_complete_and_under_its_path() -> None:
    with shipping.created() as descriptor, shipping.opened(shipping.path_of(descriptor)) as other:
        assert shipping.read(descriptor) is None
        shipping.write(other, {"result": b"x" * 100_000})
        for each in (descriptor, other):
            assert shipping.read(each) == {"result": b"x" * 100_000}
        os.truncate(descriptor, 50_000)
        assert shipping.read(descriptor) is None


ATTEMPT = RayAttempt("ray-abc-1", "s" * 48, "abc", 1, 60.0)
PLACES = [("10.0.0.1", 7000), ("10.0.0.1", 7000), ("10.0.0.2", 7000)]


def environ_of(rank: int, users: dict[str, str] | None = None, **profile: str) -> dict[str, str]:
    environ = dict(users or {})
    become_rank(PLACES, rank, ATTEMPT, profile, environ)
    return environ


@pytest.mark.parametrize(("rank", "local"), [(0, (0, 2)), (1, (1, 2)), (2, (0, 1))])
def test_every_worker_is_a_process_of_an_engine_and_knows_where_the_first_is(rank: int, local: tuple[int, int]) -> None:
    environ = environ_of(rank, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "TORCHELASTIC_RUN_ID": "outer"})
    cluster = cluster_from_environ(environ)
    assert isinstance(cluster, PartialCluster)
    assert (cluster.rank, cluster.world_size, cluster.formed_by) == (rank, 3, "Ray Train")
    assert (cluster.started.local_index, cluster.started.local_count) == local
    assert (cluster.started.master, cluster.started.port) == ("10.0.0.1", 7000)
    assert attempt(environ) == 1
    assert environ["FLEET_TRAIN_LAUNCHED"] == "abc"
    assert environ["FLEET_TRAIN_JOB_ID"] == "ray-abc-1"


def test_what_is_set_wins_over_the_profile_and_advice() -> None:
    assert environ_of(0, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1", "Ray has set it"
    assert environ_of(0, X="y")["X"] == "y"
    assert environ_of(0, {"X": "z"}, X="y")["X"] == "z"
    assert advised(environ_of(0, {"X": "z"}, X="y", Z="w")) >= {"Z"}, "the function's own profile may replace it"
    assert "X" not in advised(environ_of(0, {"X": "z"}, X="y"))
    with pytest.raises(ProfileError, match="environment: RANK is set by the launcher"):
        environ_of(0, RANK="1")


def test_what_another_job_has_left_is_taken_out() -> None:
    left = {"FLEET_TRAIN_STORE": "a:1", "PADDLE_TRAINER_ID": "3", "FLEET_TRAIN_JOB_SECRET_FILE": "/x"}
    assert not left.keys() & environ_of(0, left).keys()


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # import fails, as where it is not installed
    monkeypatch.delitem(sys.modules, "fleet_train.spawning.ray_trainer", raising=False)
    monkeypatch.delitem(vars(fleet_train.ray), "FleetTrainer", raising=False)
    with pytest.raises(ImportError, match=r'pip install "ray\[train\]"') as missing:
        _ = fleet_train.ray.FleetTrainer
    assert isinstance(missing.value, FleetTrainError)
