"""A rank of the benchmark of strategies. argv: assignment, and the rank where no launcher of ours gives it.

As a script for ``recommend`` (argv: ``task``, its name) it trains a task of the benchmarks until it is ended.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fleet_train

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from fleet_train.files import publish_where_linked
from tools.benchmarks.contestants import ALONE, Contestant, parse
from tools.benchmarks.tasks import TASKS, Batches, Judge, Task

if TYPE_CHECKING:
    from tools.benchmarks.trainees import Trainee

INTERFACE = "eth0"
# Steps that build the program and open connections: seconds of training leave them out.
SETUP_STEPS = 3
# After the last rank has finished a step, sockets may still hold bytes of it.
_DRAIN_SECONDS = 0.05


@dataclass(frozen=True)
class Assignment:
    """A worker's input: the job, and the folder that all ranks share."""

    task: Task
    contestant: Contestant
    folder: str
    node_num: int
    ranks_per_node: int
    timeout_seconds: float

    @property
    def world_size(self) -> int:
        return self.node_num * self.ranks_per_node

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self) | {"contestant": self.contestant.name}), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Assignment:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Assignment(**(content | {"task": Task(**content["task"]), "contestant": parse(content["contestant"])}))


@dataclass(frozen=True)
class Window:
    """The timed steps ``first`` .. ``last`` - 1, counted from 0; ``whole`` when they are whole periods of a strategy
    that is past its own start.
    """

    first: int
    last: int
    whole: bool

    @property
    def steps(self) -> int:
        return self.last - self.first


def window_of(facts: Mapping[str, Any], warmup_steps: int, steps: int) -> Window:
    """The last whole periods after the strategy's warm-up; all steps but the first if there is no whole period."""
    period = max(1, facts.get("period_steps", 1))
    settled = max(warmup_steps, facts.get("settles_after", 0))
    periods = (steps - settled) // period
    if periods < 1:
        return Window(warmup_steps, steps, whole=False)
    return Window(steps - periods * period, steps, whole=True)


def wait_for_all(folder: Path, ranks: int, rank: int, number: int, timeout_seconds: float) -> None:
    """A barrier over files in the shared folder: it sends nothing that is measured."""
    deadline = time.monotonic() + timeout_seconds
    (folder / f"barrier-{number}-{rank}").touch()
    for other in range(ranks):
        while not (folder / f"barrier-{number}-{other}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {other} did not reach barrier {number} of the benchmark")
            time.sleep(0.001)


