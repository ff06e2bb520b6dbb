"""Machines with their own data of different sizes: all ranks take the same steps, and none waits for another."""

from __future__ import annotations

from pathlib import Path

from tests.support.images import write_image_folder
from tests.support.ranks import run_ranks

SCRIPT = """
import sys
from pathlib import Path

import numpy as np
import paddle
from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.data import (ImageSettings, LoaderSettings, Seat, make_evaluation_loader, make_loader, open_splits,
                              settle)
from fleet_train.errors import DataError
from tests.support.worker import report

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
seat = Seat.of(fleet.worker_index(), fleet.worker_endpoints())
folder = Path(sys.argv[1]) / f"machine{seat.rank}"
splits = open_splits(data_dir=folder, images=ImageSettings(image_size=8))

main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("features", [None, 3, 8, 8], "float32")
    label = paddle.static.data("labels", [None], "int64")
    logits = paddle.nn.Linear(192, 3)(paddle.flatten(x, 1))
    loss = paddle.nn.functional.cross_entropy(logits, label)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.01), DistributedStrategy()).minimize(loss, startup)
exe = paddle.static.Executor(fleet.place())
exe.run(startup)

steps, seen = {}, {}
for policy in ("truncate", "pad", "error"):
    loader = make_loader(splits.train, LoaderSettings(batch_size=2, workers=1, shard_by="folder", uneven=policy), seat)
    try:
        agreed = settle(loader, fleet.gather)
    except DataError as error:
        steps[policy] = str(error)
        continue
    with loader.epoch(0) as feeds:
        feeds = list(enumerate(feeds))
    for _, feed in feeds:
        exe.run(fleet.main_program, feed=feed)
    steps[policy] = [agreed, len(loader), len(feeds)]
    seen[policy] = sorted({index for step, _ in feeds for index in loader.indices(step).tolist()})
    loader.close()
weights = np.array(paddle.static.global_scope().find_var(main.global_block().all_parameters()[0].name).get_tensor())

loader = make_evaluation_loader(splits.test, LoaderSettings(batch_size=2, workers=1, shard_by="folder"), seat)
with loader.epoch(0) as feeds:
    counted = sum(len(feed["labels"]) for feed in feeds)
total = fleet.all_reduce(np.array([counted], np.float64)).item()
report(steps=steps, seen=seen, weights=weights, counted=counted, total=total)
fleet.shutdown()
"""


def test_ranks_with_different_counts_end_together(tmp_path: Path) -> None:
    for machine, (train, val) in enumerate([(5, 4), (3, 1)]):
        write_image_folder(tmp_path / f"machine{machine}", per_class=train, classes=3, val_per_class=val)
    result = run_ranks(SCRIPT, 2, nodes=2, folder=tmp_path, args=[str(tmp_path)])
    # 15 and 9 images in batches of 2: seven and four whole batches, eight and five with a filled one.
    assert [steps["truncate"] for steps in result.of_all("steps")] == [[4, 4, 4]] * 2
    assert [steps["pad"] for steps in result.of_all("steps")] == [[8, 8, 8]] * 2
    errors = [steps["error"] for steps in result.of_all("steps")]
    assert errors[0] == errors[1]
    assert "steps per epoch by rank: 7, 4; with --uneven error they must be equal" in errors[0]
    assert [len(seen["truncate"]) for seen in result.of_all("seen")] == [8, 8]
    assert [seen["pad"] for seen in result.of_all("seen")] == [list(range(15)), list(range(9))]
    first, second = result.of_all("weights")
    assert (first == second).all()
    assert result.of_all("counted") == [12, 3]
    assert result.of_all("total") == [15.0, 15.0]
