"""A rank up to the end of its first step, as a user would write it. argv: fleet_train or torch, folder of the record.

Time stamps are on the machine-wide monotonic clock. fleet_train is that of PYTHONPATH, which may be another checkout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

# 64 -> 8 layers of 640 -> 10: the network of the other benchmarks, with a batch of 64 per rank.
SIZES, BATCH = (64, *[640] * 8, 10), 64


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# When each phase of this process ended, in seconds since boot, by name.
ENDS = {"interpreter": now()}


def stamp(phase: str) -> None:
    ENDS[phase] = now()


def processes_above(pid: int) -> list[tuple[int, float, float]]:
    """(pid, start time, CPU seconds so far) of this process, its parent, and so on.

    To a hundredth of a second, including children that have ended.
    """
    found = []
    ticks = os.sysconf("SC_CLK_TCK")
    while pid > 1:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found.append((pid, int(fields[19]) / ticks, sum(map(int, fields[11:15])) / ticks))
        pid = int(fields[1])
    return found


def batch_of(rank: int) -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.default_rng(rank)
    features = generator.standard_normal((BATCH, SIZES[0]), dtype=np.float32)
    return features, generator.integers(0, SIZES[-1], BATCH)


def train_ours() -> tuple[int, float]:
    import paddle

    stamp("import of the framework")
    from fleet_train import fleet, role_maker

    stamp("import of fleet_train")
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    stamp("joining")
    features = paddle.static.data("features", [None, SIZES[0]], "float32")
    labels = paddle.static.data("labels", [None], "int64")
    layers = [layer for pair in pairwise(SIZES) for layer in (paddle.nn.Linear(*pair), paddle.nn.ReLU())]
    loss = paddle.nn.functional.cross_entropy(paddle.nn.Sequential(*layers[:-1])(features), labels)
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.01, 0.9)).minimize(loss)
    stamp("network and conversion")
    executor = paddle.static.Executor(fleet.place())
    executor.run(fleet.startup_program)
    stamp("start values")
    rank = fleet.worker_index()
    feed = dict(zip(("features", "labels"), batch_of(rank), strict=True))
    (value,) = executor.run(fleet.main_program, feed=feed, fetch_list=[loss])
    return rank, float(value.item())


def train_torch() -> tuple[int, float]:
    import torch
    from torch import distributed, nn

    stamp("import of the framework")
    distributed.init_process_group("gloo")
    stamp("joining")
    layers = [layer for pair in pairwise(SIZES) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    stamp("network and conversion")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stamp("start values")  # broadcasts rank 0's parameters
    rank = distributed.get_rank()
    features, labels = map(torch.from_numpy, batch_of(rank))
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    return rank, float(loss.detach())


def main() -> None:
    rank, loss = train_torch() if sys.argv[1] == "torch" else train_ours()
    stamp("first step")
    assert loss == loss, "the loss is NaN"
    beside = Path(sys.argv[2], f"rank{rank}.part")
    beside.write_text(json.dumps({"ends": ENDS, "processes": processes_above(os.getpid())}), encoding="utf-8")
    os.replace(beside, Path(sys.argv[2], f"rank{rank}.json"))


if __name__ == "__main__":
    main()
