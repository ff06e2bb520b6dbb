"""The same script under mpirun of Open MPI and of MPICH, on two emulated machines; rank 0 is not on mpirun's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines.conftest import KILLED_AFTER, SAVED_BEFORE, SCRIPT, assert_equal_bits, places
from tests.support.namespaces import Namespace, two_machines
from tests.support.processes import Job, Started, clean_environ

pytestmark = [pytest.mark.root, pytest.mark.mpi, pytest.mark.long]

Machines = tuple[Namespace, Namespace]
# mpirun starts its daemons elsewhere by a remote shell: AGENT [-options] HOST COMMAND...
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in
    {one.address}) name={one.name} ;;
    {two.address}) name={two.name} ;;
    *) echo "no machine $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec $name sh -c "$*"
"""
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as machines:
        yield machines


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


@pytest.mark.parametrize("mpirun", [open_mpi, mpich])
def test_ranks_of_mpirun_resume_to_the_same_bits(
    job: Job, machines: Machines, agent: Path, tmp_path: Path, mpirun: Callable[[Machines, Path], list[str]]
) -> None:
    command = [*mpirun(machines, agent), sys.executable, str(SCRIPT)]

    def train(name: str, folder: str, **variables: str) -> Started:
        environ = clean_environ({**_AS_ROOT, "FLEET_TEST_KILL": "never", **variables})
        started = job.start(name, command, environ, tmp_path / folder)
        started.process.wait(timeout=180)
        return started

    undisturbed = train("undisturbed", "one")
    assert undisturbed.process.returncode == 0, undisturbed.output
    assert places(undisturbed.output) == [(rank, 4, 2, 0) for rank in range(4)]
    assert undisturbed.output.count(": 4 ranks on 2 nodes") == 1, undisturbed.output
    killed = train("killed", "other", FLEET_TEST_KILL=str(KILLED_AFTER))
    assert killed.process.returncode != 0, killed.output
    again = train("again", "other", FLEET_TEST_KILL=str(KILLED_AFTER))
    assert again.process.returncode == 0, again.output
    assert places(again.output) == [(rank, 4, 2, SAVED_BEFORE) for rank in range(4)]
    assert_equal_bits(tmp_path / "one", tmp_path / "other")
    assert job.orphans() == []


@pytest.mark.parametrize("mpirun", [open_mpi, mpich])
def test_the_doctor_examines_the_nodes_of_mpirun(
    job: Job, machines: Machines, agent: Path, tmp_path: Path, mpirun: Callable[..., list[str]]
) -> None:
    command = [*mpirun(machines, agent, per_node=1), sys.executable, "-m", "fleet_train", "doctor", "--only=network"]
    started = job.start("doctor", command, clean_environ(_AS_ROOT | {"FLEET_TEST_KILL": "never"}), tmp_path / "here")
    assert started.process.wait(timeout=100) == 0, started.output
    assert "PASS  port  2 pairs: " in started.output
    for machine in machines:
        assert f"({machine.address})" in started.output


_LATE = """
import json, os, sys, time
os.environ.update(json.loads(sys.argv[1]))
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    time.sleep(12)  # Hydra waits for it also when rank 0 has failed
from fleet_train import fleet
fleet.init(is_collective=True)
"""


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(("mpirun", "of_rank_0"), [(open_mpi, 0), (mpich, 1)])
def test_a_rank_that_does_not_come_ends_the_others_within_the_join_timeout(
    job: Job, machines: Machines, agent: Path, tmp_path: Path, mpirun: Callable[..., list[str]], of_rank_0: int,
    is_named: bool,
) -> None:  # fmt: skip
    variables = {"FLEET_TRAIN_JOIN_TIMEOUT": "4"}
    if is_named:
        variables["FLEET_TRAIN_MASTER"] = f"{machines[of_rank_0].address}:7123"
    command = [*mpirun(machines, agent, per_node=1), sys.executable, "-c", _LATE, json.dumps(variables)]
    environ = clean_environ(_AS_ROOT | {"FLEET_TEST_KILL": "never"})
    started = job.start("late", command, environ, tmp_path / "here")
    assert started.process.wait(timeout=45) != 0, started.output
    error = next(line for line in started.output.splitlines() if "fleet_train: JoinTimeout: " in line)
    assert ("rank 1 (started by " if is_named else "not all 2 processes that ") in error
    assert "within 4 s" in error
    assert job.orphans() == []
