"""Run as several ranks by test_move_ranks.py: trains with `Trainer` and reports the samples of each epoch.

argv: where the run is, and where it ends: "step", in the step that follows the first, of which it has a checkpoint;
"epoch", with the first epoch, in the middle of a step; "never". A third word, such as "021", gives each rank a machine
with a list of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.data import BatchLoader, OwnDataSampler, ShardedBatchSampler
from fleet_train.data.datasets import ArrayDataset
from fleet_train.profile import Profile
from fleet_train.train.checkpoint.manager import Checkpoints
from fleet_train.train.settings import TrainerSettings
from fleet_train.train.trainer import Trainer
from tests.support.worker import report

SAMPLES, EPOCHS, MERGED = 50, 2, 4


class Recording(BatchLoader):
    """Remembers the samples of every batch that the trainer has taken, by epoch. Sample i has the value i."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken: dict[int, list[int]] = {}
        self.ends_after_a_step = False

    def consumed_after(self, steps: int) -> int:
        # The trainer asks this once after each batch, `steps` of which the epoch has had then.
        if self.ends_after_a_step and steps > MERGED:
            report(fleet.worker_index(), taken=self.taken)
            sys.exit()  # without a goodbye: the checkpoint may still be being written
        self.taken.setdefault(self.sampler.epoch, []).extend(int(i) for i in self.indices(steps - 1))
        return super().consumed_after(steps)


def build() -> tuple[Any, Any]:
    features = paddle.static.data("features", [None, 1], "float32")
    labels = paddle.static.data("labels", [None], "int64")
    hidden = paddle.tanh(paddle.nn.Linear(1, 40)(features / SAMPLES))
    loss = paddle.nn.functional.cross_entropy(paddle.nn.Linear(40, 2)(hidden), labels)
    # The 13 batches that each of two ranks has in an epoch end in the middle of an update.
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), Profile(accumulate_steps=MERGED)).minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    return exe, loss


def main() -> None:
    output, ends = Path(sys.argv[1]), sys.argv[2]
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    rank, world = fleet.worker_index(), fleet.worker_num()
    exe, loss = build()
    machines = sys.argv[3] if len(sys.argv) > 3 else ""
    values = np.arange(SAMPLES) + (int(machines[rank]) if machines else 0)
    data = ArrayDataset("numbers", values.astype("float32")[:, None], (values % 2).astype("int64"), 2)
    sampler: ShardedBatchSampler | OwnDataSampler = ShardedBatchSampler(SAMPLES, 2, rank, world, seed=3)
    if machines:
        sampler = OwnDataSampler(SAMPLES, 2, total_ranks=world, seed=3)
        sampler.agree(fleet.gather(sampler.proposed_steps))
    loader = Recording(data, sampler)
    loader.ends_after_a_step = ends == "step"
    checkpoints = Checkpoints(output, background=True)
    settings = TrainerSettings(
        epochs=EPOCHS,
        checkpoint_every_steps=1 if ends == "step" else 0,
        stop_after_epochs=1 if ends == "epoch" else None,
    )
    trainer = Trainer(exe, loss, loader, settings, checkpoints=checkpoints)
    found = checkpoints.newest()
    if found is not None:
        trainer.resume(found)
    trainer.fit()
    report(rank, taken=loader.taken)
    fleet.shutdown()


if __name__ == "__main__":
    main()
