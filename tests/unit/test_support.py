"""The helpers of this test suite do what they promise."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.launchers import run_launchers
from tests.support.ports import free_ports, slice_of
from tests.support.ranks import node_sizes, run_ranks, stock_environs


def test_nodes_share_the_ranks_out() -> None:
    assert node_sizes(4, 2) == [2, 2]
    assert node_sizes(3, 2) == [2, 1]
    assert node_sizes(3, (1, 2)) == [1, 2]


def test_environment_is_the_stock_launchers() -> None:
    environs = stock_environs([2, 1])
    hosts = [environ["PADDLE_CURRENT_ENDPOINT"].split(":")[0] for environ in environs]
    assert hosts == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
    assert [environ["PADDLE_RANK_IN_NODE"] for environ in environs] == ["0", "1", "0"]
    assert len({environ["PADDLE_TRAINER_ENDPOINTS"] for environ in environs}) == 1


def test_ports_are_never_given_out_twice() -> None:
    blocks = [free_ports(3, ["127.0.0.2", "127.0.0.3"]) for _ in range(20)]
    ports = [first + offset for first in blocks for offset in range(3)]
    assert len(set(ports)) == 60


def test_test_processes_side_by_side_are_given_different_ports() -> None:
    workers = [{"PYTEST_XDIST_WORKER": f"gw{n}", "PYTEST_XDIST_WORKER_COUNT": "3"} for n in range(3)]
    slices = [set(slice_of(environ)) for environ in workers]
    assert sum(map(len, slices)) == len(set.union(*slices))
    assert set.union(*slices) <= set(slice_of({}))
    # The kernel takes the ports of outgoing connections from elsewhere.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(slice_of({})) < lowest


def test_values_and_arrays_are_returned_by_rank(tmp_path: Path) -> None:
    script = """
        import os
        import numpy as np
        from tests.support.worker import report
        rank = int(os.environ["PADDLE_TRAINER_ID"])
        report(loss=rank / 2, weights=np.full(3, rank, "float32"))
        """
    result = run_ranks(script, 2, folder=tmp_path)
    assert result.of_all("loss") == [0.0, 0.5]
    assert [list(weights) for weights in result.of_all("weights")] == [[0, 0, 0], [1, 1, 1]]


def test_rank_that_outstays_a_failed_one_is_killed(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        sys.exit(3) if os.environ["PADDLE_TRAINER_ID"] == "1" else time.sleep(60)
        """
    result = run_ranks(script, 2, folder=tmp_path, patience_after_failure_seconds=0.1, check=False)
    assert result.exit_codes == [-signal.SIGKILL, 3]
    assert [rank.killed for rank in result.ranks] == [True, False]


def test_process_that_left_its_session_is_found_as_an_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LAST_MOMENT_SECONDS", 1.0)
    daemon = "import subprocess; subprocess.Popen(['sleep', '61'], start_new_session=True)"
    result = run_launchers([[sys.executable, "-c", daemon]] * 2, folder=tmp_path, check=False)
    assert result.orphans == ["sleep 61", "sleep 61"]
