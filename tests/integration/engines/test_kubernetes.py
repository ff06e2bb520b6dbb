"""Emulated pods: two network namespaces, each with the variables that an operator sets and the names of its services.

The variables are those of the operators' sources, which `fleet_train.cluster.kubernetes` and ``torchrun`` name.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.engines.conftest import KILLED_AFTER, SCRIPT, Machines, assert_equal_bits, train_undisturbed
from tests.support.processes import Job, Started, clean_environ, write_script
from tools.lab import Node

pytestmark = [pytest.mark.root, pytest.mark.long]

Variables = Callable[[int, "list[str]"], dict[str, str]]
_PLACE = """
import os
print("rank {PADDLE_TRAINER_ID} of {PADDLE_TRAINERS_NUM} at {PADDLE_TRAINER_ENDPOINTS}".format(**os.environ))
"""


@dataclass
class Pods:
    """Two pods: what ``ip netns exec`` shows them as /etc/hosts is the cluster's names."""

    machines: Machines
    names: list[str]
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = [machine.address for machine in self.machines]
        for machine in self.machines:
            (_etc(machine)).mkdir(parents=True)
        self.publish()

    def publish(self) -> None:
        """What the cluster's DNS says from now on, in all pods."""
        lines = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        for machine in self.machines:
            (_etc(machine) / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def move(self, pod: int, address: str) -> None:
        """The pod is put elsewhere: the same name behind another address."""
        _ip(self.machines[pod], "addr", "flush", "dev", "eth0")
        _ip(self.machines[pod], "addr", "add", f"{address}/24", "dev", "eth0")
        self.addresses[pod] = address
        self.publish()

    def remove(self) -> None:
        for machine in self.machines:
            shutil.rmtree(_etc(machine), ignore_errors=True)


def _etc(machine: Node) -> Path:
    return Path("/etc/netns") / machine.namespace


def _ip(machine: Node, *arguments: str) -> None:
    subprocess.run(["ip", "-n", machine.namespace, *arguments], check=True, capture_output=True)


@pytest.fixture
def pods(machines: Machines, told: Variables) -> Iterator[Pods]:
    pods = Pods(machines, NAMES[told])
    yield pods
    pods.remove()


def paddle_job(pod: int, addresses: list[str]) -> dict[str, str]:
    """Kubeflow's PaddleJob v1; worker 0 is told its own address as the master."""
    master = f"{addresses[0]}:37777" if pod == 0 else "digits-worker-0:37777"
    told = {"PADDLE_JOB_ID": "digits", "PADDLE_NNODES": "2", "PADDLE_MASTER": master, "PYTHONUNBUFFERED": "0"}
    return told | {"HOSTNAME": f"digits-worker-{pod}"}


def train_job(pod: int, _: list[str]) -> dict[str, str]:
    """TrainJob v2 with the torch runtime."""
    told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(pod)}
    return told | {"PET_MASTER_ADDR": "digits-node-0-0.digits", "PET_MASTER_PORT": "29400"}


def indexed_job(pod: int, _: list[str]) -> dict[str, str]:
    """A Job with ``completionMode: Indexed`` and a headless service, as in tools/examples/cluster/job.yaml."""
    told = {"FLEET_TRAIN_MASTER": "digits-0.digits:6170", "FLEET_TRAIN_NNODES": "2"}
    return told | {"JOB_COMPLETION_INDEX": str(pod), "HOSTNAME": f"digits-{pod}"}


def volcano(pod: int, _: list[str]) -> dict[str, str]:
    """Volcano's pytorch plugin; only the master has a name."""
    told = {"MASTER_ADDR": "digits-master-0.digits", "MASTER_PORT": "23456", "WORLD_SIZE": "2"}
    return told | {"RANK": str(pod)}


NAMES: dict[Variables, list[str]] = {
    paddle_job: ["digits-worker-0", "digits-worker-1"],
    train_job: ["digits-node-0-0.digits", "digits-node-0-1.digits"],
    indexed_job: ["digits-0.digits", "digits-1.digits"],
    volcano: ["digits-master-0.digits", "nobody-1"],
}


def start(job: Job, pods: Pods, pod: int, told: Variables, arguments: list[str], folder: Path, **more: str) -> Started:
    name = f"pod{pod}-{len(job.started)}"
    environ = clean_environ({**told(pod, pods.addresses), **more})
    return job.start(name, [*pods.machines[pod].prefix, sys.executable, *arguments], environ, folder)


@pytest.mark.parametrize("told", list(NAMES), ids=lambda told: told.__name__)
def test_a_launcher_in_each_pod_finds_the_others(job: Job, pods: Pods, tmp_path: Path, told: Variables) -> None:
    launch = ["-m", "fleet_train", "launch", str(write_script(_PLACE, tmp_path))]
    both = [start(job, pods, pod, told, launch, tmp_path / str(pod)) for pod in (1, 0)]
    job.wait(60.0)
    assert [one.process.returncode for one in both] == [0, 0], job.report()
    for pod in (0, 1):
        said = (tmp_path / str(pod) / "log" / "workerlog.0").read_text()
        assert re.fullmatch(rf"rank {pod} of 2 at 10\.78\.0\.1:\d+,10\.78\.0\.2:\d+\n", said), job.report()
    assert job.orphans() == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), ranks=2)


@pytest.mark.parametrize("told", [indexed_job], ids=lambda told: told.__name__)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_pod_that_is_put_elsewhere_takes_its_place_again(
    job: Job, pods: Pods, tmp_path: Path, told: Variables, lost: int, undisturbed: Path
) -> None:
    flags = ["--max_restarts=2", "--lost_node_timeout=2", "--rejoin_timeout=60"]
    launch = ["-m", "fleet_train", "launch", *flags, str(SCRIPT)]
    kill, folder = {"FLEET_TEST_KILL": str(KILLED_AFTER)}, tmp_path / "run"
    both = [start(job, pods, pod, told, launch, folder, **kill) for pod in (0, 1)]
    job.wait_until((folder / "killed").exists, 60.0, "the killed rank")
    _kill_pod(pods.machines[lost])
    pods.move(lost, "10.78.0.9")
    again = start(job, pods, lost, told, launch, folder, **kill)
    job.wait(180.0)
    assert [both[1 - lost].process.returncode, again.process.returncode] == [0, 0], job.report()
    assert_equal_bits(undisturbed, folder)
    assert job.orphans() == []


def _kill_pod(machine: Node) -> None:
    """Everything in it at once, as when its machine is lost."""
    found = subprocess.run(["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=True)
    for pid in map(int, found.stdout.split()):
        os.kill(pid, signal.SIGKILL)
