"""Run as ranks: the trainer under gradient merge; arguments are ``accumulate_steps``, samples, batch size, folder.

``joint``: three seeds. ``straight``: with dropout. ``parts``: the same, begun anew after each epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.profile import Profile
from fleet_train.train import Checkpoints, Trainer, TrainerSettings
from fleet_train.train.settings import Schedule
from tests.support.worker import digest, report


class Sink:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, scalars: Any) -> None:
        self.records.append((step, dict(scalars)))

    def close(self) -> None: ...


def train(merged: int, samples: int, batch: int, seed: int, folder: Path, **settings: Any) -> dict[str, Any]:
    dropout = settings.pop("dropout", 0.0)
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    schedule = Schedule("cosine", 3 * samples // (batch * fleet.worker_num()), 2 * merged).of_updates(merged)
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, schedule)
    with paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        with paddle.static.program_guard(main, startup):
            paddle.seed(seed)
            hidden = paddle.tanh(paddle.nn.Linear(6, 5)(paddle.static.data("features", [-1, 6], "float32")))
            logits = paddle.nn.Linear(5, 3)(paddle.nn.functional.dropout(hidden, dropout))
            loss = paddle.nn.functional.cross_entropy(logits, paddle.static.data("labels", [-1], "int64"))
            optimizer = paddle.optimizer.Momentum(scheduler, 0.9)
            optimizer = fleet.distributed_optimizer(optimizer, Profile(accumulate_steps=merged))
            optimizer.minimize(loss, startup)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        sampler = ShardedBatchSampler(samples, batch, fleet.worker_index(), fleet.worker_num(), seed=seed)
        loader = BatchLoader(synthetic(samples, (6,), 3).train, sampler)
        sink, checkpoints = Sink(), Checkpoints(folder, keep=99)
        how = TrainerSettings(3, seed=seed, log_every=1, **settings)
        parts = {"scheduler": scheduler, "checkpoints": checkpoints, "gradient_norm": optimizer.gradient_norm()}
        trainer = Trainer(exe, loss, loader, how, sinks=[sink], **parts)
        if (found := checkpoints.newest()) is not None:
            trainer.resume(found)
        outcome = trainer.fit()
        values = {name: np.array(value) for name, value in main.state_dict("all", scope).items()}
    parameters = [value.tolist() for name, value in sorted(values.items()) if name.endswith((".w_0", ".b_0"))]
    assert len(parameters) == 4, sorted(values)
    state = checkpoints.newest()
    assert state is not None
    return {
        "steps": outcome.steps,
        "samples": outcome.samples,
        "place": [state.state.step, state.state.batches, state.state.pending_batches],
        "rates": [(step, one["train/learning_rate"]) for step, one in sink.records if "train/learning_rate" in one],
        "losses": [(step, one["train/loss"]) for step, one in sink.records if "train/loss" in one],
        "norms": [(step, one["train/gradient_norm"]) for step, one in sink.records if "train/loss" in one],
        "parameters": parameters,
        "state": digest(values),
    }


def main() -> None:
    merged, samples, batch = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    joint = [train(merged, samples, batch, seed, folder / f"joint{seed}") for seed in (1, 2, 3)]
    straight = train(merged, samples, batch, 1, folder / "straight", dropout=0.5)
    parts = [train(merged, samples, batch, 1, folder / "parts", dropout=0.5, stop_after_epochs=1) for _ in range(3)]
    report(fleet.worker_index(), joint=joint, straight=straight, parts=parts)


if __name__ == "__main__":
    main()
