"""What a launcher makes of its flags, its machine and its environment before any rank starts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleet_train.cli import launch as cli
from fleet_train.cli.on_hosts import FLAGS
from fleet_train.cluster.at_import import advised
from fleet_train.cluster.cluster import Cluster, assign, parse_hosts, parse_nodes
from fleet_train.cluster.environment import SETTINGS, asked_settings
from fleet_train.cluster.store.access import Access
from fleet_train.errors import ClusterError, PaddleUnusable, ProfileError
from fleet_train.launch import prepare
from fleet_train.launch.node import (
    LaunchEnvironment,
    Machine,
    Node,
    build_environment,
    choose_interface,
    choose_node,
    choose_processes,
    place,
    variables_of_rank,
    visible_gpus,
)
from fleet_train.launch.request import FaultPolicy, LaunchRequest, parse_devices

CPU = Machine({"lo": ("127.0.0.1",), "eth0": ("10.0.0.1", "10.9.0.1")}, 8, False, None, {})


def asked(**flags: object) -> LaunchRequest:
    return LaunchRequest(command=("train.py",), **flags)  # type: ignore[arg-type]


def test_a_node_is_placed_by_its_flags_or_its_only_listed_address() -> None:
    assert place(asked(), CPU) == Node(("127.0.0.1",), 0, 6170, 1, None, "lo")
    node = place(asked(hosts=("127.0.0.2", "127.0.0.3"), node_host="127.0.0.3", processes_per_node=2), CPU)
    assert node == Node(("127.0.0.2", "127.0.0.3"), 1, 6170, 2, None, "lo")
    assert (node.world_size, list(node.ranks), node.store_endpoint) == (4, [2, 3], "127.0.0.2:6172")
    assert choose_node(("10.0.0.7", "10.0.0.1"), ("10.0.0.7", "10.0.0.1"), None, CPU.addresses) == 1


@pytest.mark.parametrize(
    ("hosts", "node_host", "said"),
    [
        (("10.0.0.7", "10.0.0.8"), None, "none of them is its own .this machine has 127.0.0.1, 10.0.0.1, 10.9.0.1"),
        (("127.0.0.2", "127.0.0.3"), None, "127.0.0.2, 127.0.0.3 of them are its own"),
        (("10.0.0.7", "10.0.0.8"), "10.0.0.7", "is not an address of this machine: this machine has 127.0.0.1, 10.0"),
        (("10.0.0.7", "10.0.0.8"), "10.0.0.1", "--node_ip=10.0.0.1 is not among --cluster_node_ips=10.0.0.7,10.0.0.8"),
        (("10.0.0.1", "127.0.0.1"), "10.0.0.1", "127.0.0.1 means another machine on every node"),
        (("10.0.0.1", "127.0.0.5"), "10.0.0.1", "can be reached from this machine only"),
        (("10.0.0.1", "010.0.0.1"), "10.0.0.1", "not an IPv4 address"),
        (("10.0.0.1", "fe80::1"), "10.0.0.1", "IPv6"),
    ],
)
def test_wrong_addresses_say_what_this_machine_has(hosts: tuple[str, ...], node_host: str | None, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        place(asked(hosts=hosts, node_host=node_host), CPU)


def test_ports_outside_the_range_are_refused_and_a_pod_has_one_for_every_process() -> None:
    for port in (0, -1, 65535, 70000):
        with pytest.raises(ClusterError, match=f"--started_port={port}"):
            place(asked(started_port=port), CPU)
    assert place(asked(ports_per_node=2, processes_per_node=2), CPU).processes == 2
    with pytest.raises(ClusterError, match="TRAINER_PORTS_NUM=2 is too few for 3 processes"):
        place(asked(ports_per_node=2, processes_per_node=3), CPU)


@pytest.mark.parametrize(
    ("selected", "number", "gpus", "expected"),
    [
        (None, None, None, (1, None)),
        (("0", "1"), None, None, (2, None)),  # a CPU build: that many processes
        (("4", "5"), 2, None, (2, None)),
        (None, 3, None, (3, None)),
        (None, None, ("0", "1"), (2, ("0", "1"))),
        (("1",), None, ("0", "1"), (1, ("1",))),
        (None, 1, ("2", "3"), (1, ("2",))),
        (None, 2, (), (2, None)),  # a GPU build on a machine without GPUs
    ],
)
def test_processes_and_devices(
    selected: tuple[str, ...] | None, number: int | None, gpus: tuple[str, ...] | None, expected: object
) -> None:
    assert choose_processes(selected, number, gpus) == expected


@pytest.mark.parametrize(
    ("selected", "number", "gpus", "said"),
    [
        (("0", "1"), 3, None, "names 2 devices, but --nproc_per_node=3"),
        (None, 0, None, "at least 1 process"),
        (("0", "2"), None, ("0", "1"), "the visible GPUs are 0,1"),
        (None, 3, ("0", "1"), "--nproc_per_node=3: the visible GPUs are 0,1"),
        (("0",), None, (), "no visible GPU; to train on its processors use --nproc_per_node=1"),
    ],
)
def test_devices_that_do_not_exist_are_refused(
    selected: tuple[str, ...] | None, number: int | None, gpus: tuple[str, ...] | None, said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        choose_processes(selected, number, gpus)


def test_the_interface_is_that_of_the_route_to_the_others() -> None:
    routes: dict[str, str | None] = {"10.0.0.2": "eth0", "10.0.0.3": "eth0", "172.16.0.1": "lo", "192.0.2.9": None}
    nodes = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert choose_interface(nodes, 0, CPU, routes.__getitem__) == "eth0"
    assert choose_interface(("10.0.0.1", "10.0.0.2", "172.16.0.1"), 0, CPU, routes.__getitem__) == "eth0"
    assert choose_interface(("10.0.0.1", "192.0.2.9"), 0, CPU, routes.__getitem__) == "eth0"
    assert choose_interface(("127.0.0.1",), 0, CPU, routes.__getitem__) == "lo"


def test_with_fewer_nodes_ranks_are_renumbered_and_nodes_keep_their_numbers() -> None:
    node = Node(("10.0.0.1", "10.0.0.2", "10.0.0.3"), 2, 6170, 2, None, "eth0")
    fewer = node.among((0, 2))
    assert (fewer.addresses, fewer.index, list(fewer.ranks), fewer.world_size) == (
        ("10.0.0.1", "10.0.0.3"), 1, [2, 3], 4,
    )  # fmt: skip
    assert fewer.describe() == "node 2 (10.0.0.3)"
    assert fewer.store_endpoint == node.store_endpoint


AMD = Machine({"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)}, 8, True, None, {})


def test_a_container_in_a_network_of_its_own_is_told_so() -> None:
    hosts, bridge = ("10.0.0.1", "10.0.0.2"), ("127.0.0.1", "172.17.0.2")
    for asked, said in [
        (None, "none of them is its own (this machine has 127.0.0.1, 172.17.0.2); this is a container (Docker), which"),
        (
            "10.0.0.2",
            "--node_ip=10.0.0.2 is not an address of this machine: this machine has 127.0.0.1, 172.17.0.2; this",
        ),
        ("172.17.0.2", "is not among --cluster_node_ips=10.0.0.1,10.0.0.2"),
    ]:
        with pytest.raises(ClusterError, match=re.escape(said)) as refusal:
            choose_node(hosts, hosts, asked, bridge, "Docker")
        assert "docker run --network=host" in str(refusal.value)
    with pytest.raises(ClusterError, match=r"are its own .*; add --node_ip=") as refusal:
        choose_node(hosts, hosts, None, hosts, "Docker")


def test_nodes_with_unlike_numbers_of_processes_have_ranks_in_the_order_of_the_list() -> None:
    hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    node = place(asked(hosts=hosts, counts=(None, 2, None), node_host="127.0.0.3"), CPU)
    assert node == Node(hosts, 1, 6170, 2, None, "lo", counts=(1, 2, 1))
    assert node.world_size == 4
    assert [list(node.ranks_of(index)) for index in range(3)] == [[0], [1, 2], [3]]
    assert [node.node_of(rank) for rank in range(5)] == [0, 1, 1, 2, 3]
    assert node.cluster(3).endpoints == ["127.0.0.2:6170", "127.0.0.3:6170", "127.0.0.3:6171", "127.0.0.4:6170"]
    assert [node.endpoint_of(rank) for rank in range(4)] == node.cluster(3).endpoints
    assert [node.store_of(index) for index in range(3)] == ["127.0.0.2:6171", "127.0.0.3:6172", "127.0.0.4:6171"]
    left = node.among((0, 1))  # the third machine is lost
    assert (left.counts, left.world_size, left.ranks, left.describe(0)) == (
        (1, 2),
        3,
        range(1, 3),
        "node 0 (127.0.0.2)",
    )
    variables = prepare.variables_of_rank(node.cluster(2), None)
    wanted = "TRAINER_ID TRAINERS_NUM NNODES LOCAL_SIZE LOCAL_RANK GLOBAL_RANK GLOBAL_SIZE RANK_IN_NODE".split()
    assert [variables[f"PADDLE_{name}"] for name in wanted] == ["2", "4", "3", "2", "1", "2", "4", "1"]
    assert place(asked(hosts=hosts, counts=(2, 2, 2), node_host="127.0.0.3"), CPU).counts == ()  # as --nproc_per_node=2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"counts": (1, 2), "processes_per_node": 1}, "gives 127.0.0.3:2; leave --nproc_per_node out"),
        ({"counts": (1, 2), "selected_gpus": ("0",)}, "names 1 devices, but --cluster_node_ips gives 127.0.0.3:2"),
        ({"counts": (1, 3)}, "gives 127.0.0.3:3: the visible GPUs are 0,1"),
        ({"counts": (1, None)}, "none to 127.0.0.3, which has 2 visible GPUs; write 127.0.0.3:2, or fewer"),
    ],
)
def test_a_number_in_the_node_list_that_something_contradicts_is_refused(given: dict[str, object], said: str) -> None:
    two_gpus = replace(CPU, gpus=("0", "1"))
    with pytest.raises(ClusterError, match=re.escape(said)):
        place(asked(hosts=("127.0.0.2", "127.0.0.3"), node_host="127.0.0.3", **given), two_gpus)


def test_a_node_without_a_number_in_the_list_has_nproc_per_node_or_one() -> None:
    def counts(**given: object) -> tuple[int, ...]:
        return place(asked(hosts=("127.0.0.2", "127.0.0.3"), node_host="127.0.0.3", **given), CPU).every_count

    assert counts(counts=(None, 2)) == (1, 2)
    assert counts(counts=(None, 2), processes_per_node=4) == (4, 2)
    assert counts(counts=(3, 2), processes_per_node=2) == (3, 2)
    assert counts(counts=(3, 2), selected_gpus=("0", "1")) == (3, 2)


TWO_NODES = Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 2, None, "eth0")
GPU_NODE = Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 2, ("0", "1"), "eth0")


def built(node: Node, environ: dict[str, str], settings: tuple[str, ...] = (), **asked: Any) -> LaunchEnvironment:
    request = LaunchRequest(("train.py",), settings=settings)
    return build_environment(node, AMD, environ, request, **{"profile": {}, **asked})


def test_what_a_cpu_node_sets() -> None:
    advice = {
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "FLAGS_new_executor_serial_run": "1",
        "FLAGS_new_executor_sequential_run": "1",
        "MKL_DEBUG_CPU_TYPE": "5",
    }
    ours = dict(built(TWO_NODES, {}).ours)
    assert json.loads(ours.pop("FLEET_TRAIN_ADVICE")) == advice
    assert ours == {
        **advice,
        "FLEET_TRAIN_STORE": "10.0.0.1:6172",
        "FLEET_TRAIN_JOIN_TIMEOUT": "300",
    }
    emulated = Node(("127.0.0.2", "127.0.0.3"), 0, 6170, 2, None, "lo")
    assert built(emulated, {}).ours["OMP_NUM_THREADS"] == "2", "they share the processors"


def test_a_gpu_node_gets_no_processor_settings_and_keeps_its_visible_devices() -> None:
    environment = built(GPU_NODE, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "MKL_DEBUG_CPU_TYPE" not in environment.ours
    assert "MKL_DEBUG_CPU_TYPE" not in environment.ours
    assert environment.over({"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_users_environment_wins_over_the_profile_and_over_advice() -> None:
    users = {"NCCL_IB_DISABLE": "0", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}
    environment = built(TWO_NODES, users, profile={"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO", "X": "y"})
    assert environment.kept == ("NCCL_IB_DISABLE",)
    result = environment.over(users)
    assert (result["NCCL_IB_DISABLE"], result["OMP_NUM_THREADS"], result["X"]) == ("0", "3", "y")


def test_whatever_a_launcher_sets_for_paddle_gives_way_to_a_script_but_not_what_the_user_has_set() -> None:
    users, profile = {"OMP_NUM_THREADS": "3"}, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}
    environment = built(TWO_NODES, users, profile=profile, strategy="mine")
    outer = environment.over(users)
    assert advised(outer) == {name for name in environment.ours if not name.startswith("FLEET_TRAIN_")}
    assert profile.keys() < advised(outer)
    assert (outer["GLOO_SOCKET_IFNAME"], outer["OMP_NUM_THREADS"]) == ("eth1", "3")
    outer["MKL_DEBUG_CPU_TYPE"] = "4"  # by the script that starts the inner job
    inner = built(TWO_NODES, outer, profile={"NCCL_SOCKET_IFNAME": "eth2"})
    assert inner.kept == ()
    result = inner.over(outer)
    assert (result["NCCL_SOCKET_IFNAME"], result["MKL_DEBUG_CPU_TYPE"], result["OMP_NUM_THREADS"]) == ("eth2", "4", "3")
    assert "NCCL_DEBUG" not in result, "the inner job has a profile of its own"
    assert advised(result) == {
        "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FLAGS_new_executor_serial_run", "FLAGS_new_executor_sequential_run"
    }  # fmt: skip
    for nonsense in ("", "{", "[]", '{"HOME": 1}'):
        assert advised({"FLEET_TRAIN_ADVICE": nonsense, "HOME": "/"}) == frozenset()


def test_what_an_outer_job_left_behind_is_taken_out() -> None:
    left = {"PADDLE_MASTER": "a:1", "POD_IP": "b", "PADDLE_TRAINER_ID": "7", "FLAGS_selected_gpus": "3"}
    left["FLEET_TRAIN_STRATEGY"] = "old"
    users = {"PADDLE_PG_TIMEOUT": "5", "CUDA_VISIBLE_DEVICES": "", "HOME": "/root", "FLAGS_enable_pir_api": "1"}
    environment = built(TWO_NODES, {**left, **users})
    result = environment.over({**left, **users})
    assert environment.removed == frozenset(left)
    assert not left.keys() & result.keys()
    assert users.items() <= result.items()


def test_a_profile_cannot_set_what_only_the_launcher_knows() -> None:
    with pytest.raises(ProfileError, match="PADDLE_TRAINER_ID is set by the launcher"):
        built(TWO_NODES, {}, profile={"PADDLE_TRAINER_ID": "0"})


def test_the_import_path_is_added_and_the_users_path_is_not_shown() -> None:
    asked = {"strategy": "multi_node", "import_path": Path("/checkout")}
    environment = built(TWO_NODES, {"PYTHONPATH": "/secret/place"}, **asked)
    assert environment.over({"PYTHONPATH": "/secret/place"})["PYTHONPATH"] == "/secret/place:/checkout"
    assert environment.over({})["PYTHONPATH"] == "/checkout"
    assert environment.shown()["PYTHONPATH"] == "...:/checkout"
    assert environment.ours["FLEET_TRAIN_STRATEGY"] == "multi_node"


def test_settings_reach_the_ranks_and_a_variables_value_is_not_shown() -> None:
    asked = {"profile": {"TOKEN": "abc"}, "hidden": frozenset({"TOKEN", SETTINGS})}
    environment = built(TWO_NODES, {SETTINGS: "an outer job's"}, ("a=1",), **asked)
    ours = environment.over({SETTINGS: "an outer job's"})
    assert asked_settings(ours) == ("a=1",)
    assert (environment.shown()[SETTINGS], environment.shown()["TOKEN"]) == ("(set)", "(set)")


def test_a_rank_gets_the_variables_of_paddles_own_launcher() -> None:
    endpoints = [f"10.0.0.{node}:{port}" for node in (1, 2) for port in (6170, 6171)]
    rank_3 = Cluster(assign(TWO_NODES.addresses, 2, 6170), 3)
    common = {
        "PADDLE_MASTER": endpoints[0],
        "PADDLE_GLOBAL_SIZE": "4",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_GLOBAL_RANK": "3",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_NNODES": "2",
        "PADDLE_CURRENT_ENDPOINT": endpoints[3],
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_AUTO_CLUSTER": "0",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }
    assert variables_of_rank(rank_3, None) == common | {"PADDLE_DISTRI_BACKEND": "gloo"}
    assert variables_of_rank(rank_3, 0) == common | {"FLAGS_selected_gpus": "0"}


def machine(paddle: str = "3.3.1 (paddlepaddle)") -> Machine:
    versions = {"python": "3.11.2", "fleet_train": "0.1.0", "paddle": paddle}
    return Machine({"lo": ("127.0.0.1",)}, 4, False, None, versions)


def test_what_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(ClusterError, match=r"the training script .* cannot be used: "):
            prepare.check_program(LaunchRequest((name,)))
        with pytest.raises(ClusterError, match=r"--log_dir=.* cannot be used: "):
            prepare.check_log_dir(Path(name))
    prepare.check_log_dir(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="file is not a writable folder"):
        prepare.check_log_dir(tmp_path / "file" / "log")
    with pytest.raises(ClusterError, match=r"^--record=.*file is not a writable folder"):
        prepare.check_log_dir(tmp_path / "file" / "log", "--record")
    with pytest.raises(PaddleUnusable, match=r"Paddle is not installed for .*pip install paddlepaddle"):
        prepare.check_paddle(machine("not installed"), None)


def test_a_script_or_module_must_exist(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    prepare.check_program(LaunchRequest((str(tmp_path / "train.py"),)))
    with pytest.raises(ClusterError, match=r"trian.py does not exist; did you mean .*/train.py\?"):
        prepare.check_program(LaunchRequest((str(tmp_path / "trian.py"),)))
    with pytest.raises(ClusterError, match="is a folder"):
        prepare.check_program(LaunchRequest((str(tmp_path),)))
    prepare.check_program(LaunchRequest(("json.tool",), is_module=True))
    with pytest.raises(ClusterError, match="-m no_such_thing: there is no such module"):
        prepare.check_program(LaunchRequest(("no_such_thing",), is_module=True))


def launch_of(node: Node, visible_gpus: tuple[str, ...] | None = None, *, is_module: bool = False) -> prepare.Launch:
    environment = LaunchEnvironment({"X": "y"}, frozenset(), ())
    access = Access("job", None, "10.0.0.2")
    asked = LaunchRequest(("train.py", "--a", "--", "x y"), is_module)
    return prepare.Launch(asked, node, Path("/logs"), None, environment, {}, access, visible_gpus=visible_gpus)


def test_every_rank_runs_the_script_with_its_own_environment() -> None:
    launch = launch_of(Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0"))
    assert launch.command() == [sys.executable, "-u", "train.py", "--a", "--", "x y"]
    environ = launch.environ_of("10.0.0.1:6172/1", 1, "abc", {"HOME": "/root"})
    assert [launch.variables_of(local)["PADDLE_TRAINER_ID"] for local in (0, 1)] == ["2", "3"]
    assert launch.variables_of(0)["PADDLE_LOG_DIR"] == "/logs"
    told = {"FLEET_TRAIN_STORE": "10.0.0.1:6172/1", "FLEET_TRAIN_ATTEMPT": "1", "FLEET_TRAIN_LAUNCHED": "abc"}
    assert environ == {**told, "HOME": "/root", "X": "y"}
    # a device is selected by its position among the visible ones
    launch = launch_of(Node(("10.0.0.1",), 0, 6170, 2, ("0", "5"), "eth0"), ("5", "2", "0"), is_module=True)
    assert launch.command()[:4] == [sys.executable, "-u", "-m", "train.py"]
    assert [launch.variables_of(local)["FLAGS_selected_gpus"] for local in (0, 1)] == ["2", "0"]


def test_a_strategy_file_is_passed_on_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\ndescription: for a test\n")
    monkeypatch.chdir(tmp_path)
    assert prepare.load_strategy("./mine.yaml")[0] == str(tmp_path / "mine.yaml")
    assert prepare.load_strategy("multi_node")[0] == "multi_node"
    assert prepare.load_strategy(None) == (None, None)
    with pytest.raises(ProfileError):
        prepare.load_strategy("no_such_profile")


def test_facts_are_what_must_be_equal_everywhere() -> None:
    node = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")
    assert prepare.facts_of(node, machine(), None, asked()) == {
        "the node list": "10.0.0.1,10.0.0.2",
        "the number of processes per node (--nproc_per_node)": 2,
        "--started_port": 6170,
        "--strategy": "none",
        "--set": "none",
        "--max_restarts": 0,
        "--min_nodes": 2,
        "--direct_ranks": 32,
        "--strict": False,
        "--verify_joint_batch": 0,
        "--trace": "none",
        "the kind of device": "CPU",
        "the Python version": "3.11",
        "the fleet_train version": "0.1.0",
        "the Paddle version": "3.3.1 (paddlepaddle)",
    }


def test_gpus_are_those_that_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 0"}, tmp_path) == ("2", "0")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (FaultPolicy(3, min_nodes=3), "--min_nodes=3: the job has 2 nodes"),
        (FaultPolicy(3, min_nodes=0), "--min_nodes=0: the job has 2 nodes"),
        (FaultPolicy(0, min_nodes=1), "--min_nodes has no effect without restarts"),
        (FaultPolicy(0, rejoin_timeout_seconds=5.0), "--rejoin_timeout has no effect without restarts"),
        (FaultPolicy(0, spares="1"), "--spares=1 has no effect without restarts"),
    ],
)
def test_flags_about_faults_that_make_no_sense_are_refused(faults: FaultPolicy, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        prepare.check_faults(faults, Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 1, None, "eth0"))


# the flags, as they are typed


def read(*arguments: str) -> LaunchRequest:
    """What the command line makes of these words."""
    context = cli.command.make_context("launch", list(arguments))
    flags: dict[str, Any] = {name: value for name, value in context.params.items() if name not in {"dry_run", *FLAGS}}
    return cli.read_request(**flags)


def test_the_old_recipe_word_for_word() -> None:
    assert read(
        "--cluster_node_ips=192.168.1.2,192.168.1.3", "--node_ip=192.168.1.2", "--started_port=6170",
        "--selected_gpus=0,1,2,3", "--log_dir", "mylog", "train.py", "--model=ResNet50", "--data_dir=./ImageNet",
    ) == LaunchRequest(
        command=("train.py", "--model=ResNet50", "--data_dir=./ImageNet"),
        hosts=("192.168.1.2", "192.168.1.3"),
        node_host="192.168.1.2",
        started_port=6170,
        selected_gpus=("0", "1", "2", "3"),
        log_dir=Path("mylog"),
    )  # fmt: skip


def test_todays_spelling_means_the_same() -> None:
    old = read("--cluster_node_ips", "a,b", "--node_ip", "a", "--started_port", "7000", "--selected_gpus", "0", "t.py")
    assert read("--ips=a,b", "--host=a", "--start_port=7000", "--devices=0", "t.py") == old
    assert read("--ips", "a,b", "--host", "a", "--start-port", "7000", "--gpus", "0", "t.py") == old


def test_flags_behind_the_script_or_module_belong_to_it() -> None:
    request = read("--nproc_per_node=2", "train.py", "--nproc_per_node=9", "--help", "--", "-m")
    assert request.processes_per_node == 2
    assert request.command == ("train.py", "--nproc_per_node=9", "--help", "--", "-m")
    request = read("-m", "fleet_train", "train", "--epochs", "3")
    assert (request.is_module, request.command) == (True, ("fleet_train", "train", "--epochs", "3"))


def test_what_to_do_about_faults_and_defaults() -> None:
    flags = "--max_restarts=3 --min_nodes 2 --rejoin-timeout=60 --lost_node_timeout=10 --grace_seconds=45".split()
    assert read(*flags, "train.py").faults == FaultPolicy(3, 2, 60.0, 10.0, 45.0)
    assert read("train.py") == LaunchRequest(command=("train.py",))
    assert (LaunchRequest(("x",)).first_port, LaunchRequest(("x",)).join_timeout_seconds) == (6170, 300.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc_per_nodes=2", "train.py"], "--nproc_per_node"),
        (["--cluster_node_ip=a", "train.py"], "--cluster_node_ips"),
        (["--master=a:1", "train.py"], "the nodes are given by --cluster_node_ips"),
        (["--nnodes", "2", "train.py"], "several are listed, and meet at the first one: --cluster_node_ips=A,B"),
        (["--max_restart=3", "train.py"], "it is --max_restarts here"),
        (["--elastic_timeout=3", "train.py"], "--rejoin_timeout"),
        (["--max_restarts=-1", "train.py"], "max_restarts"),
        (["--join_timeout=-1", "train.py"], "join_timeout"),
        (["--nproc_per_node=two", "train.py"], "nproc_per_node"),
        ([], "SCRIPT"),
    ],
)
def test_unknown_flags_end_with_2_and_a_hint(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.command, arguments)
    assert result.exit_code == 2
    assert said in result.output


SECONDS = ("--join_timeout", "--rejoin_timeout", "--lost_node_timeout", "--grace_seconds")


@pytest.mark.parametrize("flag", SECONDS)
@pytest.mark.parametrize(
    "value",
    ["nan", "inf", "-inf", "Infinity", "-1", "1e400", "1e9", "1_000", "\uff11\uff12", "", " 5", "0x10", "5\x1b[31m"],
)
def test_seconds_are_finite_decimal_and_bounded(flag: str, value: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        read(f"{flag}={value}", "train.py")
    assert f"'{flag}'" in caught.value.format_message()
    assert caught.value.format_message().isprintable()


@pytest.mark.parametrize("flag", ["--started_port", "--nproc_per_node", "--max_restarts", "--min_nodes"])
@pytest.mark.parametrize(
    "value", ["\uff16\uff11\uff17\uff10", "\u0661", "\u00b2", "6_170", "1e3", "0x10", " 1", "", "9" * 5000]
)
def test_whole_numbers_are_of_the_digits_0_to_9(flag: str, value: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        read(f"{flag}={value}", "train.py")
    assert "is not a whole number of up to 18 digits" in caught.value.format_message()
    assert len(caught.value.format_message()) < 200


def test_numbers_that_are_right_are_read() -> None:
    request = read("--join_timeout=1.5e2", "--started_port=06170", "--grace_seconds=+.5", "train.py")
    assert (request.join_timeout_seconds, request.started_port, request.faults.grace_seconds) == (150.0, 6170, 0.5)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_hosts, "10.0.0.1,", "a comma with no address on one side"),
        (parse_hosts, "", "a comma with no address on one side"),
        (parse_hosts, "10.0.0.1,10.0.0.2,10.0.0.1", "10.0.0.1 is listed more than once"),
        (parse_hosts, "10.0.0.1:2", "it takes addresses only"),
        (parse_nodes, "10.0.0.1:6170,10.0.0.2:6170", "10.0.0.1:6170 is not an address with its number of processes"),
        (parse_nodes, "10.0.0.1:0", "of 1 to 1000; ports come from --started_port"),
        (parse_nodes, "10.0.0.1:two", "10.0.0.1:two is not an address with"),
        (parse_nodes, "[fd00::1]:", "such as 10.0.0.2:2, of"),
        (parse_nodes, "10.0.0.1,10.0.0.1:2", "written behind it: A,B:2"),
        (parse_devices, "0,x", "'x' is not a device number"),
        (parse_devices, "0,,1", "'' is not"),
        (parse_devices, "1,1", "more than once"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(parse: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse(text)
    assert parse_hosts("10.0.0.1, node-b,10.0.0.3") == ("10.0.0.1", "node-b", "10.0.0.3")
    assert parse_nodes("10.0.0.1,node-b") == (("10.0.0.1", "node-b"), ())
    assert parse_nodes("10.0.0.1, node-b:2") == (("10.0.0.1", "node-b"), (None, 2))
    assert parse_nodes("[fd00::1]:2,fd00::2,[fd00::3]") == (("fd00::1", "fd00::2", "fd00::3"), (2, None, None))
    assert parse_devices("3, 01") == ("3", "1")
