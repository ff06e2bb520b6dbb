"""The flags of launch, as they are typed: what they mean, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleet_train.cli import launch as cli
from fleet_train.cluster.cluster import parse_hosts
from fleet_train.errors import ClusterError
from fleet_train.launch.request import FaultPolicy, LaunchRequest, parse_devices


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
        (["--nnodes", "2", "train.py"], "the number of nodes follows from --cluster_node_ips"),
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
        (parse_hosts, "10.0.0.1:6170,10.0.0.2:6170", "carries a port"),
        (parse_devices, "0,x", "'x' is not a device number"),
        (parse_devices, "0,,1", "'' is not"),
        (parse_devices, "1,1", "more than once"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(parse: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse(text)
    assert parse_hosts("10.0.0.1, node-b,10.0.0.3") == ("10.0.0.1", "node-b", "10.0.0.3")
    assert parse_devices("3, 01") == ("3", "1")
