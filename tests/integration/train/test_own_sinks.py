"""A user's sink in a job of two ranks: only rank 0 calls it, and an error in it does not end the job."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

SCRIPT = """
import numpy as np
import paddle
from fleet_train import fleet, role_maker
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.train import Trainer, TrainerSettings

class Said:
    def write(self, step, scalars):
        print("written", step, "train/loss" in scalars)
    def close(self):
        print("closed")

class Broken(Said):
    def write(self, step, scalars):
        raise RuntimeError("the database is away")

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
x = paddle.static.data("features", [-1, 6], "float32")
y = paddle.static.data("labels", [-1], "int64")
loss = paddle.nn.functional.cross_entropy(paddle.nn.Linear(6, 3)(x), y)
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
sampler = ShardedBatchSampler(40, 4, fleet.worker_index(), fleet.worker_num())
loader = BatchLoader(synthetic(40, (6,), 3).train, sampler)
outcome = Trainer(exe, loss, loader, TrainerSettings(epochs=2, log_every=1), sinks=[Broken(), Said()]).fit()
print("steps", outcome.steps)
"""


def test_only_rank_0_calls_them_and_a_broken_one_ends_nothing(tmp_path: Path) -> None:
    zero, one = (rank.output for rank in run_ranks(SCRIPT, 2, folder=tmp_path).ranks)
    assert zero.count("written") == 10
    assert zero.count("closed") == 2
    assert zero.count("Broken.write: RuntimeError: the database is away") == 1
    assert "written" not in one
    assert "closed" not in one
    assert "steps 10" in zero
    assert "steps 10" in one
