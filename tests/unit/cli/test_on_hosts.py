"""``--hosts``: what each host is told of the flags that were typed, and what does not go with them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fleet_train.cli import doctor, launch, recommend, stacks
from fleet_train.cli.on_hosts import words
from fleet_train.errors import ClusterError


def test_each_host_gets_what_was_typed_without_what_says_where() -> None:
    typed = "--hosts a,b --ssh_config F --set x=1 --set=y=2 --strict --max-restarts 3 --log_dir L -m pkg.train --lr 0.1"
    context = launch.command.make_context("launch", typed.split())
    told = "--set=x=1 --set=y=2 --max_restarts=3 --strict -m pkg.train --lr 0.1"
    assert words(context, without={"log_dir"}) == tuple(told.split())


def test_the_scripts_own_flags_stay_behind_it() -> None:
    typed = "--trials 2 --hosts a --script t.py --lr 0.1 --trials 9"
    context = recommend.command.make_context("recommend", typed.split())
    told = ("--trials=2", "--script=t.py", "--", "--lr", "0.1", "--trials", "9")
    assert words(context) == told
    again = recommend.command.make_context("recommend", list(told))
    assert (again.params["trials"], again.params["arguments"]) == (2, ("--lr", "0.1", "--trials", "9"))


@pytest.mark.parametrize(
    ("command", "typed", "why"),
    [
        (
            launch,
            "--hosts a --ips 10.0.0.1,10.0.0.2 t.py",
            "--cluster_node_ips and --hosts do not go together: the",
        ),
        (launch, "--hosts a --node_ip 10.0.0.1 t.py", "--node_ip and --hosts do not go together: each host's own"),
        (launch, "--hosts a --engine slurm t.py", "--engine and --hosts do not go together: the hosts are given"),
        (doctor, "--hosts a --ips 10.0.0.1", "--ips and --hosts do not go together: the addresses are found"),
        (stacks, "--hosts a --log_dir log", "--log_dir and --hosts do not go together: each host is asked for its own"),
        (doctor, "--hosts a --hosts_file F", "give --hosts or --hosts_file, not both"),
        (doctor, "--ssh_config F", "--ssh_config is for --hosts, which is not given"),
        (doctor, "--hosts_file /no/such", "--hosts_file=/no/such: there is no such file"),
        (launch, "--hosts a:2,b:2 --nproc_per_node 4 t.py", "--nproc_per_node is for hosts without a number, and each"),
        (doctor, "--hosts a,a", "--hosts=a,a: a is listed more than once"),
    ],
)
def test_what_does_not_go_with_hosts_is_refused_with_the_reason(command: object, typed: str, why: str) -> None:
    result = CliRunner().invoke(command.command, typed.split())  # type: ignore[attr-defined]
    assert isinstance(result.exception, ClusterError)
    assert str(result.exception).startswith(why)
