"""Joining, step by step: Paddle and the device of a rank, who waits, what is compared, and what a failure undoes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

import fleet_train
from fleet_train.cluster import Cluster, StoreClient
from fleet_train.collectives import join as join_module
from fleet_train.collectives.join import choose_place, chosen_gpu, join, refuse_other_ranks
from fleet_train.collectives.paddle_compat import backend_name, installed_version, require_paddle
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout, LinkFailed, PaddleUnusable, ScheduleMismatch


def test_version_is_the_packages_where_paddle_does_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"paddlepaddle": "3.3.1", "paddlepaddle-gpu": "3.4.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert installed_version() == paddle.__version__ != ""
    monkeypatch.setattr(paddle, "__version__", None)
    found = [installed_version()]
    for name in list(versions):
        del versions[name]
        found.append(installed_version())
    assert found == ["3.3.1", "3.4.0", "unknown"]


@pytest.mark.parametrize(
    ("gpu", "asked", "expected"),
    [
        (True, None, "nccl"),
        (True, "nccl", "nccl"),
        (True, "GLOO", "gloo"),
        (False, None, "gloo"),
        (False, "nccl", "gloo"),
    ],
)
def test_backend_is_nccl_on_a_gpu_build_that_is_not_asked_for_gloo(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, asked: str | None, expected: str
) -> None:
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: gpu)
    assert backend_name({} if asked is None else {"PADDLE_DISTRI_BACKEND": asked}) == expected


@pytest.mark.parametrize(
    ("selected", "local_rank", "visible", "gpu"),
    [
        (None, 5, 8, 5),
        (None, 3, 1, 0),  # a scheduler shows each rank a GPU of its own
        ("6,7", 1, 8, 6),
        (" 4 , 5", 0, 8, 4),
        ("", 2, 4, 2),
        ("0", 3, 1, 0),
    ],
)
def test_launchers_choice_comes_before_what_is_visible_and_that_before_the_local_rank(
    selected: str | None, local_rank: int, visible: int, gpu: int
) -> None:
    environ = {} if selected is None else {"FLAGS_selected_gpus": selected}
    assert chosen_gpu(environ, local_rank, visible) == gpu


@pytest.mark.parametrize(
    ("selected", "local_rank", "visible", "told"),
    [
        (None, 2, 2, "local rank 2 asks for GPU 2, and this process sees 2 .*--nproc_per_node"),
        (None, 0, 0, "local rank 0 asks for GPU 0, and this process sees 0 .*PADDLE_DISTRI_BACKEND=gloo"),
        ("3", 0, 1, "FLAGS_selected_gpus=3 asks for GPU 3, and this process sees 1 .*CUDA_VISIBLE_DEVICES"),
        ("8,0", 0, 8, "FLAGS_selected_gpus=8 asks for GPU 8, and this process sees 8"),
        ("gpu:1", 0, 8, "FLAGS_selected_gpus='gpu:1': it takes GPU numbers, such as 0,1"),
        ("-1", 0, 8, "FLAGS_selected_gpus='-1': it takes GPU numbers"),
    ],
)
def test_gpu_that_is_not_there_is_refused_with_what_asks_for_it(
    selected: str | None, local_rank: int, visible: int, told: str
) -> None:
    environ = {} if selected is None else {"FLAGS_selected_gpus": selected}
    with pytest.raises(ClusterError, match=told):
        chosen_gpu(environ, local_rank, visible)


def cluster(local_rank: int) -> Cluster:
    return Cluster(Cluster.imagined(1, 4).ranks, local_rank)


def test_chosen_gpu_is_paddles_current_one_and_its_flag_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_parallel_env`` would take GPU 0 on every rank where the flag says nothing."""
    current: list[str] = []
    device = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 4), set_device=current.append)
    fake: Any = SimpleNamespace(device=device, CUDAPlace=lambda gpu: ("gpu", gpu))
    monkeypatch.setattr(join_module, "paddle", fake)
    monkeypatch.setattr(join_module, "backend_name", lambda: "nccl")
    for flag, gpu in (("", 2), ("1,3", 1)):
        monkeypatch.setenv("FLAGS_selected_gpus", flag)
        assert choose_place(cluster(2)) == ("gpu", gpu)
        assert (current.pop(), os.environ["FLAGS_selected_gpus"]) == (f"gpu:{gpu}", str(gpu))
    monkeypatch.setenv("FLAGS_selected_gpus", "7")
    with pytest.raises(ClusterError, match="asks for GPU 7"):
        choose_place(cluster(0))
    assert (current, os.environ["FLAGS_selected_gpus"]) == ([], "7")


VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FLAGS_stop_check_timeout", "PADDLE_DISTRI_BACKEND")
PADDLES = ("PADDLE_MASTER", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS")
OTHERS = ("FLEET_TRAIN_ADVICE", "PADDLE_CURRENT_ENDPOINT", "PADDLE_RANK_IN_NODE", "MASTER_ADDR", "MASTER_PORT")
STORE_PORT = 4321


def cluster_of(rank: int, hosts: tuple[str, ...] = ("10.0.0.1", "10.0.0.2")) -> Cluster:
    imagined = Cluster.imagined(len(hosts), 1).ranks
    ranks = tuple(replace(one, host=host) for one, host in zip(imagined, hosts, strict=True))
    return Cluster(ranks, rank)


class Connection:
    """One of the store's; a broadcast answers with what rank 0 says."""

    endpoint = "10.0.0.1:7000/job"

    def __init__(self, world: World, watched: bool) -> None:
        self._world, self._watched = world, watched

    def compare(self, name: str, facts: dict[str, str], *others: Any) -> Any:
        self._world.did.append(f"compare {name}")
        self._world.facts = facts
        assert others == (2, 30.0, "")[: len(others)]
        return self._world.brought

    def broadcast(self, name: str, value: Any, source: int, *_: Any) -> Any:
        self._world.did.append(f"broadcast {name} from {source}: {value}")
        return value or f"10.0.0.1:{STORE_PORT}"

    def barrier(self, name: str, *_: Any) -> None:
        self._world.did.append(f"barrier {name}")

    def set(self, key: str, value: Any) -> None:
        self._world.did.append(f"set {key} to {value}")

    def fail(self, report: dict[str, Any]) -> None:
        self._world.did.append(f"fail: {report['message']}")

    def clock(self) -> float:
        return 0.0

    def leave(self) -> None:
        self._world.did.append("leave")

    def close(self) -> None:
        self._world.did.append(f"close {'store' if self._watched else 'barriers'}")


class World:
    """Everything that joining touches, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "gloo") -> None:
        self.did: list[str] = []
        self.facts: dict[str, str] = {}
        self.brought: Any = []
        self.backend = backend
        self.connections: list[tuple[Any, ...]] = []
        self.refused = False
        for name in (*VARIABLES, *PADDLES, *OTHERS):
            monkeypatch.setenv(name, "")  # what joining sets is taken back
            monkeypatch.delenv(name)
        patched: dict[str, Any] = {
            "backend_name": lambda: self.backend,
            "keep_freed_memory": lambda: self.did.append("keep freed memory"),
            "local_addresses": lambda: ("10.0.0.1", "10.0.0.2"),
            "interface_towards": lambda host: self.did.append(f"route to {host}") or "eth7",
            "has_helper": lambda cluster: cluster.rank == 0,
            "held_port": self._held_port,
            "send_at_once": lambda port: self.did.append(f"send at once to {port}"),
            "warm_up": lambda _, group: self.did.append(f"warm up {group}"),
            "formed": self._formed,
            "choose_place": lambda _: paddle.CPUPlace(),
            "complete": lambda cluster, _: (cluster, None),
            "StoreHost": SimpleNamespace(of=self._host),
        }
        for name, value in patched.items():
            monkeypatch.setattr(join_module, name, value)
        monkeypatch.setattr(StoreClient, "connect", self._connect)
        monkeypatch.setattr(paddle.base.core, "create_or_get_global_tcp_store", self._create)
        monkeypatch.setattr(paddle.distributed, "init_parallel_env", self._form)

    def watch(self, cluster: Cluster, log_dir: Path | None) -> None:
        self.did.append(f"watch node {cluster.this.node_index} and write into {log_dir}")

    def release(self) -> None:
        self.did.append("release the host")

    def _host(self, _: Cluster, seconds: float) -> World:
        self.did.append(f"host the store for {seconds:.0f} s")
        return self

    def _connect(self, endpoint: str, member: int, **options: Any) -> Connection:
        if self.refused and self.connections:
            raise JoinTimeout("rank 1 did not come")
        self.connections.append((endpoint, member, options["watched"], options["timeout_seconds"]))
        return Connection(self, options["watched"])

    @contextmanager
    def _held_port(self) -> Iterator[int]:
        self.did.append("hold a port")
        yield STORE_PORT
        self.did.append("let the port go")

    def _formed(self, _: Any, ranks: range, make: Any) -> Any:
        self.did.append(f"prove ranks {list(ranks)}")
        return make()

    def _create(self) -> None:
        self.did.append(f"store at {os.environ['PADDLE_MASTER']} waits for {os.environ['PADDLE_TRAINERS_NUM']}")

    def _form(self) -> str:
        self.did.append(f"form as {os.environ['PADDLE_TRAINER_ID']} of {os.environ['PADDLE_TRAINERS_NUM']}")
        return "the group"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_rank_0_hosts_the_store_and_opens_paddles_before_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_LOG_DIR", "runs/log")
    job = join(cluster_of(0), 30.0)
    assert world.did == [
        "keep freed memory",
        "host the store for 30 s",
        "watch node 0 and write into runs/log",
        "compare join",
        "route to 10.0.0.2",
        "hold a port",
        f"store at 10.0.0.1:{STORE_PORT} waits for 1",
        f"send at once to {STORE_PORT}",
        "let the port go",
        f"broadcast paddle store from 0: 10.0.0.1:{STORE_PORT}",
        "prove ranks [0, 1]",
        "form as 0 of 2",
        "warm up the group",
        "barrier process group formed",
        "set joined to True",
    ]
    assert [(member, watched, seconds) for _, member, watched, seconds in world.connections] == [
        (0, True, 30.0),
        (0, False, 30.0),
    ]
    assert job.timeout_seconds == 30.0
    job.leave()
    assert world.did[-4:] == ["leave", "close barriers", "close store", "release the host"]


def test_paddle_gets_the_variables_it_needs_and_no_other_master(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")
    monkeypatch.setenv("MASTER_PORT", "1")
    cluster = cluster_of(1)
    join(cluster, 30.0).leave()
    told = {name: os.environ.get(name) for name in (*VARIABLES, "PADDLE_TRAINERS_NUM", "MASTER_ADDR", "MASTER_PORT")}
    assert told == {
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "=eth7",
        "FLAGS_stop_check_timeout": "31",
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINERS_NUM": "2",
        "MASTER_ADDR": None,
        "MASTER_PORT": None,
    }
    assert world.facts == {
        "Paddle version": paddle.__version__,
        "fleet_train version": fleet_train.__version__,
        "backend": "gloo",
        "the steps of --trace": "None",
        "endpoints of all ranks": ",".join(cluster.endpoints),
    }


def test_ranks_that_differ_create_no_group_and_all_get_the_error(world: World) -> None:
    world.brought = [([[0, 0]], {"backend": "gloo"}), ([[1, 1]], {"backend": "nccl"})]
    with pytest.raises(ScheduleMismatch, match=r"backend: .* has gloo, .* has nccl; all ranks must agree"):
        join(cluster_of(0), 30.0)
    assert world.did[3] == "compare join"
    assert "could not join: backend: " in world.did[4]
    assert world.did[5:] == ["close barriers", "close store", "release the host"]


def test_store_that_cannot_be_reached_is_not_hosted_any_longer(world: World) -> None:
    world.refused = True
    with pytest.raises(JoinTimeout):
        join(cluster_of(0), 30.0)
    assert world.did[-1] == "release the host"


@pytest.mark.usefixtures("world")
def test_members_that_paddle_waits_for_are_put_right_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FleetTrainError("address in use")

    monkeypatch.setattr(paddle.base.core, "create_or_get_global_tcp_store", fail)
    with pytest.raises(FleetTrainError, match="address in use"):
        join(cluster_of(0), 30.0)
    assert os.environ["PADDLE_TRAINERS_NUM"] == "2"


def test_what_paddle_cannot_connect_is_no_mistake_and_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("connect: Connection refused")

    monkeypatch.setattr(paddle.distributed, "init_parallel_env", fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(LinkFailed, match=r"^the group of ranks \[0, 1\] could not be formed: connect: Connection ref"):
        join(cluster_of(0), 30.0)
    assert any(one.startswith("fail: the group of ranks [0, 1] could not be formed: ") for one in world.did)


def test_address_of_another_machine_is_refused_before_anybody_is_met(world: World) -> None:
    with pytest.raises(
        ClusterError, match=r"but 10\.0\.0\.9 is not an address of this machine, which has 10\.0\.0\.1, "
    ):
        join(cluster_of(1, ("10.0.0.1", "10.0.0.9")), 30.0)
    assert (world.did, world.connections) == ([], [])
    join(cluster_of(1, ("10.0.0.1", "127.0.3.4")), 30.0).leave()


FACTS = {"Paddle version": "3.3.1", "backend": "gloo"}
NEWER = {"Paddle version": "3.4.0", "backend": "gloo"}


@pytest.mark.parametrize(
    ("brought", "told"),
    [
        (
            [([[0, 0]], FACTS), ([[2, 3]], NEWER), ([[1, 1]], FACTS | {"Paddle version": "3.2"})],
            "Paddle version: {0} has 3.3.1, {2} has 3.4.0 (ranks that also differ: 1, 3); all",
        ),
        ([([[0, 2]], FACTS), ([[3, 3]], FACTS | {"backend": "nccl"})], "backend: {0} has gloo, {3} has nccl; all"),
        ([([[0, 2]], FACTS), ([[3, 3]], None)], "Paddle version: {0} has 3.3.1, {3} has None; all"),
    ],
)
def test_the_first_fact_that_differs_from_rank_0_is_reported_with_all_ranks_that_differ(
    brought: Any, told: str
) -> None:
    cluster = Cluster.imagined(4, 1)
    with pytest.raises(ScheduleMismatch) as raised:
        refuse_other_ranks(brought, cluster)
    assert str(raised.value) == told.format(*map(cluster.describe, range(4))) + " ranks must agree"


@pytest.mark.parametrize(
    ("module", "name", "value", "environ", "told"),
    [
        (util, "find_spec", lambda _: None, {}, r"Paddle is not installed; .* pip install paddlepaddle=="),
        (paddle.framework, "use_pir_api", lambda: False, {}, "Paddle runs its old IR"),
        (paddle, "__version__", "3.3.1", {"FLAGS_enable_pir_api": " FALSE "}, "unset FLAGS_enable_pir_api"),
        (paddle, "static", SimpleNamespace(), {}, r"Paddle .* has no paddle\.static\.register_op"),
    ],
)
def test_paddle_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any, environ: dict[str, str], told: str
) -> None:
    monkeypatch.setattr(module, name, value)
    with pytest.raises(PaddleUnusable, match=told):
        require_paddle(environ)


def test_users_own_interface_and_bound_stay_and_without_a_route_none_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("FLAGS_stop_check_timeout", "900")
    join(cluster_of(0), 30.0).leave()
    assert [os.environ[name] for name in VARIABLES[:3]] == ["ib0", "=eth7", "900"]
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(join_module, "interface_towards", lambda _: None)
    join(cluster_of(0), 30.0).leave()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    world.did.clear()
    world.backend = "nccl"
    monkeypatch.delenv("PADDLE_DISTRI_BACKEND")
    join(cluster_of(1, ("10.0.0.1", "10.0.0.1")), 30.0).leave()
    assert "keep freed memory" not in world.did
    assert "PADDLE_DISTRI_BACKEND" not in os.environ


def test_one_process_joins_alone_and_ranks_of_one_machine_over_its_own_interface(world: World) -> None:
    job = join(cluster_of(0, ("10.0.0.1",)), 30.0)
    assert (job.world_size, world.did, world.connections) == (1, [], [])
    job.leave()
    join(cluster_of(1, ("10.0.0.1", "10.0.0.1")), 30.0).leave()
    assert "route to 10.0.0.1" in world.did
