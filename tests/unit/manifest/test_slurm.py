"""The batch script for Slurm: what it requests, what it starts, and when it requeues itself.

``srun`` and ``scontrol`` are programs of the test that write down their arguments and end as they are told.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from fleet_train.errors import ClusterError
from fleet_train.manifest.slurm import gpus_per_node, time_limit_seconds
from tests.support.manifests import AWKWARD, request_of, written
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

    def submit(self, *flags: str, nodes: int = 2, **variables: str) -> subprocess.Popen[str]:
        self.script.write_text(written("slurm", f"--nodes={nodes}", *flags))
        subprocess.run(["bash", "-n", str(self.script)], check=True)
        environ = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SRUN_ENDS": "0",
            "SRUN_DIES": "",
            "SRUN_WAITS": "",
        }
        return subprocess.Popen(
            ["bash", str(self.script)], env=environ | variables, text=True, cwd=self.folder, stderr=subprocess.PIPE
        )

    def run(self, *flags: str, nodes: int = 2, **variables: str) -> tuple[int, str]:
        with self.submit(*flags, nodes=nodes, **variables) as process:
            _, said = process.communicate(timeout=120)
        return process.returncode, said

    def told(self, program: str) -> list[str]:
        path = self.calls / program
        return path.read_text().split("\0")[:-1] if path.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def options_of(*flags: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", written("slurm", *flags), re.MULTILINE)


def test_what_is_asked_for() -> None:
    flags = "--nodes=4 --gpus=a100:8 --cpus=64 --mem=500G --time=1-12:00:00 --partition=gpu --account=lab --qos=long"
    assert options_of(*flags.split(), "--sbatch=--exclusive", "--workdir=/work", "--grace_seconds=90", "train.py") == [
        "--job-name=train",
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--gpus-per-node=a100:8",
        "--mem=500G",
        "--time=1-12:00:00",
        "--chdir=/work",
        "--exclusive",
        "--signal=TERM@150",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]


def test_sbatch_sees_all_of_it() -> None:
    """It reads no further than the first line that is neither empty nor a comment."""
    text = written("slurm", "--nodes=2", "--venv=/v", "--setup=module load x", "train.py", "a\n#SBATCH --nodes=9")
    first = next(number for number, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    seen = [line for line in text.splitlines()[:first] if line.startswith("#SBATCH")]
    assert len(seen) == len(options_of("--nodes=2", "train.py"))


def test_one_launcher_per_node(cluster: Cluster) -> None:
    assert cluster.run("--gpus=a100:8", "--cpus=64", "train.py", "--epochs", "3", nodes=4) == (0, "")
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
    assert (request.command, request.processes_per_node) == (("train.py", "--epochs", "3"), 8)
    assert (request.hosts, request.log_dir) == (None, Path("log/17/run0"))
    assert (request.faults.grace_seconds, request.faults.max_restarts) == (60.0, 3)
    assert cluster.told("scontrol") == []


def test_arguments_reach_the_script_as_they_are(cluster: Cluster) -> None:
    assert cluster.run("--log_dir=my logs", "train.py", *AWKWARD) == (0, "")
    words = cluster.told("srun")
    request = request_of(words[words.index("python") :])
    assert request.command == ("train.py", *AWKWARD)
    assert request.log_dir == Path("my logs/17/run0")


@pytest.mark.parametrize("run", [0, 9])
def test_a_saved_state_queues_the_job_again_and_each_run_has_logs_of_its_own(cluster: Cluster, run: int) -> None:
    code, said = cluster.run("train.py", SRUN_ENDS="12", **({"SLURM_RESTART_COUNT": str(run)} if run else {}))
    assert (code, cluster.told("scontrol")) == (12, ["requeue", "17"])
    assert f"the state of run {run} is saved; the job requeues itself" in said
    assert f"--log_dir=log/17/run{run}" in cluster.told("srun")


@pytest.mark.parametrize(("flags", "most"), [([], 10), (["--max_requeues=2"], 2), (["--max_requeues=0"], 0)])
def test_there_is_a_bound_on_that(cluster: Cluster, flags: list[str], most: int) -> None:
    code, said = cluster.run(*flags, "train.py", SRUN_ENDS="12", SLURM_RESTART_COUNT=str(most))
    assert (code, cluster.told("scontrol")) == (12, [])
    assert f"requeued {most} times already, at most {most}: sbatch it again" in said


@pytest.mark.parametrize("code", [0, 1, 11, 137])
def test_any_other_end_is_the_jobs_and_a_killed_srun_is_a_failure(cluster: Cluster, code: int) -> None:
    assert cluster.run("train.py", SRUN_ENDS=str(code)) == (code, "")
    assert cluster.run("train.py", SRUN_DIES=str(int(signal.SIGTERM)))[0] == 128 + signal.SIGTERM
    assert cluster.told("scontrol") == []


def test_a_job_that_slurm_does_not_queue_again_says_so(cluster: Cluster) -> None:
    code, said = cluster.run("train.py", SRUN_ENDS="12", SCONTROL_ENDS="1")
    assert (code, cluster.told("scontrol")) == (12, ["requeue", "17"])
    assert "Slurm did not requeue it: sbatch it again to continue" in said


def test_a_cancelled_job_is_not_queued_again(cluster: Cluster) -> None:
    """scancel sends SIGTERM to the tasks, which save their state, and to this script (slurmd, _rpc_terminate_job)."""
    go = cluster.calls / "go"
    process = cluster.submit("train.py", SRUN_ENDS="12", SRUN_WAITS=str(go))
    until((cluster.calls / "started").exists)
    process.send_signal(signal.SIGTERM)
    go.touch()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, cluster.told("scontrol"), said) == (12, [], "")


def test_the_environment_is_made_first_and_without_it_nothing_is_started(cluster: Cluster) -> None:
    for flags, variables, words in (
        (["--venv=/nowhere"], {}, "/nowhere/bin/activate"),
        ([], {"SLURM_JOB_ID": ""}, "start this script with sbatch"),  # with bash alone
    ):
        code, said = cluster.run(*flags, "train.py", **variables)
        assert (code != 0, cluster.told("srun")) == (True, [])
        assert words in said
    activate = cluster.folder / "my venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("export FOLDER_OF_VENV=active\n")
    flags = [f"--venv={cluster.folder / 'my venv'}", "--setup=export FOLDER_OF_VENV=$FOLDER_OF_VENV-more"]
    assert cluster.run(*flags, "train.py") == (0, "")
    assert (cluster.calls / "venv").read_text() == "active-more"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("0:45", 45), ("12:00:00", 43_200), ("2-00", 172_800), ("1-12:30", 131_400), ("1-00:00:01", 86_401)],
)
def test_time_limits_and_gpus(text: str, seconds: int) -> None:
    assert time_limit_seconds(text) == seconds
    assert (gpus_per_node(None), gpus_per_node("8"), gpus_per_node("a100:4")) == (0, 8, 4)


@pytest.mark.parametrize("text", ["", "1h", "-5", "1:2:3:4", "24:00:00:00", "1.5", "12:00:00 ", "\u0661", "UNLIMITED"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a time limit of Slurm"):
        time_limit_seconds(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--partition=a b"], "--partition='a b'"),
        (["--name=a\n#SBATCH --nodes=9"], "letters, digits"),
        (["--mem=64Gi"], "--mem='64Gi' is not valid for Slurm"),
        (["--gpus=a100"], "--gpus='a100' is not valid for Slurm"),
        (["--sbatch=exclusive"], "is not an option of sbatch on one line"),
        (["--sbatch=--a\n--b"], "is not an option of sbatch on one line"),
        (["--grace_seconds=60", "--signal_seconds=80"], "it must be --grace_seconds=60 + 30 or more"),
        (["--time=2"], "--signal_seconds=120 is not below --time=2 (120 s)"),
        (["--workdir=/a b"], "sbatch takes no spaces"),
        (["--venv="], "--venv='' is not a path"),
    ],
)
def test_errors_say_what_was_given_and_the_rule(flags: list[str], said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        written("slurm", "--nodes=2", *flags, "train.py")
    assert said in str(caught.value)


def test_the_trainer_gets_resume_if_the_engine_does_not_count_starts() -> None:
    trainer = ["-m", "fleet_train", "train", "--model=mlp"]
    note = "the reference trainer is started without --resume"
    in_pods = ["job", "--nodes=2", "--image=registry.local/train:1"]
    assert note in written(*in_pods, *trainer)
    assert note not in written(*in_pods, *trainer, "--resume")
    assert note not in written(*in_pods, "train.py")
    assert note not in written("slurm", "--nodes=2", *trainer)
