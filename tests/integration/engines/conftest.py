"""Engines start the same script: undisturbed, and with a rank that is killed once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Job

SCRIPT = Path(__file__).with_name("train.py")
STEPS, KILLED_AFTER, SAVED_BEFORE = 40, 25, 20


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "job") as job:
        yield job


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
