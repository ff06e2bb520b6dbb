"""A rank of the checkpoint benchmark: blocks of steps without a checkpoint, with one in the background, with a wait.

argv: folder for checkpoints and the result, rounds, steps per block.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import paddle

from fleet_train import fleet, role_maker
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from tools.benchmarks.paddle_network import Network, start_feed
from tools.benchmarks.task import TASKS, Batches

KINDS = ("none", "background", "waiting")
_WARMUP_BLOCKS = 1


class Worker:
    """One rank with its program, and checkpoints for each kind of block."""

    def __init__(self, folder: Path) -> None:
        task = TASKS["mlp"]
        features = paddle.static.data("features", [None, task.sizes[0]], "float32")
        labels = paddle.static.data("labels", [None], "int64")
        self._loss = paddle.nn.functional.cross_entropy(Network(task)(features), labels)
        fleet.distributed_optimizer(paddle.optimizer.Momentum(task.learning_rate, task.momentum)).minimize(self._loss)
        self._exe = paddle.static.Executor(fleet.place())
        self._exe.run(fleet.startup_program, feed=start_feed(task, fleet.startup_program))
        self._batches = Batches(task, fleet.worker_index(), fleet.worker_num())
        self._step = 0
        self._checkpoints = {
            kind: Checkpoints(folder / kind, keep=2, background=kind == "background") for kind in KINDS[1:]
        }

    def block(self, kind: str, steps: int) -> dict[str, Any]:
        """A block of steps, a save after the first: its seconds, how long the training stood still for the save, and
        the seconds of processor time with the write in the background, which do not depend on who else is at work.
        """
        checkpoints = self._checkpoints.get(kind)
        fleet.barrier_worker()
        began, stood, worked = time.perf_counter(), 0.0, time.process_time()
        for number in range(steps):
            self._train()
            if number == 0 and checkpoints is not None:
                before = time.perf_counter()
                state = TrainState(0, self._step, 1, fleet.worker_num(), {}, {}, {}, {})
                assert checkpoints.save(self._exe, state) is not None
                stood = time.perf_counter() - before
        seconds = time.perf_counter() - began
        if checkpoints is not None:
            checkpoints.finish()
        late = time.perf_counter() - began - seconds  # near 0, else part of the write falls outside the block
        worked = time.process_time() - worked
        times = {"seconds": seconds, "processor_seconds": worked, "stood_ms": 1000 * stood, "late_ms": 1000 * late}
        return {"kind": kind} | times

    def _train(self) -> None:
        images, labels = self._batches.at(self._step)
        feed = {"features": images, "labels": labels}
        fetched = self._exe.run(fleet.main_program, feed=feed, fetch_list=[self._loss])
        assert fetched[0] == fetched[0], "the loss is NaN"
        self._step += 1


def main() -> None:
    folder, rounds, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    worker = Worker(folder)
    for kind in KINDS:
        for _ in range(_WARMUP_BLOCKS):
            worker.block(kind, min(steps, 10))
    # A different order in each round, so that no kind is always first or last.
    orders = [KINDS[shift:] + KINDS[:shift] for shift in range(len(KINDS))]
    measured = [[worker.block(kind, steps) for kind in orders[number % len(orders)]] for number in range(rounds)]
    if fleet.is_first_worker():
        newest = sorted((folder / "background" / "checkpoints").glob("step-*"))[-1]
        size = sum(path.stat().st_size for path in newest.iterdir())
        result = {"rounds": measured, "checkpoint_bytes": size, "profile": fleet.profile().name}
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    fleet.shutdown()


if __name__ == "__main__":
    main()
