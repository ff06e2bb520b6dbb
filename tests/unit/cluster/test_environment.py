from __future__ import annotations

import pytest

from fleet_train.cluster.environment import (
    SETTINGS,
    ask_here,
    asked_settings,
    asked_strategy,
    attempt,
    cluster_from_environ,
    is_strict,
    join_timeout_seconds,
    rank_variables,
)
from fleet_train.errors import ClusterError

OLD_COMMAND = (
    "python -m paddle.distributed.launch --cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 "
    "--started_port=6170 --selected_gpus=0 --log_dir mylog train.py --lr 0.1"
).split()
# What the stock launcher's compatible mode tells each of its processes: a job of this machine alone.
LONELY = {
    "PADDLE_TRAINER_ID": "0",
    "PADDLE_RANK_IN_NODE": "0",
    "PADDLE_TRAINERS_NUM": "1",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:33403",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:33403",
}
MODERN = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_NNODES": "2",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6070",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6070,10.0.0.1:6071,10.0.0.2:6070,10.0.0.2:6071",
}


def test_no_launcher_is_one_process() -> None:
    assert cluster_from_environ({}).world_size == 1


def test_old_command_is_recovered_from_the_launchers_arguments() -> None:
    cluster = cluster_from_environ(LONELY, OLD_COMMAND)
    assert cluster.endpoints == ["10.0.0.1:6170", "10.0.0.2:6170"]
    assert (cluster.rank, cluster.node_num, cluster.local_rank) == (1, 2, 0)


def test_old_command_with_two_local_processes() -> None:
    command = [word.replace("--selected_gpus=0", "--nproc_per_node=2") for word in OLD_COMMAND]
    environ = {**LONELY, "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1", "PADDLE_RANK_IN_NODE": "1"}
    cluster = cluster_from_environ(environ, command)
    assert (cluster.rank, cluster.world_size, cluster.this.endpoint) == (3, 4, "10.0.0.2:6171")


def test_fewer_processes_than_selected_gpus_gives_the_command_that_works() -> None:
    command = [word.replace("--selected_gpus=0", "--selected_gpus=0,1") for word in OLD_COMMAND]
    with pytest.raises(ClusterError) as caught:
        cluster_from_environ(LONELY, command)
    assert "asked for 2 processes on this machine and started 1" in str(caught.value)
    assert str(caught.value).endswith(
        "python -m fleet_train launch --cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 "
        "--started_port=6170 --nproc_per_node=2 train.py --lr 0.1"
    )


def test_node_ip_outside_the_list_is_refused() -> None:
    command = [word.replace("--node_ip=10.0.0.2", "--node_ip=10.0.0.9") for word in OLD_COMMAND]
    with pytest.raises(ClusterError, match=r"--node_ip=10\.0\.0\.9 is not one of --cluster_node_ips=10"):
        cluster_from_environ(LONELY, command)


def test_typo_that_sent_the_stock_launcher_into_compatible_mode_is_named() -> None:
    command = "python -m paddle.distributed.launch --nproc_per_nodes=2 train.py".split()
    with pytest.raises(ClusterError, match="does not know '--nproc_per_nodes'; did you mean '--nproc_per_node'"):
        cluster_from_environ(LONELY, command)


def test_flags_of_the_script_are_not_the_launchers() -> None:
    command = "python -m paddle.distributed.launch --nproc_per_node 1 train.py --cluster_node_ips=a,b".split()
    assert cluster_from_environ(LONELY, command).world_size == 1


def test_modern_variables() -> None:
    cluster = cluster_from_environ(MODERN)
    assert (cluster.rank, cluster.world_size, cluster.node_num, cluster.local_rank) == (2, 4, 2, 0)


def test_count_that_contradicts_the_endpoints_is_refused() -> None:
    with pytest.raises(ClusterError, match="PADDLE_TRAINERS_NUM=3, but PADDLE_TRAINER_ENDPOINTS lists 4"):
        cluster_from_environ({**MODERN, "PADDLE_TRAINERS_NUM": "3"})


def test_endpoint_of_another_rank_is_refused() -> None:
    with pytest.raises(ClusterError, match="PADDLE_CURRENT_ENDPOINT=10"):
        cluster_from_environ({**MODERN, "PADDLE_TRAINER_ID": "0"})


def test_several_processes_without_endpoints_is_refused() -> None:
    with pytest.raises(ClusterError, match="PADDLE_TRAINER_ENDPOINTS, which says where they are, is not set"):
        cluster_from_environ({"PADDLE_TRAINERS_NUM": "2"})


def test_paddlecloud_pod() -> None:
    command = "python -m paddle.distributed.launch --use_paddlecloud train.py".split()
    pod = {
        "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
        "POD_IP": "10.0.0.2",
        "PADDLE_PORT": "7000",
    }
    # The stock launcher's own variables describe its lonely job: rank 0, whichever pod this is.
    cluster = cluster_from_environ({**LONELY, **pod}, command)
    assert (cluster.rank, cluster.endpoints) == (1, ["10.0.0.1:7000", "10.0.0.2:7000"])


