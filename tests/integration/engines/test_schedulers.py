"""The same script under a real Slurm of two nodes, and under mpirun on two emulated machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines.conftest import (
    KILLED_AFTER,
    SAVED_BEFORE,
    SCRIPT,
    STEPS,
    Machines,
    assert_equal_bits,
    places,
    train_undisturbed,
)
from tests.support.cluster_files import BATCH_SCRIPT, edited
from tests.support.processes import Job, Started, clean_environ
from tests.support.slurm import Slurm, running_slurm

pytestmark = pytest.mark.long

RANKS = ["--ntasks-per-node=2", "--kill-on-bad-exit=1", sys.executable, str(SCRIPT)]
LAUNCHERS = ["--ntasks-per-node=1", sys.executable, "-m", "fleet_train", "launch", "--nproc_per_node=2", str(SCRIPT)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), ranks=4)


@pytest.fixture(scope="module")
def undisturbed_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a launcher, whose settings change the last bits."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), ranks=4, launched=False)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with Job(folder / "daemons") as daemons, running_slurm(daemons, folder / "slurm") as slurm:
        yield slurm


def srun(job: Job, slurm: Slurm, name: str, folder: Path, arguments: list[str], **variables: str) -> Started:
    started = job.start(name, ["srun", "-N2", *arguments], {**slurm.environ, **variables}, folder)
    started.process.wait(timeout=180)
    return started


@pytest.mark.slurm
def test_ranks_of_srun_resume_to_the_same_bits(job: Job, slurm: Slurm, tmp_path: Path, undisturbed_ranks: Path) -> None:
    killed, again = (
        srun(job, slurm, name, tmp_path, RANKS, FLEET_TEST_KILL=str(KILLED_AFTER)) for name in ("killed", "again")
    )
    assert killed.process.returncode != 0, killed.output
    assert killed.output.count(", step 0): 4 ranks on 2 nodes") == 1
    assert places(killed.output) == [(rank, 4, 2, 0) for rank in range(4)]
    assert again.process.returncode == 0, again.output
    assert places(again.output) == [(rank, 4, 2, SAVED_BEFORE) for rank in range(4)]
    assert_equal_bits(undisturbed_ranks, tmp_path)


@pytest.mark.slurm
def test_launchers_of_srun_restart_a_killed_rank_to_the_same_bits(
    job: Job, slurm: Slurm, tmp_path: Path, undisturbed: Path
) -> None:
    restarting = [*LAUNCHERS[:-1], "--max_restarts=1", LAUNCHERS[-1]]
    killed = srun(job, slurm, "killed", tmp_path, restarting, FLEET_TEST_KILL=str(KILLED_AFTER))
    assert killed.process.returncode == 0, killed.output
    assert "started by Slurm (job" in killed.output
    assert places(killed.output) == [(0, 4, 2, 0), (0, 4, 2, SAVED_BEFORE)]
    assert "restart 1 of 1" in killed.output
    assert_equal_bits(undisturbed, tmp_path)


@pytest.mark.slurm
def test_the_batch_script_is_queued_again_to_the_same_bits(slurm: Slurm, tmp_path: Path, undisturbed: Path) -> None:
    edits = {"--job-name": "train", "--cpus-per-task": "2", "processes": "2", "training": f"({SCRIPT})"}
    script = tmp_path / "train.sbatch"
    script.write_text(edited(BATCH_SCRIPT.read_text(), edits))
    slurm.ask("sbatch", "--test-only", str(script))
    submit = ["sbatch", "--parsable", f"--chdir={tmp_path}", "--export=ALL,FLEET_TEST_STEP_SECONDS=0.5"]
    number = slurm.ask(*submit, str(script)).strip()
    slurm.job.wait_until((tmp_path / "checkpoints" / "5").exists, 120.0, "a checkpoint")
    slurm.ask("scancel", "--signal=TERM", number)
    ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    slurm.job.wait_until(lambda: slurm.state_of(number) in ended, 150.0, "the end of the job")
    output = (tmp_path / f"train-{number}.out").read_text()
    assert slurm.state_of(number) == "COMPLETED", output
    assert "the state of run 0 is saved; the job requeues itself" in output
    (_, _, _, first), (_, _, _, second) = places(output)
    assert first == 0
    assert 5 <= second < STEPS
    assert_equal_bits(undisturbed, tmp_path)


@pytest.mark.slurm
def test_two_launchers_on_a_node_are_refused_with_the_fix(job: Job, slurm: Slurm, tmp_path: Path) -> None:
    both = srun(job, slurm, "both", tmp_path, ["--ntasks-per-node=2", *LAUNCHERS[1:]])
    assert both.process.returncode == 5
    assert "started 2 launchers on this node" in both.output
    assert "srun --ntasks-per-node=1" in both.output


@pytest.mark.slurm
def test_a_command_in_a_batch_script_without_srun_is_a_job_of_its_own(slurm: Slurm, tmp_path: Path) -> None:
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n{sys.executable} {SCRIPT}\n")
    number = slurm.ask("sbatch", "--parsable", f"--chdir={tmp_path}", "--output=out", str(batch)).strip()
    slurm.job.wait_until(
        lambda: slurm.state_of(number) not in ("PENDING", "RUNNING", "COMPLETING"), 120, "the job's end"
    )
    output = (tmp_path / "out").read_text()
    assert slurm.state_of(number) == "COMPLETED", output
    assert places(output) == [(0, 1, 1, 0)]
    assert "trains alone: Slurm allocated 2 nodes to the job, but srun did not start" in output


# mpirun starts its daemons elsewhere by a remote shell: AGENT [-options] HOST COMMAND...
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in
    {one.address}) name={one.namespace} ;;
    {two.address}) name={two.namespace} ;;
    *) echo "no machine $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec $name sh -c "$*"
"""
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def agent(machines: Machines, tmp_path: Path) -> Path:
    path = tmp_path / "agent"
    path.write_text(_AGENT.format(one=machines[0], two=machines[1]))
    path.chmod(0o755)
    return path


