from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_train.cluster.cluster import Cluster, assign
from fleet_train.cluster.environment import SETTINGS, asked_settings
from fleet_train.errors import ProfileError
from fleet_train.launch.node import LaunchEnvironment, Machine, Node, build_environment, variables_of_rank

CPU = Machine({"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)}, 8, True, None, {})
TWO_NODES = Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 2, None, "eth0")
GPU_NODE = Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 2, ("0", "1"), "eth0")


def built(node: Node, environ: dict[str, str], **asked: Any) -> LaunchEnvironment:
    return build_environment(node, CPU, environ, **{"profile": {}, "join_timeout_seconds": 300.0, **asked})


def test_what_a_cpu_node_sets() -> None:
    assert built(TWO_NODES, {}).ours == {
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "FLAGS_new_executor_serial_run": "1",
        "FLAGS_new_executor_sequential_run": "1",
        "MKL_DEBUG_CPU_TYPE": "5",
        "FLEET_TRAIN_STORE": "10.0.0.1:6172",
        "FLEET_TRAIN_JOIN_TIMEOUT": "300",
    }


def test_a_gpu_node_gets_no_processor_settings_and_keeps_its_visible_devices() -> None:
    environment = built(GPU_NODE, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "FLAGS_new_executor_serial_run" not in environment.ours
    assert "MKL_DEBUG_CPU_TYPE" not in environment.ours
    assert environment.over({"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_emulated_nodes_share_the_processors() -> None:
    node = Node(("127.0.0.2", "127.0.0.3"), 0, 6170, 2, None, "lo")
    assert built(node, {}).ours["OMP_NUM_THREADS"] == "2"


def test_the_users_environment_wins_over_the_profile_and_over_advice() -> None:
    users = {"NCCL_IB_DISABLE": "0", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}
    environment = built(TWO_NODES, users, profile={"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO", "X": "y"})
    assert environment.kept == ("NCCL_IB_DISABLE",)
    result = environment.over(users)
    assert (result["NCCL_IB_DISABLE"], result["OMP_NUM_THREADS"], result["X"]) == ("0", "3", "y")


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
    asked = {"profile": {"TOKEN": "abc"}, "hidden": frozenset({"TOKEN", SETTINGS}), "settings": ("a=1",)}
    environment = built(TWO_NODES, {SETTINGS: "an outer job's"}, **asked)
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
    assert variables_of_rank(rank_3, on_gpu=False) == common | {"PADDLE_DISTRI_BACKEND": "gloo"}
    assert variables_of_rank(rank_3, on_gpu=True, selected_gpu=0) == common | {"FLAGS_selected_gpus": "0"}