def interface_bytes() -> int:
    """Bytes that the node has sent, by the counter of its interface: one header per piece of up to 64 KiB that TCP
    hands over. Fast enough to be read in every step."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def wire_bytes() -> int:
    """The same by the rate limit, which counts a header per packet of the link's size; 0 without one. Takes
    milliseconds."""
    command = ["tc", "-s", "qdisc", "show", "dev", INTERFACE]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    found = re.search(r"Sent ([0-9]+) bytes", shown) if "qdisc tbf" in shown else None
    return int(found[1]) if found else 0


def run(trainee: Trainee, assignment: Assignment) -> None:
    """Train the whole task without interruption, and write this rank's record and weights.

    Where an evaluation is due the weights are copied, with the clock stopped and nobody waited for: what a strategy
    sends beside local steps has these milliseconds for nothing, and they are in the record. Bytes of a step are of the
    timed window: what is under way where whole periods begin is under way where they end, and is counted once.
    """
    task, folder, ranks, rank = assignment.task, Path(assignment.folder), assignment.world_size, trainee.rank
    batches = [Batches(task, rank, ranks).at(step) for step in range(task.steps)]
    # Memory for the copies is taken and touched before the training: a copy that takes what the step has just freed
    # makes the next step touch new pages, which costs as much as the step itself.
    facts = trainee.facts()
    steps = task.evaluated_at(facts.get("period_steps", 1))
    kept = {step: [np.array(value) for value in trainee.weights()] for step in steps}
    window = window_of(facts, task.warmup_steps, task.steps)
    seconds, after, paused = [], [0], 0.0
    wait_for_all(folder, ranks, rank, 1, assignment.timeout_seconds)
    interface, wire = interface_bytes(), wire_bytes()
    for step, (inputs, labels) in enumerate(batches, 1):
        began = time.perf_counter()
        trainee.step(inputs, labels)
        ended = time.perf_counter()
        seconds.append(ended - began)
        after.append(interface_bytes() - interface)
        if step in kept:
            for copy, value in zip(kept[step], trainee.weights(), strict=True):
                np.copyto(copy, value)
            paused += time.perf_counter() - ended
    wait_for_all(folder, ranks, rank, 2, assignment.timeout_seconds)
    time.sleep(_DRAIN_SECONDS)
    whole, wire = interface_bytes() - interface, wire_bytes() - wire
    sent = (after[window.last] - after[window.first]) / window.steps
    record = {
        "step_ms": 1e3 * sum(seconds[window.first : window.last]) / window.steps,
        "timed_steps": window.steps,
        "whole_periods": window.whole,
        "sent_bytes": sent,
        "wire_bytes": sent * wire / whole if whole else 0.0,
        "trained_seconds": {step: sum(seconds[SETUP_STEPS:step]) for step in kept},
        "paused_share": paused / sum(seconds),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "facts": facts,
    }
    for step, weights in kept.items():
        np.savez(folder / f"weights-{step}-{rank}.npz", *weights)
    publish_where_linked(folder / f"rank{rank}.json", json.dumps(record).encode())
    wait_for_all(folder, ranks, rank, 3, assignment.timeout_seconds)  # no rank ends while another may still need it


def of_a_turn(assignment: Assignment, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a record keeps of a job: means over its ranks and nodes, and ``evaluations``: steps, seconds, score of the
    mean of all ranks' weights. Replicas of strategies with local steps differ, and are judged together; of ranks that
    send nothing ``each`` has the mean of the scores that they have for themselves."""
    nodes = ranks[:: assignment.ranks_per_node]
    found: dict[str, Any] = {"evaluations": []}
    found |= {name: round(float(np.mean([rank[name] for rank in ranks])), 4) for name in ("step_ms", "paused_share")}
    found |= {name: round(float(np.mean([node[name] for node in nodes])), 1) for name in ("sent_bytes", "wire_bytes")}
    found |= {name: ranks[0][name] for name in ("timed_steps", "whole_periods", "facts")}
    found |= {"peak_memory_mb": round(max(rank["peak_memory_mb"] for rank in ranks))}
    if assignment.task.score is None:
        return found
    judge, is_alone, each = Judge(assignment.task), assignment.contestant.kind == ALONE, []
    for step in sorted(map(int, ranks[0]["trained_seconds"])):
        files = [np.load(Path(assignment.folder, f"weights-{step}-{rank}.npz")) for rank in range(len(ranks))]
        own = [[file[name] for name in files[0].files] for file in files]
        seconds = round(float(np.mean([rank["trained_seconds"][str(step)] for rank in ranks])), 4)
        mean = [np.mean(values, axis=0) for values in zip(*own, strict=True)]
        found["evaluations"].append((step, seconds, round(judge(mean), 5)))
        if is_alone:
            each.append((step, seconds, round(float(np.mean([judge(weights) for weights in own])), 5)))
    return found | ({"each": each} if is_alone else {})


def train_for_recommend(task: Task) -> None:
    from tools.benchmarks.trainees import StaticTrainee

    trainee = StaticTrainee(task)
    batches = Batches(task, trainee.rank, fleet_train.fleet.worker_num())
    for step in range(2000):
        trainee.step(*batches.at(step))


def main() -> None:
    if sys.argv[1] == "task":
        train_for_recommend(TASKS[sys.argv[2]])
        return
    from tools.benchmarks.trainees import trainee_of

    assignment = Assignment.read(Path(sys.argv[1]))
    run(trainee_of(assignment, int(sys.argv[2]) if len(sys.argv) > 2 else None), assignment)


if __name__ == "__main__":
    main()
