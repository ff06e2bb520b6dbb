"""Ray Train places the ranks and restarts them, and the run equals an undisturbed one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, Job, clean_environ, python, write_script

pytestmark = [pytest.mark.ray, pytest.mark.long]


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(400)
def test_a_killed_worker_is_started_again_and_the_run_ends_bit_equal(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as short, Job(tmp_path / "job") as job:  # paths of sockets are short
        script = ROOT / "tests" / "integration" / "ray_training.py"
        environ = clean_environ({"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"})
        job.start("driver", python(str(script), str(tmp_path / "runs"), short), environ)
        (ended,) = job.wait(360)
        assert ended.exit_code == 0, ended.output
    undisturbed, killed = told(tmp_path / "runs" / "undisturbed"), told(tmp_path / "runs" / "killed")
    assert [(one["attempt"], one["first"]) for one in undisturbed] == [(0, 0), (0, 0)]
    assert [(one["attempt"], one["first"]) for one in killed] == [(1, 12), (1, 12)]
    assert {one["ranks"] for one in [*undisturbed, *killed]} == {2}
    assert {one["profile"] for one in [*undisturbed, *killed]} == {"unfused"}
    assert len({one["digest"] for one in [*undisturbed, *killed]}) == 1


@pytest.mark.timeout(200)
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    blocks = fenced_blocks((ROOT / "docs" / "spawn.md").read_text(), "python")
    example = next(block for block in blocks if "FleetTrainer" in block)
    with tempfile.TemporaryDirectory(prefix="ray") as short, Job(tmp_path / "job") as job:
        environ = clean_environ({"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short, "HOME": str(tmp_path)})
        job.start("driver", python(str(write_script(example, tmp_path))), environ)
        (ended,) = job.wait(170)
        assert ended.exit_code == 0, ended.output
        assert "'ranks': 2" in ended.output
        assert "'rate': 0.1" in ended.output
