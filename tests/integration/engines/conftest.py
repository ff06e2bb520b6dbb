"""Engines start the same script with a rank that is killed once; a launcher alone starts it undisturbed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import ports
from tests.support.processes import Job, clean_environ, python
from tools.lab import Lab, Node

SCRIPT = Path(__file__).with_name("train.py")
STEPS, KILLED_AFTER, SAVED_BEFORE = 20, 12, 10
Machines = Sequence[Node]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "job") as job:
        yield job


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Lab(2, "none") as lab:
        yield lab.nodes


def train_undisturbed(folder: Path, ranks: int, *, launched: bool = True) -> Path:
    """Where as many ranks have trained on this machine alone, of a launcher or each started by itself."""
    with Job(folder) as job:
        if launched:
            launch = python("-m", "fleet_train", "launch", f"--nproc_per_node={ranks}", str(SCRIPT))
            job.start("launcher", launch, clean_environ())
        else:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_ports(ranks)), "WORLD_SIZE": str(ranks)}
            place["LOCAL_WORLD_SIZE"] = str(ranks)
            for rank in map(str, range(ranks)):
                environ = clean_environ(place | {"RANK": rank, "LOCAL_RANK": rank})
                job.start(f"rank{rank}", python(str(SCRIPT)), environ)
        assert {one.exit_code for one in job.wait(120.0)} == {0}, job.report()
    return folder


def final_files(folder: Path) -> dict[str, bytes]:
    """The files of tensors that the training has ended with."""
    last = folder / "checkpoints" / str(STEPS)
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


def assert_equal_bits(one: Path, other: Path) -> None:
    ours, theirs = final_files(one), final_files(other)
    assert sum(map(len, ours.values())) > 16 * 32 * 4 * 2  # the layer and its momentum
    assert ours == theirs


def places(output: str) -> list[tuple[int, int, int, int]]:
    """(rank, ranks, nodes, first step) of each process that has begun to train, sorted."""
    found = re.findall(r"rank (\d+) of (\d+) on (\d+) nodes goes on after step (\d+)", output)
    return sorted((int(a), int(b), int(c), int(d)) for a, b, c, d in found)
