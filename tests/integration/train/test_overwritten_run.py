"""A restart after an attempt that ended before it had moved an earlier run away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import Job, clean_environ, python, write_script

pytestmark = pytest.mark.long

_DIES_AT_FIRST = """
import os, sys
if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
    os._exit(1)
from fleet_train.cli import cli
cli(["train", *sys.argv[1:]])
"""
_FLAGS = "--model=mlp --data=digits --epochs=1 --checkpoint_every=1 --evaluate_every=1".split()


def launch(folder: Path, script: Path, *flags: str) -> tuple[int | None, str]:
    port = free_ports(3)
    with Job(folder) as job:
        command = ["-m", "fleet_train", "launch", f"--started_port={port}", "--max_restarts=2", str(script)]
        job.start("node0", python(*command, *_FLAGS, *flags), clean_environ(), cwd=folder)
        ended = job.wait(180)[0]
    return ended.exit_code, ended.output + (folder / "log" / "workerlog.0").read_text()


def test_an_earlier_run_is_not_resumed_by_a_job_that_was_to_overwrite_it(tmp_path: Path) -> None:
    script = write_script(_DIES_AT_FIRST, tmp_path)
    output = f"--output_dir={tmp_path / 'out'}"
    code, said = launch(tmp_path, script, output)
    assert code == 0, said
    code, said = launch(tmp_path, script, output, "--overwrite")
    assert code == 0, said
    assert "resumed from" not in said
    # One that nobody has said anything of is refused, as it would have been at the first attempt.
    code, said = launch(tmp_path, script, output)
    assert code == 9, said
    assert "holds checkpoints of an earlier run" in said
