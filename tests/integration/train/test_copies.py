"""Checkpoints on several nodes as real processes: nodes with their own folders lose one of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python
from tests.support.ranks import stock_environs

HOSTS = ("127.0.0.2", "127.0.0.3")
# 45 steps in an epoch; dropout, momentum and a decaying rate are what a resume could get wrong.
RECIPE = ("--model=mlp", "--data=digits", "--epochs=3", "--batch_size=16", "--seed=3", "--checkpoint_every_steps=20")
TRAIN = ("-m", "fleet_train", "train", *RECIPE)
COPIES = "--checkpoint_copies=2"


class Nodes:
    """Three machines; ``node<i>`` below ``folder`` is the disk of machine i."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jobs = 0
        self._profile = folder / "profile.yaml"  # each rank has errors of its own, which a resume needs
        self._profile.write_text("description: For a test.\nextends: powersgd\npowersgd_start_step: 3\n")

    def train_flags(self, *flags: str) -> list[str]:
        return [*TRAIN, f"--strategy={self._profile}", "--output_dir=run", *flags]

    def start(self, job: Job, nodes: Sequence[int], *flags: str) -> None:
        """One rank on each of these nodes, in this order."""
        for node, environ in zip(nodes, stock_environs([1] * len(nodes)), strict=True):
            command = python(*self.train_flags(*flags))
            job.start(f"node{node}", command, clean_environ(environ), cwd=self.folder / f"node{node}")

    def launch(self, job: Job, *flags: str) -> None:
        """As ``start`` on the first two nodes, by a launcher on each."""
        launch = [f"--cluster_node_ips={','.join(HOSTS)}", f"--started_port={free_ports(6, HOSTS)}", "--max_restarts=2"]
        for node, host in enumerate(HOSTS):
            command = python("-m", "fleet_train", "launch", *launch, f"--node_ip={host}", *self.train_flags(*flags))
            job.start(f"node{node}", command, clean_environ(), cwd=self.folder / f"node{node}")

    def train(self, nodes: Sequence[int], *flags: str) -> list[Ended]:
        self._jobs += 1
        with Job(self.folder / f"job{self._jobs}") as job:
            self.start(job, nodes, *flags)
            ended = job.wait(120.0, 40.0)
            assert [one.exit_code for one in ended] == [0] * len(nodes), job.report()
        return ended

    def wait_for_copy(self, job: Job) -> None:
        there = self.run(1) / "checkpoints"
        job.wait_until(lambda: any(there.glob("step-*")), 60.0, "a copy on the other node")

    def run(self, node: int) -> Path:
        return self.folder / f"node{node}" / "run"

    def kept(self, node: int) -> list[str]:
        return sorted(path.name for path in (self.run(node) / "checkpoints").glob("*step-*"))

    def files(self, node: int) -> dict[str, bytes]:
        checkpoints = self.run(node) / "checkpoints"
        return {str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.glob("*step-*/*")}

    def lose(self, node: int) -> None:
        shutil.rmtree(self.folder / f"node{node}")


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that nothing happens to, and that keeps no copies."""
    nodes = Nodes(tmp_path_factory.mktemp("undisturbed"))
    nodes.train([0, 1])
    assert nodes.kept(0) == ["step-00000120", "step-00000135"]
    assert not nodes.run(1).exists(), "without copies, nothing is on the other node"
    assert not any("checkpoint/" in line for line in (nodes.run(0) / "metrics.jsonl").read_text().splitlines())
    return nodes.run(0)


def tensors(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / "step-00000135" / "persistables.safetensors")


def assert_same_parameters(found: Path, expected: Path) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


def copies_made(run: Path) -> float:
    """What the last record says of them."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return float([record["checkpoint/copies"] for record in records if "checkpoint/copies" in record][-1])


@pytest.mark.long
def test_a_killed_job_resumes_without_the_disk_of_its_first_node(nodes: Nodes, undisturbed: Path) -> None:
    with Job(nodes.folder / "killed") as job:
        nodes.start(job, [0, 1], COPIES, "--background_checkpoints")
        nodes.wait_for_copy(job)
        job.kill_leftovers()
    nodes.lose(0)
    first, _ = nodes.train([0, 1], COPIES, "--resume")
    assert f"comes from rank 1 ({HOSTS[1]}:" in first.output
    assert "resumed from run/checkpoints/step-" in first.output
    assert_same_parameters(nodes.run(0), undisturbed)
    assert nodes.files(0) == nodes.files(1)
    assert copies_made(nodes.run(0)) >= 2


@pytest.mark.long
def test_others_continue_without_the_first_node_and_it_rejoins_with_an_empty_disk(
    nodes: Nodes, undisturbed: Path
) -> None:
    nodes.train([0, 1], COPIES, "--stop_after_epochs=1")
    assert any(name.endswith("/ranks.safetensors") for name in nodes.files(1)), "what each rank has of its own"
    nodes.lose(0)
    nodes.train([1, 2], COPIES, "--stop_after_epochs=1", "--resume")
    assert nodes.kept(1) == nodes.kept(2) == ["step-00000080", "step-00000090"]
    first, *_ = nodes.train([0, 1], "--checkpoint_copies=3", "--resume")
    assert "resumed from run/checkpoints/step-00000090" in first.output
    assert ", as many as there are" in first.output
    assert_same_parameters(nodes.run(0), undisturbed)
    assert nodes.files(0) == nodes.files(1)


@pytest.mark.long
def test_a_restart_of_the_launcher_takes_the_copy_by_itself(nodes: Nodes) -> None:
    with Job(nodes.folder / "restarted") as job:
        nodes.launch(job, COPIES, "--epochs=10")
        nodes.wait_for_copy(job)
        shutil.rmtree(nodes.run(0) / "checkpoints", ignore_errors=True)
        os.kill(json.loads((nodes.folder / "node1/log/workerend.0.json").read_text())["pid"], signal.SIGKILL)
        ended = job.wait(120.0)
        assert [one.exit_code for one in ended] == [0, 0], job.report()
    assert "restart 1 of 2" in ended[0].output
    assert "resumed from run/checkpoints/step-" in ended[0].output
    assert nodes.files(0) == nodes.files(1) != {}


def test_a_job_that_is_stopped_in_good_order_leaves_its_last_checkpoint_on_both_nodes(nodes: Nodes) -> None:
    with Job(nodes.folder / "stopped") as job:
        nodes.launch(job, COPIES, "--epochs=1000", "--background_checkpoints")
        nodes.wait_for_copy(job)
        job.started[1].process.send_signal(signal.SIGTERM)
        ended = job.wait(60.0)
        assert [one.exit_code for one in ended] == [12, 12], job.report()
    last = nodes.kept(0)[-1]
    assert f"resume from run/checkpoints/{last}" in (nodes.folder / "node0/log/workerlog.0").read_text()
    assert nodes.files(0) == nodes.files(1) != {}
