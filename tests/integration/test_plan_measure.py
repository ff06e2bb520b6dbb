"""``plan --measure`` through the real launcher on two loopback "machines", and the command that it prints."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import clean_environ

pytestmark = pytest.mark.long

HOSTS = ("127.0.0.2", "127.0.0.3")


def test_two_nodes_measure_their_link_and_print_a_command_that_works(tmp_path: Path) -> None:
    launch = (
        f"python -m fleet_train launch --cluster_node_ips={','.join(HOSTS)} --started_port={free_ports(2, HOSTS)} "
        "--strategy=multi_node --set=nccl_comm_num=2 --node_ip={host} "
        "-m fleet_train plan --measure --measure_seconds=2 --compute_ms=30"
    )
    result = run_launchers([launch.format(host=host).split() for host in HOSTS], folder=tmp_path)
    output = result.nodes[0].output
    assert "measuring 2 ranks on 2 nodes for about 2 s" in output, result.report()
    assert "between nodes: 4 KiB in " in output
    assert "between nodes: allreduce over 2 ranks" in output
    assert "inside a node: no two ranks to measure" in output
    assert "to predict with these numbers" not in result.nodes[1].output, "one rank prints"

    (line,) = [line for line in output.splitlines() if line.startswith("python -m fleet_train plan ")]
    words = shlex.split(line)
    assert words[4:6] == ["--nodes=2", "--ranks_per_node=1"]
    assert words[8:] == ["--strategy=multi_node", "--set=nccl_comm_num=2", "--compute_ms=30", "--model=mlp"]
    done = subprocess.run(
        [sys.executable, *words[1:4], "--json", *words[4:]],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    predicted = json.loads(done.stdout)
    assert predicted["profile_name"] == "multi_node"
    assert 0 < predicted["prediction"]["exposed"] < 1
    assert predicted["prediction"]["compute"] == 0.03
    assert predicted["conditions"]["network"]["between"]["bytes_per_second"] > 1e6
