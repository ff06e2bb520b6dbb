"""A rank of the benchmark of shares: trains a task on random batches, and notes the end of each step and its samples.

shares_rank.py KIND TASK JOINT STEPS FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleet_train import fleet
from fleet_train.files import publish_where_linked
from tools.benchmarks.contestants import OURS, TORCH, parse
from tools.benchmarks.networks import CLASSES
from tools.benchmarks.ranks import Assignment
from tools.benchmarks.tasks import BYTES, CONTEXT, TASKS, VOCABULARY, Inputs, Task
from tools.benchmarks.trainees import StaticTrainee, TorchTrainee

if TYPE_CHECKING:
    from tools.benchmarks.trainees import Trainee

_TIMEOUT_SECONDS = 300.0


def trainee_of(kind: str, task: Task, rank: int, ranks: int, folder: str) -> Trainee:
    if kind.startswith(TORCH):
        return TorchTrainee(Assignment(task, parse(kind), folder, ranks, 1, _TIMEOUT_SECONDS), rank)
    return StaticTrainee(task, OURS)


def random_batch(task: Task, random: np.random.Generator, size: int) -> tuple[Inputs, Inputs]:
    if task.name == BYTES:
        text = random.integers(0, VOCABULARY, (size, CONTEXT + 1))
        return text[:, :-1], text[:, 1:]
    return random.standard_normal((size, 1, 32, 32), dtype=np.float32), random.integers(0, CLASSES, size)


def main(kind: str, name: str, joint: int, steps: int, folder: str) -> None:
    rank, ranks = (int(os.environ.get(each, default)) for each, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if kind == OURS:
        rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    task = replace(TASKS[name], global_batch_size=joint)
    trainee = trainee_of(kind, task, rank, ranks, folder)
    random, notes = np.random.default_rng(rank), []
    for _ in range(steps):
        size = fleet.batch_size(joint) if kind == OURS else joint // ranks
        trainee.step(*random_batch(task, random, size))
        notes.append([time.monotonic(), size])
        publish_where_linked(Path(folder) / f"notes.{rank}.json", json.dumps(notes).encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
