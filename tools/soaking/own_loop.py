"""A training loop of one's own on `fleet.resumable`, with a fault that is asked for.

Dropout, numbers from numpy and Python in the feed, and a schedule make every step depend on what a resume restores.

Prints ``step S epoch E loss L samples [...]`` for each step, and at the end ``digest D`` of all persistable values with
what numpy draws next.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.data import ArrayDataset, BatchLoader, ShardedBatchSampler

SAMPLES, WIDTH, BATCH = 96, 6, 4
HURRY = "hurry"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--loader", default="none", choices=("none", "ours", "paddle", "function"))
    parser.add_argument("--unit", default="steps", choices=("steps", "epochs"))
    parser.add_argument("--total", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=5)
    parser.add_argument("--profile", default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after a step, until FOLDER.hurry exists")
    parser.add_argument("--save_at", type=int, help="steps that are done at one more save")
    parser.add_argument("--plain", action="store_true", help="without dropout and schedule")
    parser.add_argument("--fault", default="", help="kill:RANK:STEP, term:RANK:STEP, break:STEP, raise:STEP")
    return parser.parse_args()


ARGS = options()
FIRST = os.environ.get("FLEET_TRAIN_ATTEMPT", "0") == "0"


class Numbers(paddle.io.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        features = np.full(WIDTH, index / SAMPLES, "float32")
        if ARGS.workers:  # an augmentation's draws; without workers Paddle's thread would race with the loop for them
            features += np.random.rand(WIDTH).astype("float32")
        return features, np.array([index], "int64")


def build() -> tuple[Any, Any, Any]:
    paddle.enable_static()
    fleet.init()
    paddle.seed(ARGS.seed)
    np.random.seed(100 * ARGS.seed + fleet.worker_index())
    random.seed(ARGS.seed)
    features = paddle.static.data("features", [None, WIDTH], "float32")
    ids = paddle.static.data("ids", [None], "int64")
    words = paddle.nn.Embedding(SAMPLES, ARGS.hidden)(ids)
    hidden = paddle.nn.functional.relu(paddle.nn.Linear(WIDTH, ARGS.hidden)(features) + words)
    if not ARGS.plain:
        hidden = paddle.nn.functional.dropout(hidden, 0.5)
    loss = paddle.mean((paddle.nn.Linear(ARGS.hidden, 1)(hidden) - 1.0) ** 2)
    rate = 0.05 if ARGS.plain else paddle.optimizer.lr.CosineAnnealingDecay(0.05, 30)
    optimizer = paddle.optimizer.Momentum(rate)
    fleet.distributed_optimizer(optimizer, ARGS.profile).minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    return exe, loss, None if ARGS.plain else rate


def make_loader() -> Any:
    rank, ranks = fleet.worker_index(), fleet.worker_num()
    if ARGS.loader == "ours":
        features = np.repeat(np.arange(SAMPLES)[:, None] / SAMPLES, WIDTH, 1).astype(np.float32)
        dataset = ArrayDataset("numbers", features, np.arange(SAMPLES), SAMPLES)
        return BatchLoader(
            dataset, ShardedBatchSampler(SAMPLES, ARGS.batch, rank, ranks, seed=ARGS.seed, last_batch="exact")
        )
    if ARGS.loader == "paddle":
        sampler = paddle.io.DistributedBatchSampler(Numbers(), ARGS.batch, ranks, rank, shuffle=True)
        return paddle.io.DataLoader(
            Numbers(), batch_sampler=sampler, num_workers=ARGS.workers, return_list=True, places=[paddle.CPUPlace()]
        )

    def batches() -> Iterator[dict[str, Any]]:
        for batch in np.random.permutation(SAMPLES)[rank::ranks].reshape(-1, ARGS.batch):
            yield {"features": np.random.rand(ARGS.batch, WIDTH).astype("float32"), "labels": batch}

    return batches if ARGS.loader == "function" else None


def samples_of(batch: Any) -> tuple[Any, Any]:
    """Features [samples, WIDTH] and the samples' numbers; what is added draws from numpy in the loop itself."""
    if ARGS.loader == "none":
        features = np.random.rand(ARGS.batch, WIDTH).astype("float32") + np.float32(random.random())
        return features, np.random.randint(0, SAMPLES, ARGS.batch)
    features, numbers = batch if ARGS.loader == "paddle" else (batch["features"], batch["labels"])
    features = np.asarray(features)
    noise = np.random.rand(len(features), 1).astype("float32") * (not ARGS.plain)
    return features + noise, np.asarray(numbers).reshape(-1)


def carry_out_fault(step: int) -> None:
    kind, *numbers = ARGS.fault.split(":")
    if (
        not FIRST
        or not kind
        or int(numbers[-1]) != step
        or (len(numbers) > 1 and int(numbers[0]) != fleet.worker_index())
    ):
        return
    if kind in ("kill", "term"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    if kind == "raise":
        raise ValueError("as asked")


def main() -> None:
    exe, loss, schedule = build()
    run = fleet.resumable(ARGS.folder, exe, loader=make_loader(), description={"seed": ARGS.seed})

    def train(batch: Any) -> None:
        if run.step == ARGS.save_at:
            run.save()
        features, samples = samples_of(batch)
        carry_out_fault(run.step)
        (now,) = exe.run(fleet.main_program, feed={"features": features, "ids": samples}, fetch_list=[loss])
        if schedule is not None:
            schedule.step()
        print(f"step {run.step} epoch {run.epoch} loss {now.item().hex()} samples {samples.tolist()}", flush=True)
        if not Path(f"{ARGS.folder}.{HURRY}").exists():
            time.sleep(ARGS.pause)

    if ARGS.unit == "steps":
        for step in run.steps(ARGS.total, save_every=ARGS.save_every):
            train(run.batch)
            if FIRST and ARGS.fault == f"break:{step}":
                break
    else:
        for _ in run.epochs(ARGS.total):
            np.random.rand(3)  # the body draws before its batches
            for batch in run.batches(save_every=ARGS.save_every):
                train(batch)
    fleet.save_persistables(exe, f"{ARGS.folder}/end")
    values = Path(f"{ARGS.folder}/end/persistables.safetensors").read_bytes()
    print(f"digest {hashlib.sha256(values).hexdigest()} numpy {np.random.rand():.17f}", flush=True)


main()