def open_mpi(machines: Machines, agent: Path, per_node: int = 2) -> list[str]:
    hosts = ",".join(f"{machine.address}:{per_node}" for machine in machines)
    options = ["--mca", "plm_rsh_agent", str(agent), "--host", hosts, "-x", "FLEET_TEST_KILL"]
    return [*machines[0].prefix, "mpirun.openmpi", *options, "-np", str(2 * per_node)]


def mpich(machines: Machines, agent: Path, per_node: int = 2) -> list[str]:
    hosts = ",".join(f"{machine.address}:{per_node}" for machine in reversed(machines))
    options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", hosts, "-genvlist", "FLEET_TEST_KILL"]
    return [*machines[0].prefix, "mpirun.mpich", *options, "-np", str(2 * per_node)]


@pytest.mark.root
@pytest.mark.mpi
@pytest.mark.parametrize("mpirun", [open_mpi, mpich])
def test_ranks_of_mpirun_resume_to_the_same_bits(
    job: Job, machines: Machines, agent: Path, tmp_path: Path, undisturbed_ranks: Path, mpirun: Callable[..., list[str]]
) -> None:
    command = [*mpirun(machines, agent), sys.executable, str(SCRIPT)]
    environ = clean_environ(_AS_ROOT | {"FLEET_TEST_KILL": str(KILLED_AFTER)})
    for name, first in (("killed", 0), ("again", SAVED_BEFORE)):
        started = job.start(name, command, environ, tmp_path / "run")
        assert (started.process.wait(timeout=180) == 0) == (name == "again"), started.output
        assert places(started.output) == [(rank, 4, 2, first) for rank in range(4)]
        assert started.output.count(": 4 ranks on 2 nodes") == 1, started.output
    assert_equal_bits(undisturbed_ranks, tmp_path / "run")
    assert job.orphans() == []


@pytest.mark.root
@pytest.mark.mpi
def test_the_doctor_examines_the_nodes_of_mpirun(job: Job, machines: Machines, agent: Path, tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "fleet_train", "doctor", "--only=network", "--verbose"]
    command = [*mpich(machines, agent, per_node=1), *doctor]
    started = job.start("doctor", command, clean_environ(_AS_ROOT | {"FLEET_TEST_KILL": "never"}), tmp_path / "here")
    assert started.process.wait(timeout=100) == 0, started.output
    assert "PASS  port  2 pairs: " in started.output
    for machine in machines:
        assert f"({machine.address})" in started.output
