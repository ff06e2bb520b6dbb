"""The hosts of ``--hosts`` and ``--hosts_file``, and the flags of each host's launcher."""

from __future__ import annotations

import pytest

from fleet_train.errors import ClusterError
from fleet_train.hosts.entries import Host, node_flags, read_hosts, read_hosts_file


def test_hosts_are_read_in_their_order() -> None:
    assert read_hosts("pc1, me@pc2:2,[fd00::1]:4,10.0.0.3") == (
        Host("pc1"),
        Host("pc2", "me", 2),
        Host("fd00::1", "", 4),
        Host("10.0.0.3"),
    )
    assert Host("pc2", "me", 2).destination == "me@pc2"


@pytest.mark.parametrize(
    "entry", ["", "pc1:0", "pc1:x", "-oProxyCommand=x", "fd00::1", "[fd00::1", "a b", "a@-b", "pc1:"]
)
def test_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(
        ClusterError, match=r"is no host; write HOST, USER@HOST or HOST:N for N processes there, and \["
    ):
        read_hosts(f"pc0,{entry}")


def test_a_host_is_listed_once() -> None:
    with pytest.raises(ClusterError, match="--hosts=a,me@a:2: a is listed more than once; each host is listed once"):
        read_hosts("a,me@a:2")


def test_a_file_has_a_host_a_line() -> None:
    text = "# the lab\npc1\npc2 slots=2  # two cards\n\nme@pc3:4\n"
    assert read_hosts_file(text, "lab") == (Host("pc1"), Host("pc2", "", 2), Host("pc3", "me", 4))
    with pytest.raises(ClusterError, match="--hosts_file=lab names no host"):
        read_hosts_file("# nobody\n", "lab")


def test_each_launcher_gets_the_list_and_its_own_address() -> None:
    hosts = read_hosts("pc1,pc2:2")
    assert node_flags(hosts, ["10.0.0.1", "10.0.0.2"], 1) == [
        "--cluster_node_ips=10.0.0.1,10.0.0.2:2",
        "--node_ip=10.0.0.2",
    ]
    assert node_flags(read_hosts("a:3,b:3"), ["10.0.0.1", "10.0.0.2"], 0) == [
        "--cluster_node_ips=10.0.0.1,10.0.0.2",
        "--node_ip=10.0.0.1",
        "--nproc_per_node=3",
    ]


def test_a_job_of_one_host_has_no_list() -> None:
    assert node_flags(read_hosts("pc1"), [""], 0) == []
    assert node_flags(read_hosts("pc1:2"), [""], 0) == ["--nproc_per_node=2"]
