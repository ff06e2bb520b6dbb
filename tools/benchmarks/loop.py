"""The loop that every contestant runs in each of its ranks: train, time, count, evaluate with the clock stopped."""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tools.benchmarks.link import Sent, sent_so_far
from tools.benchmarks.task import Batches, Task, Weights, test_accuracy

# After the last rank has finished a step, the kernel may still have bytes of it in a socket's buffer.
_DRAIN_SECONDS = 0.05


class Trainee(Protocol):
    """One rank of one framework."""

    def step(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Train on this rank's share of a batch; returns its loss."""

    def weights(self) -> Weights:
        """This rank's weights now, in the order of ``start_weights``."""

    def facts(self) -> dict[str, Any]:
        """Versions, and what the strategy says about itself."""


@dataclass(frozen=True)
class Assignment:
    """What a worker is told: the job, its place in it, and the folder that all ranks share."""

    task: Task
    contestant: str
    folder: str
    node_num: int
    ranks_per_node: int
    timeout_seconds: float
    start_iteration: int  # of PyTorch's hooks that begin with plain steps

    @property
    def world_size(self) -> int:
        return self.node_num * self.ranks_per_node

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Assignment:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Assignment(**(content | {"task": Task(**content["task"])}))


class Meeting:
    """A barrier over files in the shared folder: it sends nothing, so it can stand between measurements."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self._folder = Path(assignment.folder)
        self._ranks = range(assignment.world_size)
        self._rank = rank
        self._timeout_seconds = assignment.timeout_seconds
        self._count = 0

    def meet(self) -> None:
        self._count += 1
        (self._folder / f"meet-{self._count}-{self._rank}").touch()
        deadline = time.monotonic() + self._timeout_seconds
        for rank in self._ranks:
            while not (self._folder / f"meet-{self._count}-{rank}").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not come to meeting {self._count} of the benchmark")
                time.sleep(0.001)

    def averaged(self, weights: Weights) -> Weights | None:
        """On rank 0 the mean of all ranks' weights, else None. Strategies with local steps are judged by their mean."""
        mine = self._folder / f"weights-{self._rank}.npz"
        np.savez(mine, *weights)
        self.meet()
        if self._rank != 0:
            return None
        files = [np.load(self._folder / f"weights-{rank}.npz") for rank in self._ranks]
        return [np.mean([file[name] for file in files], axis=0) for name in files[0].files]


def run(trainee: Trainee, assignment: Assignment, rank: int) -> None:
    """Train the whole task and write this rank's record."""
    task = assignment.task
    meeting = Meeting(assignment, rank)
    batches = [Batches(task, rank, assignment.world_size).at(step) for step in range(task.steps)]
    step_seconds: list[float] = []
    losses: list[float] = []
    accuracies: list[tuple[int, float]] = []
    sent = Sent()
    for first, last in _stretches(task):
        meeting.meet()
        before = sent_so_far()
        for features, labels in batches[first:last]:
            began = time.perf_counter()
            losses.append(trainee.step(features, labels))
            step_seconds.append(time.perf_counter() - began)
        meeting.meet()
        time.sleep(_DRAIN_SECONDS)
        sent += (sent_so_far() - before) if first >= task.warmup_steps else Sent()
        mean = meeting.averaged(trainee.weights())
        if mean is not None:
            accuracies.append((last, test_accuracy(task, mean)))
    record = {
        "rank": rank,
        "step_seconds": step_seconds,
        "losses": losses,
        "accuracies": accuracies,
        "sent": asdict(sent),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "facts": trainee.facts(),
    }
    _publish(record, Path(assignment.folder) / f"rank{rank}.json")
    meeting.meet()  # nobody leaves while a peer may still need it


def _stretches(task: Task) -> Iterator[tuple[int, int]]:
    """Steps between two evaluations; the end of the warm-up is a boundary too."""
    edges = sorted({0, task.warmup_steps, task.steps, *range(0, task.steps, task.evaluate_every)})
    yield from itertools.pairwise(edges)


def _publish(record: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record), encoding="utf-8")
    os.replace(beside, path)
