"""tools/examples/cluster/train.sbatch: what it asks for, what it starts, and when it requeues itself.

``srun`` and ``scontrol`` are programs of the test that write down their arguments and end as they are told.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster_files import BATCH_SCRIPT, edited, request_of
from tests.support.processes import until

_FAKE = """#!/bin/bash
printf '%s\\0' "$@" >> "$CALLS/{name}"
printf '%s' "${{FOLDER_OF_VENV:-}}" > "$CALLS/venv"
{body}
"""
_WAITS = 'while [ -n "$SRUN_WAITS" ] && [ ! -e "$SRUN_WAITS" ]; do sleep 0.02; done'
_SRUN = f'touch "$CALLS/started"; {_WAITS}; exit "$SRUN_ENDS"'
_SRUN_KILLED = 'kill -"$SRUN_DIES" $$'


class Cluster:
    """A folder with the programs of Slurm, and the script that is submitted there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.mkdir()
        self.program("srun", f'[ -z "$SRUN_DIES" ] || {_SRUN_KILLED}\n{_SRUN}')
        self.program("scontrol", 'exit "${SCONTROL_ENDS:-0}"')
        self.script = folder / "job.sbatch"

    def program(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(_FAKE.format(name=name, body=body))
        path.chmod(0o755)

    def submit(self, edits: dict[str, str] | None = None, **variables: str) -> subprocess.Popen[str]:
        self.script.write_text(edited(BATCH_SCRIPT.read_text(), edits or {}))
        subprocess.run(["bash", "-n", str(self.script)], check=True)
        environ = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": "2",
            "SRUN_ENDS": "0",
            "SRUN_DIES": "",
            "SRUN_WAITS": "",
        }
        return subprocess.Popen(
            ["bash", str(self.script)], env=environ | variables, text=True, cwd=self.folder, stderr=subprocess.PIPE
        )

    def run(self, edits: dict[str, str] | None = None, **variables: str) -> tuple[int, str]:
        with self.submit(edits, **variables) as process:
            _, said = process.communicate(timeout=120)
        return process.returncode, said

    def told(self, program: str) -> list[str]:
        path = self.calls / program
        return path.read_text().split("\0")[:-1] if path.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_sbatch_sees_every_option_and_the_signal_leaves_time_to_save() -> None:
    """sbatch reads no further than the first line that is neither empty nor a comment."""
    lines = BATCH_SCRIPT.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert options == [line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH")]
    assert {"--ntasks-per-node=1", "--requeue", "--open-mode=append", "--output=%x-%j.out"} <= set(options)
    (seconds,) = re.findall(r"--signal=TERM@(\d+)", "\n".join(options))
    (grace,) = re.findall(r"^grace_seconds=(\d+)", "\n".join(lines), re.MULTILINE)
    assert int(seconds) >= int(grace) + 30


def test_one_launcher_per_node(cluster: Cluster) -> None:
    asked = {"SLURM_JOB_NUM_NODES": "4", "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_PER_NODE": "a100:8"}
    assert cluster.run(**asked) == (0, "")
    words = cluster.told("srun")
    launcher = words.index("python")
    assert words[:launcher] == [
        "--nodes=4",
        "--ntasks=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--gpus-per-node=a100:8",
        "--kill-on-bad-exit=0",
        "--wait=90",
    ]
    request = request_of(words[launcher:])
    assert (request.command, request.processes_per_node) == (("train.py", "--epochs", "90"), 8)
    assert (request.hosts, request.log_dir) == (None, Path("log/17/run0"))
    assert (request.faults.grace_seconds, request.faults.max_restarts) == (60.0, 3)
    assert cluster.told("scontrol") == []


def test_what_is_edited_reaches_the_launcher_as_it_is(cluster: Cluster) -> None:
    edits = {
        "processes": "2",
        "training": "(-m my.train 'a  b' '$HOME' '*' '')",
        "launch": "(--strategy=multi_node --set 'recompute_checkpoints=[a, b]')",
        "grace_seconds": "45",
    }
    assert cluster.run(edits) == (0, "")
    words = cluster.told("srun")
    assert "--wait=75" in words
    assert not [word for word in words if word.startswith(("--cpus-per-task", "--gpus-per-node"))]
    request = request_of(words[words.index("python") :])
    assert (request.command, request.is_module) == (("my.train", "a  b", "$HOME", "*", ""), True)
    assert (request.strategy, request.settings) == ("multi_node", ("recompute_checkpoints=[a, b]",))
    assert (request.processes_per_node, request.faults.grace_seconds) == (2, 45.0)


@pytest.mark.parametrize("run", [0, 9])
def test_a_saved_state_queues_the_job_again_and_each_run_has_logs_of_its_own(cluster: Cluster, run: int) -> None:
    code, said = cluster.run(SRUN_ENDS="12", **({"SLURM_RESTART_COUNT": str(run)} if run else {}))
    assert (code, cluster.told("scontrol")) == (12, ["requeue", "17"])
    assert f"the state of run {run} is saved; the job requeues itself" in said
    assert f"--log_dir=log/17/run{run}" in cluster.told("srun")


@pytest.mark.parametrize("most", [10, 2, 0])
def test_there_is_a_bound_on_that(cluster: Cluster, most: int) -> None:
    code, said = cluster.run({"most_requeues": str(most)}, SRUN_ENDS="12", SLURM_RESTART_COUNT=str(most))
    assert (code, cluster.told("scontrol")) == (12, [])
    assert f"requeued {most} times already, at most {most}: sbatch it again" in said


@pytest.mark.parametrize("code", [0, 1, 11, 137])
def test_any_other_end_is_the_jobs_and_a_killed_srun_is_a_failure(cluster: Cluster, code: int) -> None:
    assert cluster.run(SRUN_ENDS=str(code)) == (code, "")
    assert cluster.run(SRUN_DIES=str(int(signal.SIGTERM)))[0] == 128 + signal.SIGTERM
    assert cluster.told("scontrol") == []


def test_a_job_that_slurm_does_not_queue_again_says_so(cluster: Cluster) -> None:
    code, said = cluster.run(SRUN_ENDS="12", SCONTROL_ENDS="1")
    assert (code, cluster.told("scontrol")) == (12, ["requeue", "17"])
    assert "Slurm did not requeue it: sbatch it again to continue" in said


def test_a_cancelled_job_is_not_queued_again(cluster: Cluster) -> None:
    """scancel sends SIGTERM to the tasks, which save their state, and to this script (slurmd, _rpc_terminate_job)."""
    go = cluster.calls / "go"
    process = cluster.submit(SRUN_ENDS="12", SRUN_WAITS=str(go))
    until((cluster.calls / "started").exists)
    process.send_signal(signal.SIGTERM)
    go.touch()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, cluster.told("scontrol"), said) == (12, [], "")


def test_the_environment_is_made_first_and_without_it_nothing_is_started(cluster: Cluster) -> None:
    for edits, variables, words in (
        ({"environment": "/nowhere"}, {}, "/nowhere/bin/activate"),
        ({}, {"SLURM_JOB_ID": ""}, "start this script with sbatch"),  # with bash alone
    ):
        code, said = cluster.run(edits, **variables)
        assert (code != 0, cluster.told("srun")) == (True, [])
        assert words in said
    activate = cluster.folder / "my venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("export FOLDER_OF_VENV=active\n")
    assert cluster.run({"environment": f"'{cluster.folder / 'my venv'}'"}) == (0, "")
    assert (cluster.calls / "venv").read_text() == "active"
