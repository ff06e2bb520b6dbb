"""The loop that every rank of every contestant runs: train, time, count bytes, and write the weights for evaluation."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_train.files import publish_where_linked
from tools.benchmarks.figures import window_of
from tools.benchmarks.networks import Batches, Task, Weights, judged

INTERFACE = "eth0"
# After the last rank has finished a step, sockets may still hold bytes of it.
_DRAIN_SECONDS = 0.05


class Trainee(Protocol):
    """One rank of one framework."""

    def step(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Train on this rank's share of a batch; returns its loss."""

    def weights(self) -> Weights:
        """This rank's weights, in the order of ``start_weights``."""

    def facts(self) -> dict[str, Any]:
        """Versions, and the strategy's own figures."""


@dataclass(frozen=True)
class Assignment:
    """A worker's input: the job, and the folder that all ranks share."""

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


def wait_for_all(assignment: Assignment, rank: int, number: int) -> None:
    """A barrier over files in the shared folder: it sends nothing that is measured."""
    folder, deadline = Path(assignment.folder), time.monotonic() + assignment.timeout_seconds
    (folder / f"barrier-{number}-{rank}").touch()
    for other in range(assignment.world_size):
        while not (folder / f"barrier-{number}-{other}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {other} did not reach barrier {number} of the benchmark")
            time.sleep(0.001)


def interface_bytes() -> int:
    """Bytes that the node has sent, by the counter of its interface: one header per piece of up to 64 KiB that TCP
    hands over. Fast enough to be read in every step."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def wire_bytes() -> int:
    """The same by the rate limit, which counts a header per packet of the link's size. Takes milliseconds."""
    command = ["tc", "-s", "qdisc", "show", "dev", INTERFACE]
    return limiter_bytes(subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout)


def limiter_bytes(shown: str) -> int:
    """The bytes in the output of ``tc -s qdisc show``; 0 without a limiter."""
    found = re.search(r"Sent ([0-9]+) bytes", shown) if "qdisc tbf" in shown else None
    return int(found[1]) if found else 0


def run(trainee: Trainee, assignment: Assignment, rank: int) -> None:
    """Train the whole task without interruption, and write this rank's record and weights.

    Every ``evaluate_every`` steps and at the end the weights are copied, with the clock stopped and nobody waited for:
    what a strategy sends beside local steps has these milliseconds for nothing, and they are in the record. The bytes
    sent so far are read when a step ends, also after the last: what is under way where whole periods begin is under
    way where they end, and is counted once. Only these two counts are recorded.
    """
    task, folder = assignment.task, Path(assignment.folder)
    batches = [Batches(task, rank, assignment.world_size).at(step) for step in range(task.steps)]
    # Memory for the copies is taken and touched before the training: a copy that takes what the step has just freed
    # makes the next step touch new pages, which costs as much as the step itself.
    steps = [*range(task.evaluate_every, task.steps, task.evaluate_every), task.steps]
    kept = {step: [np.array(value) for value in trainee.weights()] for step in steps}
    facts = trainee.facts()
    window = window_of(facts, task.warmup_steps, task.steps)
    seconds, after, paused = [], [0], 0.0
    wait_for_all(assignment, rank, 1)
    interface, wire = interface_bytes(), wire_bytes()
    for step, (features, labels) in enumerate(batches, 1):
        began = time.perf_counter()
        trainee.step(features, labels)
        ended = time.perf_counter()
        seconds.append(round(ended - began, 6))
        after.append(interface_bytes() - interface)
        if step in kept:
            for copy, value in zip(kept[step], trainee.weights(), strict=True):
                np.copyto(copy, value)
            paused += time.perf_counter() - ended
    wait_for_all(assignment, rank, 2)
    time.sleep(_DRAIN_SECONDS)
    record = {
        "rank": rank,
        "step_seconds": seconds,
        "interface_after": [[step, after[step]] for step in (window.first, window.last)],
        "sent": {"interface": interface_bytes() - interface, "wire": wire_bytes() - wire},
        "paused_seconds": paused,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "facts": facts,
    }
    for step, weights in kept.items():
        np.savez(folder / f"weights-{step}-{rank}.npz", *weights)
    publish_where_linked(folder / f"rank{rank}.json", json.dumps(record).encode())
    wait_for_all(assignment, rank, 3)  # no rank ends while another may still need it


def evaluated(task: Task, folder: Path, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of all ranks, the first one with accuracies and test losses by step: of the mean of all ranks'
    weights, also of running statistics. Replicas of strategies with local steps differ, and are judged together."""
    accuracies, losses = [], []
    for step in sorted({int(path.name.split("-")[1]) for path in folder.glob("weights-*.npz")}):
        files = [np.load(folder / f"weights-{step}-{rank}.npz") for rank in range(len(ranks))]
        means = [np.mean([file[name] for file in files], axis=0) for name in files[0].files]
        accuracy, loss = judged(task, means)
        accuracies.append((step, accuracy))
        losses.append((step, loss))
    first = dict(ranks[0]) | {"accuracies": accuracies, "test_losses": losses}
    return [first, *(dict(rank) | {"accuracies": [], "test_losses": []} for rank in ranks[1:])]
