"""The loop that every rank of every contestant runs: train, time, count bytes, and evaluate afterwards."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tools.benchmarks.link import CollectiveSpec, interface_bytes, sent_so_far
from tools.benchmarks.networks import judged
from tools.benchmarks.task import Batches, Task, Weights

# After the last rank has finished a step, sockets may still hold bytes of it.
_DRAIN_SECONDS = 0.05


class Trainee(Protocol):
    """One rank of one framework."""

    def step(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Train on this rank's share of a batch; returns its loss."""

    def weights(self) -> Weights:
        """A copy of this rank's weights, in the order of ``start_weights``."""

    def facts(self) -> dict[str, Any]:
        """Versions, and the strategy's own figures."""


@dataclass(frozen=True)
class Assignment:
    """A worker's input: the job, its rank, and the folder that all ranks share."""

    task: Task
    contestant: str
    folder: str
    node_num: int
    ranks_per_node: int
    timeout_seconds: float
    start_iteration: int  # plain steps before PyTorch's hooks, unless the contestant's name gives them

    @property
    def world_size(self) -> int:
        return self.node_num * self.ranks_per_node

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Assignment:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Assignment(**(content | {"task": Task(**content["task"])}))


class FileBarrier:
    """A barrier over files in the shared folder: it sends nothing that is measured."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self._folder = Path(assignment.folder)
        self._ranks = range(assignment.world_size)
        self._rank = rank
        self._timeout_seconds = assignment.timeout_seconds
        self._count = 0

    def wait(self) -> None:
        self._count += 1
        (self._folder / f"barrier-{self._count}-{self._rank}").touch()
        deadline = time.monotonic() + self._timeout_seconds
        for rank in self._ranks:
            while not (self._folder / f"barrier-{self._count}-{rank}").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not reach barrier {self._count} of the benchmark")
                time.sleep(0.001)

    def averaged(self, weights: Weights, on_rank: int) -> Weights | None:
        """On one rank the mean of all ranks' weights, else None."""
        np.savez(self._folder / f"weights-{on_rank}-{self._rank}.npz", *weights)
        self.wait()
        if self._rank != on_rank:
            return None
        files = [np.load(self._folder / f"weights-{on_rank}-{rank}.npz") for rank in self._ranks]
        return [np.mean([file[name] for file in files], axis=0) for name in files[0].files]


@dataclass
class Training:
    """The results of one rank's training; ``seconds`` and ``interface`` (bytes sent so far) by step.

    ``interface`` is read when a step ends, also after the last: what is under way where whole periods begin is under
    way where they end, and is counted once. ``sent`` has everything, also what ends after the training.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    interface: list[int] = field(default_factory=list)
    snapshots: list[tuple[int, Weights]] = field(default_factory=list)
    paused_seconds: float = 0.0
    sent: CollectiveSpec = field(default_factory=CollectiveSpec)


def run(trainee: Trainee, assignment: Assignment, rank: int) -> None:
    """Train the whole task without interruption, then evaluate its snapshots, and write this rank's record."""
    barrier = FileBarrier(assignment, rank)
    training = train(trainee, assignment, rank, barrier)
    tests = evaluate(training.snapshots, assignment, barrier)
    record = {
        "rank": rank,
        "step_seconds": training.seconds,
        "losses": training.losses,
        "interface_after": training.interface,
        "sent": asdict(training.sent),
        "paused_seconds": training.paused_seconds,
        "accuracies": [(step, accuracy) for step, accuracy, _ in tests],
        "test_losses": [(step, loss) for step, _, loss in tests],
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "facts": trainee.facts(),
    }
    _publish(record, Path(assignment.folder) / f"rank{rank}.json")
    barrier.wait()  # no rank ends while another may still need it


def train(trainee: Trainee, assignment: Assignment, rank: int, barrier: FileBarrier) -> Training:
    """Every ``evaluate_every`` steps and at the end the weights are copied, with the clock stopped and nobody waited
    for: what a strategy sends beside local steps has these milliseconds for nothing, and they are in the record.
    """
    task, done = assignment.task, Training()
    batches = [Batches(task, rank, assignment.world_size).at(step) for step in range(task.steps)]
    # Memory for the copies is taken and touched before the training: a copy that takes what the step has just freed
    # makes the next step touch new pages, which costs as much as the step itself.
    kept = {
        step: [value.copy() for value in trainee.weights()]
        for step in (*range(task.evaluate_every, task.steps, task.evaluate_every), task.steps)
    }
    barrier.wait()
    before = sent_so_far()
    for step, (features, labels) in enumerate(batches, 1):
        began = time.perf_counter()
        loss = trainee.step(features, labels)
        ended = time.perf_counter()
        done.seconds.append(round(ended - began, 6))
        done.losses.append(round(loss, 6))
        done.interface.append(interface_bytes() - before.interface)
        if step in kept:
            for copy, value in zip(kept[step], trainee.weights(), strict=True):
                np.copyto(copy, value)
            done.snapshots.append((step, kept[step]))
            done.paused_seconds += time.perf_counter() - ended
    barrier.wait()
    time.sleep(_DRAIN_SECONDS)
    done.sent = sent_so_far() - before
    return done


def evaluate(
    snapshots: Sequence[tuple[int, Weights]], assignment: Assignment, barrier: FileBarrier
) -> list[tuple[int, float, float]]:
    """Step, accuracy and test loss of the mean of all ranks' weights, for this rank's share of the snapshots.

    The mean, also of running statistics: replicas of strategies with local steps differ, and are judged together.
    """
    found: list[tuple[int, float, float]] = []
    size = assignment.world_size
    for first in range(0, len(snapshots), size):
        mine: tuple[int, Weights] | None = None
        for on_rank, (step, weights) in enumerate(snapshots[first : first + size]):
            mean = barrier.averaged(weights, on_rank)
            mine = mine if mean is None else (step, mean)
        if mine is not None:
            found.append((mine[0], *judged(assignment.task, mine[1])))
        barrier.wait()
    return found


def _publish(record: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record), encoding="utf-8")
    os.replace(beside, path)
