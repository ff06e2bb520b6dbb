from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_train.cli import launch as cli
from fleet_train.cli.on_hosts import FLAGS
from fleet_train.cluster import network
from fleet_train.cluster.environment import attempt, cluster_from_environ, join_timeout_seconds
from fleet_train.errors import ClusterError, FleetTrainError
from fleet_train.launch.prepare import prepare
from tests.unit.fuzz import check, fixed

NUMBERS = (
    "0", "1", "2", "-1", "6170", "65535", "65536", "99999999999999999999", "9" * 5_000, "1e400", "1e9", "nan", "inf",
    "-inf", "0.5", "1_000", "0x10", "", " ", "\uff11", "\u0661", "\u00b2", "+3", "1e-320", "\x1b[31m", "3,4",
    "\ud800",
)  # fmt: skip
HOSTS = (
    "10.0.0.1,10.0.0.2:2",
    "127.0.0.1", "127.0.0.2", "127.0.0.2,127.0.0.3", "localhost", "10.0.0.1,10.0.0.1", "a,,b", ",", "", "::1",
    "[::1]:80", "256.1.1.1", "1.2.3.4:80", "0.0.0.0", "\x1b[31m", "a" * 5_000, "\u0661.2.3.4", "..", "xn--", "a b",
    "\ud800", "a\0b",
)  # fmt: skip
PATHS = (
    "train.py", "nothing.py", ".", "", "\x1b.py", "a" * 300, "/dev/null", "\ud800", "a\0b", "~", "-", "../..", "//",
)  # fmt: skip
PROFILES = ("multi_node", "./a.yaml", "a" * 300, "/etc/shadow", "/dev/zero", "", "\0", "\x1b", "~nobody/a.yaml", ".")
NUMBERED = (
    "--started_port", "--nproc_per_node", "--max_restarts", "--min_nodes", "--join_timeout", "--rejoin_timeout",
    "--lost_node_timeout", "--grace_seconds", "--selected_gpus", "--gpus", "--start-port",
)  # fmt: skip
SWITCHES = (
    "-m", "--dry-run", "--use_paddlecloud", "--", "--nnodes", "--unknown", "--\x1b", "-x", "--master=a", "--help",
)  # fmt: skip


def flag(names: tuple[str, ...], values: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return st.builds(
        lambda name, value: [f"{name}={value}"], st.sampled_from(names), st.sampled_from(values) | st.text()
    )


flags = st.lists(
    flag(NUMBERED, NUMBERS)
    | flag(("--cluster_node_ips", "--node_ip", "--ips", "--host"), HOSTS)
    | flag(("--strategy",), PROFILES)
    | flag(("--log_dir",), PATHS)
    | st.sampled_from(SWITCHES).map(lambda name: [name]),
    max_size=5,
).map(lambda groups: [word for group in groups for word in group])


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with a script; no name server is asked, and no port is bound."""

    def unknown(host: str) -> NoReturn:
        host.encode("idna")  # what the real one does first
        raise OSError("no name server")

    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "train.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(network.socket, "gethostbyname", unknown)
        patch.setattr(network, "port_is_free", lambda *_: True)
        yield


def launch(arguments: list[str]) -> None:
    """A launch that can be shown, or an error that says why not."""

    def ask() -> None:
        try:
            context = cli.command.make_context("launch", list(arguments))
        except (click.UsageError, click.exceptions.Exit):
            return
        asked = {name: value for name, value in context.params.items() if name not in {"dry_run", *FLAGS}}
        prepare(cli.read_request(**asked), os.environ).dry_run()

    check(ask, FleetTrainError)


@fixed(300)
@given(flags, st.sampled_from(PATHS))
def test_any_flags(arguments: list[str], program: str) -> None:
    launch([*arguments, program])


@fixed(150)
@given(flag(NUMBERED, NUMBERS), flag(("--ips", "--node_ip"), HOSTS))
def test_right_flags_with_any_number_or_address(number: list[str], address: list[str]) -> None:
    launch([*number, *address, "train.py"])


VARIABLES = ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "PADDLE_NNODES", "PADDLE_RANK_IN_NODE", "FLEET_TRAIN_ATTEMPT")
ENDPOINTS = (
    "a:1", "a:1,b:2", "a:1,a:1", "a", ":", "a:\u00b2", "a:" + "9" * 5_000, ",", "[::1]:1", "\x1b:1", "a:1,b:1,a:2",
)  # fmt: skip
environments = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(NUMBERS) for name in (*VARIABLES, "FLEET_TRAIN_JOIN_TIMEOUT", "PADDLE_PORT")},
        **{name: st.sampled_from(ENDPOINTS) for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")},
        **{name: st.sampled_from(HOSTS) for name in ("PADDLE_TRAINERS", "POD_IP")},
        "TRAINER_PORTS_NUM": st.sampled_from(NUMBERS),
    },
)


@fixed(300)
@given(environments, flags)
def test_any_environment_below_any_launcher(environ: dict[str, str], arguments: list[str]) -> None:
    for command in ([], ["python", "-m", "paddle.distributed.launch", *arguments, "train.py"]):
        check(partial(cluster_from_environ, environ, command), ClusterError)
    check(partial(attempt, environ), ClusterError)
    check(partial(join_timeout_seconds, environ), ClusterError)
