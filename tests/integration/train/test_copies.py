"""Checkpoints on several nodes as real processes: nodes with their own folders lose one of them."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python
from tests.support.ranks import stock_environs

HOSTS = ("127.0.0.2", "127.0.0.3")
# 45 steps in an epoch; dropout, momentum and a decaying rate are what a resume could get wrong.
RECIPE = ("--model=mlp", "--data=digits", "--epochs=2", "--batch_size=16", "--seed=3", "--checkpoint_every_steps=20")
COPIES = ("--checkpoint_copies=2", "--background_checkpoints")


class Nodes:
    """Two machines; ``node<i>`` below ``folder`` is the disk of machine i."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._profile = folder / "profile.yaml"  # each rank has errors of its own, which a resume needs
        self._profile.write_text("description: For a test.\nextends: powersgd\npowersgd_start_step: 3\n")

    def train_flags(self, *flags: str) -> list[str]:
        return ["-m", "fleet_train", "train", *RECIPE, f"--strategy={self._profile}", "--output_dir=run", *flags]

    def start(self, job: Job, *flags: str) -> None:
        """One rank on each node."""
        for node, environ in enumerate(stock_environs([1, 1])):
            command = python(*self.train_flags(*flags))
            job.start(f"node{node}", command, clean_environ(environ), cwd=self.folder / f"node{node}")

    def train(self, name: str, *flags: str) -> list[Ended]:
        with Job(self.folder / name) as job:
            self.start(job, *flags)
            ended = job.wait(120.0, 40.0)
            assert [one.exit_code for one in ended] == [0, 0], job.report()
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


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def tensors(nodes: Nodes) -> dict[str, bytes]:
    found = load_file(nodes.run(0) / "checkpoints" / "step-00000090" / "persistables.safetensors")
    return {name: value.tobytes() for name, value in found.items()}


def records(nodes: Nodes, tag: str) -> list[float]:
    lines = map(json.loads, (nodes.run(0) / "metrics.jsonl").read_text().splitlines())
    return [float(line[tag]) for line in lines if tag in line]


@pytest.mark.long
def test_a_killed_job_resumes_without_the_disk_of_its_first_node(nodes: Nodes) -> None:
    nodes.train("undisturbed")
    assert nodes.kept(0) == ["step-00000080", "step-00000090"]
    assert not nodes.run(1).exists(), "without copies, nothing is on the other node"
    assert records(nodes, "checkpoint/copies") == []
    undisturbed = tensors(nodes)
    shutil.rmtree(nodes.run(0))

    with Job(nodes.folder / "killed") as job:
        nodes.start(job, *COPIES)
        nodes.wait_for_copy(job)
        job.kill_leftovers()
    assert any(name.endswith("/ranks.safetensors") for name in nodes.files(1)), "what each rank has of its own"
    shutil.rmtree(nodes.run(0))
    first, _ = nodes.train("resumed", *COPIES, "--resume")
    assert f"comes from rank 1 ({HOSTS[1]}:" in first.output
    assert "resumed from run/checkpoints/step-" in first.output
    assert tensors(nodes) == undisturbed
    assert nodes.files(0) == nodes.files(1)
    assert records(nodes, "checkpoint/copies")[-1] >= 2


def test_a_job_that_is_stopped_in_good_order_leaves_its_last_checkpoint_on_both_nodes(nodes: Nodes) -> None:
    launch = [f"--cluster_node_ips={','.join(HOSTS)}", f"--started_port={free_ports(6, HOSTS)}", "--max_restarts=2"]
    with Job(nodes.folder / "stopped") as job:
        for node, host in enumerate(HOSTS):
            command = python("-m", "fleet_train", "launch", *launch, f"--node_ip={host}")
            command += nodes.train_flags(*COPIES, "--epochs=1000")
            job.start(f"node{node}", command, clean_environ(), cwd=nodes.folder / f"node{node}")
        nodes.wait_for_copy(job)
        job.started[1].process.send_signal(signal.SIGTERM)
        ended = job.wait(60.0)
        assert [one.exit_code for one in ended] == [12, 12], job.report()
    last = nodes.kept(0)[-1]
    assert f"resume from run/checkpoints/{last}" in (nodes.folder / "node0/log/workerlog.0").read_text()
    assert nodes.files(0) == nodes.files(1) != {}
