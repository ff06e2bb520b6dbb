from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleet_train.cli import launch as cli
from fleet_train.launch.request import FaultPolicy, LaunchRequest


def read(*arguments: str) -> LaunchRequest:
    """What the command line makes of these words."""
    context = cli.command.make_context("launch", list(arguments))
    flags: dict[str, Any] = {name: value for name, value in context.params.items() if name != "dry_run"}
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


def test_flags_behind_the_script_belong_to_the_script() -> None:
    request = read("--nproc_per_node=2", "train.py", "--nproc_per_node=9", "--help", "--", "-m")
    assert request.processes_per_node == 2
    assert request.command == ("train.py", "--nproc_per_node=9", "--help", "--", "-m")


def test_a_module_and_its_flags() -> None:
    request = read("-m", "fleet_train", "train", "--epochs", "3")
    assert (request.is_module, request.command) == (True, ("fleet_train", "train", "--epochs", "3"))


def test_what_to_do_about_faults() -> None:
    flags = "--max_restarts=3 --min_nodes 2 --rejoin-timeout=60 --lost_node_timeout=10 --grace_seconds=45".split()
    assert read(*flags, "train.py").faults == FaultPolicy(3, 2, 60.0, 10.0, 45.0)


def test_defaults() -> None:
    assert read("train.py") == LaunchRequest(command=("train.py",))
    assert (LaunchRequest(("x",)).started_port, LaunchRequest(("x",)).join_timeout_seconds) == (6170, 300.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc_per_nodes=2", "train.py"], "--nproc_per_node"),
        (["--cluster_node_ip=a", "train.py"], "--cluster_node_ips"),
        (["--master=a:1", "train.py"], "the nodes are given by --cluster_node_ips"),
        (["--nnodes", "2", "train.py"], "the number of nodes is that of --cluster_node_ips"),
        (["--max_restart=3", "train.py"], "it is --max_restarts here"),
        (["--elastic_timeout=3", "train.py"], "--rejoin_timeout"),
        (["--max_restarts=-1", "train.py"], "max_restarts"),
        (["--join_timeout=-1", "train.py"], "join_timeout"),
        (["--nproc_per_node=two", "train.py"], "nproc_per_node"),
        ([], "SCRIPT"),
    ],
)
def test_flags_that_nobody_knows_end_with_2_and_a_hint(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.command, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_help_teaches_with_examples() -> None:
    text = CliRunner().invoke(cli.command, ["--help"]).output
    assert "--cluster_node_ips=192.168.1.2,192.168.1.3" in text
    assert isinstance(cli.command, click.Command)


def test_paddlecloud_takes_the_place_of_the_node_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PADDLE_TRAINERS": "10.0.0.1,10.0.0.2", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6007"}.items():
        monkeypatch.setenv(name, value)
    request = read("--use_paddlecloud", "train.py")
    assert (request.hosts, request.node_host, request.started_port) == (("10.0.0.1", "10.0.0.2"), "10.0.0.2", 6007)