def test_paddlecloud_with_fewer_ports_than_processes_is_refused() -> None:
    command = "python -m paddle.distributed.launch --use_paddlecloud train.py".split()
    pod = {"PADDLE_TRAINERS": "10.0.0.1", "POD_IP": "10.0.0.1", "TRAINER_PORTS_NUM": "1", "PADDLE_TRAINERS_NUM": "2"}
    with pytest.raises(ClusterError, match="TRAINER_PORTS_NUM=1 is too few for 2 processes"):
        cluster_from_environ(pod, command)


def test_paddlecloud_without_pod_ip_names_the_variable() -> None:
    command = "python -m paddle.distributed.launch --use_paddlecloud train.py".split()
    with pytest.raises(ClusterError, match="the variable POD_IP is not set"):
        cluster_from_environ({"PADDLE_TRAINERS": "10.0.0.1,10.0.0.2"}, command)


def test_join_timeout_must_be_a_positive_number() -> None:
    assert join_timeout_seconds({}) == 300.0
    assert join_timeout_seconds({"FLEET_TRAIN_JOIN_TIMEOUT": "2.5"}) == 2.5
    with pytest.raises(ClusterError, match="FLEET_TRAIN_JOIN_TIMEOUT='-1'"):
        join_timeout_seconds({"FLEET_TRAIN_JOIN_TIMEOUT": "-1"})


def test_strictness_is_on_or_off() -> None:
    assert [is_strict(environ) for environ in ({}, {"FLEET_TRAIN_STRICT": "0"}, {"FLEET_TRAIN_STRICT": "1"})] == [
        0,
        0,
        1,
    ]
    with pytest.raises(ClusterError, match="FLEET_TRAIN_STRICT='yes' is not 1"):
        is_strict({"FLEET_TRAIN_STRICT": "yes"})


def test_rank_variables_describe_the_same_cluster_again() -> None:
    cluster = cluster_from_environ(LONELY, OLD_COMMAND)
    assert cluster_from_environ(rank_variables(cluster)).endpoints == cluster.endpoints


def test_the_attempt_is_counted_from_zero_by_the_launcher() -> None:
    assert (attempt({}), attempt({"FLEET_TRAIN_ATTEMPT": "3"})) == (0, 3)
    for wrong in ("-1", "two"):
        with pytest.raises(ClusterError, match="FLEET_TRAIN_ATTEMPT"):
            attempt({"FLEET_TRAIN_ATTEMPT": wrong})


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e400", "1e7", "soon"])
def test_a_join_timeout_is_a_finite_number_of_seconds(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a positive number of seconds up to 1e\\+06"):
        join_timeout_seconds({"FLEET_TRAIN_JOIN_TIMEOUT": text})


@pytest.mark.parametrize("text", ["\u00b2", "\uff16", "9" * 5000, "-1", "x"])
@pytest.mark.parametrize("flag", ["started_port", "nproc_per_node"])
def test_the_stock_launchers_numbers_are_read_strictly(flag: str, text: str) -> None:
    command = ["python", "-m", "paddle.distributed.launch", "--cluster_node_ips=10.0.0.1", f"--{flag}={text}", "t.py"]
    with pytest.raises(ClusterError, match="is not a whole number"):
        cluster_from_environ({}, command)


@pytest.mark.parametrize("port", ["\u00b2", "9" * 5000, ""])
def test_a_port_of_an_endpoint_is_read_strictly(port: str) -> None:
    with pytest.raises(ClusterError, match="is not of the form host:port"):
        cluster_from_environ({"PADDLE_TRAINER_ENDPOINTS": f"10.0.0.1:{port}"})


def test_a_machine_that_is_named_twice_is_refused() -> None:
    command = (
        "python -m paddle.distributed.launch --cluster_node_ips=10.0.0.1,10.0.0.2,10.0.0.1 --node_ip=10.0.0.1 t.py"
    )
    with pytest.raises(ClusterError, match=r"--cluster_node_ips lists 10\.0\.0\.1 twice; list every machine once"):
        cluster_from_environ({"PADDLE_TRAINER_ID": "0"}, command.split())


def test_settings_of_the_launcher_are_a_list_of_texts() -> None:
    assert asked_settings({}) == asked_settings({SETTINGS: ""}) == ()
    assert asked_settings({SETTINGS: '["a=1", "b=x y"]'}) == ("a=1", "b=x y")
    for text in ("a=1", "{}", "[1]", '"a"'):
        with pytest.raises(ClusterError, match="FLEET_TRAIN_SET is not a JSON list of texts"):
            asked_settings({SETTINGS: text})


def test_flags_of_a_program_win_over_the_launchers_and_rank_0_says_so() -> None:
    environ = {"FLEET_TRAIN_STRATEGY": "local_sgd", SETTINGS: '["a=1", "b=2"]'}
    assert ask_here(environ, "unfused", ("b=3",)) == (
        "the launcher's --strategy local_sgd and --set b is not used: the program has its own"
    )
    assert (asked_strategy(environ), asked_settings(environ)) == ("unfused", ("a=1", "b=3"))
    assert ask_here({"FLEET_TRAIN_STRATEGY": "a", "PADDLE_TRAINER_ID": "1"}, "b", ()) == ""
    assert ask_here(environ, "unfused", ("b=3",)) == ask_here(environ, None, ()) == ""
    assert (asked_strategy(environ), asked_settings(environ)) == ("unfused", ("a=1", "b=3"))
