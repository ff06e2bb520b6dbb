"""A rank of fleet_train up to the end of its first step, as a user would write it. argv: the folder of the record."""

from __future__ import annotations

import sys

# This folder is in the path because the script is in it; fleet_train may be another checkout's.
from stamps import BATCH, SIZES, Stamps  # type: ignore[import-not-found]

STAMPS = Stamps()

import numpy as np  # noqa: E402
import paddle  # noqa: E402

STAMPS.stamp("import of the framework")

from fleet_train import fleet, role_maker  # noqa: E402

STAMPS.stamp("import of fleet_train")


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    STAMPS.stamp("joining")
    features = paddle.static.data("features", [None, SIZES[0]], "float32")
    labels = paddle.static.data("labels", [None], "int64")
    hidden = features
    for width in SIZES[1:-1]:
        hidden = paddle.nn.functional.relu(paddle.nn.Linear(hidden.shape[1], width)(hidden))
    loss = paddle.nn.functional.cross_entropy(paddle.nn.Linear(hidden.shape[1], SIZES[-1])(hidden), labels)
    optimizer = paddle.optimizer.Momentum(0.01, 0.9)
    fleet.distributed_optimizer(optimizer).minimize(loss)
    STAMPS.stamp("network and conversion")
    executor = paddle.static.Executor(fleet.place())
    executor.run(fleet.startup_program)
    STAMPS.stamp("start values")
    rank = fleet.worker_index()
    generator = np.random.default_rng(rank)
    feed = {
        "features": generator.standard_normal((BATCH, SIZES[0]), dtype=np.float32),
        "labels": generator.integers(0, SIZES[-1], BATCH),
    }
    (value,) = executor.run(fleet.main_program, feed=feed, fetch_list=[loss])
    STAMPS.stamp("first step")
    assert np.isfinite(value).all()
    STAMPS.write(sys.argv[1], rank)


if __name__ == "__main__":
    main()
