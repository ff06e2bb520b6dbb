"""Small soaks: three kills, one of them during a save, and two freezes; three machine faults.

docs/benchmarks has the long ones.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environ, python

pytestmark = pytest.mark.long


def test_kills_and_freezes_lose_nothing(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    port = free_ports(3, ["127.0.0.2", "127.0.0.3"])
    small = "--kills 3 --freezes 2 --network loopback --nodes 2 --ranks_per_node 1 --epochs 6".split()
    small += ["--started_port", str(port)]
    command = [str(ROOT / "tools" / "soak.py"), *small, "--output", str(tmp_path / "record"), "--keep", str(tmp_path)]
    done = subprocess.run(
        python(*command), env=clean_environ(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [kill["kind"] for kill in record["kills"]].count("freeze") == 2
    assert record["comparison"]["losses"] > 60
    assert len(record["checkpoints_used"]) >= 1
    assert "nothing was lost" in (tmp_path / "record.md").read_text()


@pytest.mark.root
@pytest.mark.timeout(420)  # twelve starts of a rank, and more than a minute of waiting for lost machines
def test_a_lost_first_disk_a_frozen_leader_and_a_cut_link_lose_nothing(tmp_path: Path) -> None:
    small = "--faults machine:0,frozen:leader,cut --epochs 8 --step_seconds 0.2".split()
    command = [str(ROOT / "tools" / "soak.py"), *small, "--output", str(tmp_path / "record"), "--keep", str(tmp_path)]
    done = subprocess.run(
        python(*command), env=clean_environ(), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [fault["kind"] for fault in record["faults"]] == ["machine", "frozen", "cut"]
    assert len(record["attempts"]) >= 4
    assert record["comparison"]["losses"] > 60
    assert "nothing was lost" in (tmp_path / "record.md").read_text()
