"""A rank of the benchmark of synchronised batch norm: one network twice, plain and synchronised, trained in turn.

argv: folder for the results, network, images per rank, blocks of each kind, steps per block.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile

KINDS = ("plain", "synchronised")
CLASSES, SIDE, _WARMUP_STEPS = 10, 64, 2


def convnet() -> Any:
    """Three convolutions with batch norm, halving the image each."""
    layers: list[Any] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2D(before, after, 3, stride=2, padding=1), nn.BatchNorm2D(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(128, CLASSES))


NETWORKS = {"ResNet-50": lambda: paddle.vision.models.resnet50(num_classes=CLASSES), "convnet": convnet}


class Trained:
    """A network in programs of its own."""

    def __init__(self, network: str, kind: str, images: int) -> None:
        self._program, startup = paddle.static.Program(), paddle.static.Program()
        profile = Profile(sync_batch_norm=kind == "synchronised")
        with paddle.static.program_guard(self._program, startup), paddle.utils.unique_name.guard(f"{kind}_"):
            features = paddle.static.data("features", [None, 3, SIDE, SIDE], "float32")
            labels = paddle.static.data("labels", [None], "int64")
            self._loss = nn.functional.cross_entropy(NETWORKS[network]()(features), labels)
            fleet.distributed_optimizer(paddle.optimizer.Momentum(0.01, 0.9), profile).minimize(self._loss)
        plan = fleet.plan()
        self.exchanges = 0 if plan is None else len(plan.statistics)
        self._exe = paddle.static.Executor(fleet.place())
        self._exe.run(startup)
        random = np.random.default_rng(fleet.worker_index())
        self._feed = {
            "features": random.standard_normal((images, 3, SIDE, SIDE)).astype("float32"),
            "labels": random.integers(0, CLASSES, images),
        }

    def block(self, steps: int) -> dict[str, float]:
        """Seconds of a block's steps, and of all threads' processor time in them, which depends less on who else is
        at work on the machine."""
        fleet.barrier_worker()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            (loss,) = self._exe.run(self._program, feed=self._feed, fetch_list=[self._loss])
            assert np.isfinite(loss).all(), "the loss is not finite"
        return {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - worked}


def main() -> None:
    folder, network = Path(sys.argv[1]), sys.argv[2]
    images, blocks, steps = (int(each) for each in sys.argv[3:6])
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    trained = {kind: Trained(network, kind, images) for kind in KINDS}
    for each in trained.values():
        each.block(_WARMUP_STEPS)
    # A different order each time, so that no kind is always first.
    orders = [KINDS, KINDS[::-1]]
    measured = [{"kind": kind} | trained[kind].block(steps) for number in range(blocks) for kind in orders[number % 2]]
    record = {"blocks": measured, "exchanges": trained["synchronised"].exchanges}
    (folder / f"rank{fleet.worker_index()}.json").write_text(json.dumps(record), encoding="utf-8")
    fleet.shutdown()


if __name__ == "__main__":
    main()
