"""A program of your own in the training loop: a network learns y = sin(3 x) from noisy samples.

The loop provides sharded data, evaluation over all ranks, checkpoints, resume, graceful shutdown on SIGTERM, metrics.
Any static program works; this one has two feeds and a loss, and does not depend on the number of ranks.

    fleet_train launch --nproc_per_node=2 tools/examples/own_program.py --output_dir runs/own
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.cluster.environment import attempt
from fleet_train.data import BatchLoader, EvaluationSampler, ShardedBatchSampler
from fleet_train.train import Checkpoints, ProgramEvaluator, Trainer, TrainerSettings
from fleet_train.train.metrics import open_sinks
from fleet_train.train.progress import make_progress

EPOCHS, BATCH_SIZE, SEED = 20, 16, 0


class Curve:
    """Samples of the curve, with the interface that a loader needs."""

    sample_shape = (1,)
    num_classes = 0  # no classification

    def __init__(self, num_samples: int, noise: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.name, self.num_samples = "curve", num_samples
        self._x = random.uniform(-1, 1, (num_samples, 1)).astype("float32")
        self._y = np.sin(3 * self._x) + noise * random.standard_normal((num_samples, 1), dtype="float32")

    def arrays(self, indices: Any) -> dict[str, Any]:
        return {"x": self._x[indices], "y": self._y[indices]}


def squared_errors() -> Any:
    """One per sample of the batch, in the current program."""
    x = paddle.static.data("x", [None, 1], "float32")
    y = paddle.static.data("y", [None, 1], "float32")
    hidden = paddle.nn.functional.tanh(paddle.nn.Linear(1, 32)(x))
    return paddle.square(paddle.nn.Linear(32, 1)(hidden) - y)


flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("--output_dir", type=Path, default=Path("runs/own"))
flags.add_argument("--epochs", type=int, default=EPOCHS)
flags.add_argument("--resume", action="store_true")
args = flags.parse_args()

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
rank, ranks = fleet.worker_index(), fleet.worker_num()
train_data, test_data = Curve(1000, noise=0.1, seed=1), Curve(201, noise=0.0, seed=2)
loader = BatchLoader(train_data, ShardedBatchSampler(train_data.num_samples, BATCH_SIZE, rank, ranks, seed=SEED))
test_loader = BatchLoader(test_data, EvaluationSampler(test_data.num_samples, 64, rank, ranks))

# The training program. Every rank builds the same one; fleet broadcasts rank 0's initial values.
paddle.seed(SEED)
training, startup, evaluation = (paddle.static.Program() for _ in range(3))
with paddle.static.program_guard(training, startup), paddle.utils.unique_name.guard():
    loss = squared_errors().mean()
    scheduler = paddle.optimizer.lr.CosineAnnealingDecay(0.03, T_max=args.epochs * len(loader))
    fleet.distributed_optimizer(paddle.optimizer.Adam(scheduler)).minimize(loss, startup)
# The same layers under a fresh name guard use the same parameters; this program's startup is never run.
with paddle.static.program_guard(evaluation, paddle.static.Program()), paddle.utils.unique_name.guard():
    sums = {"squared_error": squared_errors().sum()}
exe = paddle.static.Executor(fleet.place())
exe.run(startup)

checkpoints = Checkpoints(args.output_dir)
found = checkpoints.newest() if args.resume or attempt(os.environ) else None
sinks = open_sinks(args.output_dir, fleet.is_first_worker(), found.state.recorded_step if found else 0)
trainer = Trainer(
    exe,
    loss,
    loader,
    TrainerSettings(epochs=args.epochs, seed=SEED, checkpoint_every_steps=20),
    scheduler=scheduler,
    evaluator=ProgramEvaluator(evaluation, sums, test_loader),
    checkpoints=checkpoints,
    sinks=sinks,
    progress=make_progress(fleet.is_first_worker()),
)
if found:
    trainer.resume(found)
outcome = trainer.fit()
sinks.close()
if fleet.is_first_worker() and outcome.evaluation is not None:
    error = outcome.evaluation.values["squared_error"]
    print(
        f"{outcome.steps} steps on {ranks} rank(s): mean squared error {error:.5f} over {test_data.num_samples} samples"
    )
