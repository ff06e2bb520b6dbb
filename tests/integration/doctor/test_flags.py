"""Doctors of machines that were started with different flags, on loopback addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import Job, clean_environ, python

HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.mark.parametrize("odd", ["port", "processes"])
def test_the_difference_is_named_on_both_machines_and_no_firewall_is_blamed(tmp_path: Path, odd: str) -> None:
    port = free_ports(8, HOSTS)
    flags = {"port": f"--started_port={port + 4}", "processes": "--nproc=2"}[odd]
    with Job(tmp_path) as job:
        for index, own in enumerate(HOSTS):
            where = [f"--ips={','.join(HOSTS)}", f"--node_ip={own}", f"--started_port={port}", *([flags] * index)]
            command = python("-m", "fleet_train", "doctor", "--only", "software", *where)
            job.start(f"node{index}", command, clean_environ(), cwd=tmp_path / f"node{index}")
        first, second = job.wait(60.0)
    assert [first.exit_code, second.exit_code] == [1, 1], first.output + second.output
    if odd == "port":
        assert f"--started_port is {port + 4} there and {port} here" in first.output
        assert f"--started_port is {port} there and {port + 4} here" in second.output
    for each in (first, second):
        assert "FAIL  flags  " in each.output
        assert "did not connect" not in each.output
        assert (odd == "processes") == (f"1 on node 0 ({HOSTS[0]}), 2 on node 1 ({HOSTS[1]})" in each.output)
