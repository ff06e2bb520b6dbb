"""Small soaks: ranks killed in a save, in a step and at the start, one frozen; three faults of machines.

docs/benchmarks has long ones.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, clean_environ, python

pytestmark = pytest.mark.long


def soak(tmp_path: Path, flags: str) -> dict[str, Any]:
    """Its record; it must have ended with 0. How long a recovery takes depends on who else is at work here."""
    where = ["--record", str(tmp_path), "--name", "record", "--keep_files", str(tmp_path / "files")]
    command = python(str(ROOT / "tools" / "soak.py"), *flags.split(), *where)
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in (tmp_path / "record.md").read_text()
    record: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
    return record


@pytest.mark.timeout(420)  # twelve starts of a rank
def test_kills_and_freezes_lose_nothing(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    port = free_ports(3, ["127.0.0.2", "127.0.0.3"])
    flags = "--faults save,step,start,freeze --network loopback --nodes 2 --epochs 6 --step_seconds 0.1"
    record = soak(tmp_path, f"{flags} --started_port {port}")
    assert [fault["kind"] for fault in record["faults"]] == ["save", "step", "start", "freeze"]
    assert record["faults"][0]["checkpoint_under_way"] is not None
    assert len(record["stretches"]) >= 2
    assert record["comparison"]["losses"] > 60


@pytest.mark.root
@pytest.mark.timeout(420)  # twelve starts of a rank, and more than a minute of waiting for lost machines
def test_a_lost_first_disk_a_frozen_leader_and_a_cut_link_lose_nothing(tmp_path: Path) -> None:
    record = soak(tmp_path, "--faults machine:0,frozen:leader,cut --epochs 8 --step_seconds 0.2 --next_step_within 240")
    assert [fault["kind"] for fault in record["faults"]] == ["machine", "frozen", "cut"]
    assert len(record["attempts"]) >= 4
    assert record["comparison"]["losses"] > 60
