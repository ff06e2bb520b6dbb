"""Run as ranks: loaders that feed the program, datasets, metrics, and strategies in which nothing was set.

Each rank has its share of every batch of 24 samples, so one process trains on the joint batches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import DistributedStrategy, compat, fleet, role_maker
from fleet_train.errors import FleetTrainError
from tests.support.worker import digest, report

STEPS, JOINT = 20, 24
FOLDER = Path(sys.argv[1])


def share(steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """This rank's (dense, ids, label) of each step."""
    random = np.random.default_rng(3)
    dense = random.standard_normal((steps, JOINT, 3)).astype("float32")
    ids = random.integers(0, 10, (steps, JOINT, 2))
    label = (dense.sum(axis=2, keepdims=True) + ids.sum(axis=2, keepdims=True) / 9).astype("float32")
    mine = np.split(np.arange(JOINT), fleet.worker_num())[fleet.worker_index()]
    return [(dense[step, mine], ids[step, mine], label[step, mine]) for step in range(steps)]


def network(inputs: Any, strategy: Any) -> Any:
    dense, ids, label = inputs
    rows = paddle.flatten(paddle.nn.Embedding(10, 4)(ids), 1)
    out = paddle.nn.Linear(11, 1)(paddle.concat([dense, rows], axis=1))
    loss = paddle.mean((out - label) ** 2)
    fleet.distributed_optimizer(paddle.optimizer.Adam(0.05), strategy).minimize(loss)
    return loss


def declared() -> list[Any]:
    kinds = {"dense": ([None, 3], "float32"), "ids": ([None, 2], "int64"), "label": ([None, 1], "float32")}
    return [paddle.static.data(name, shape, dtype) for name, (shape, dtype) in kinds.items()]


def started(startup: Any) -> Any:
    exe = paddle.static.Executor(fleet.place())
    exe.run(startup)
    return exe


def parameters(main: Any) -> np.ndarray:
    state = main.state_dict("param", paddle.static.global_scope())
    return np.concatenate([np.array(state[name]).ravel() for name in sorted(state)])


def with_py_reader(exe: Any, main: Any, loader: Any, loss: Any) -> None:
    """Two passes; the first is left before its end."""
    loader.decorate_paddle_reader(lambda: (list(zip(*batch, strict=True)) for batch in share()))
    loader.start()
    for _ in range(3):
        exe.run(main, fetch_list=[loss])
    loader.reset()
    loader.start()
    steps = 0
    try:
        while True:
            exe.run(main, fetch_list=[loss] if steps % 4 == 0 else [])
            steps += 1
    except paddle.base.core.EOFException:
        loader.reset()
    report(reader_steps=steps)


def made(case: str, build: Callable[[], tuple[Any, Any]], run: Callable[..., None]) -> None:
    """Build a program whose parameters start alike for any number of ranks, train it, and report them."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    paddle.seed(5)
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard(f"{case}_"):
        source, inputs = build()
        loss = network(inputs, "single_node")
        run(started(startup), main, source, loss)
    report(**{case: parameters(main)})


def py_reader() -> tuple[Any, Any]:
    reader = compat.py_reader(4, [[-1, 3], [-1, 2], [-1, 1]], ["float32", "int64", "float32"])
    return reader, compat.read_file(reader)


def lines(steps: int) -> Iterator[str]:
    for batch in share(steps):
        for sample in zip(*batch, strict=True):
            yield " ".join(f"{len(slot)} {' '.join(map(str, slot.tolist()))}" for slot in sample) + "\n"


def dataset(make: Callable[[], Any], steps: int = STEPS, command: str = "cat", reverse: bool = False) -> Any:
    """Of two files, whose lines the command makes samples of."""
    written = list(lines(steps))
    half, ranks = len(written) // 2, fleet.worker_num()
    files = [str(FOLDER / f"{ranks}-{rank}-{part}.txt") for rank in range(ranks) for part in "ab"]
    mine = fleet.util.get_file_shard(files)
    for path, part in zip(mine, (written[:half], written[half:]), strict=True):
        Path(path).write_text("".join(one[::-1].strip() + "\n" if reverse else one for one in part))
    inputs, created = declared(), make()
    created.set_batch_size(JOINT // ranks)
    created.set_use_var(inputs)
    created.set_pipe_command(command)
    created.set_thread(4)
    created.set_filelist(mine)
    return created, inputs


def pass_over(exe: Any, main: Any, data: Any, loss: Any) -> None:
    for _ in range(2):
        if isinstance(data, compat.InMemoryDataset):
            data.load_into_memory()
            report(samples=data.get_memory_data_size(fleet))
        compat.train_from_dataset(exe, main, data, fetch_list=[loss], fetch_info=["loss"], print_period=8)


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except FleetTrainError as error:
        return str(error)
    return "nothing was refused"


def uneven(exe: Any, main: Any, data: Any, loss: Any) -> None:
    """Rank 1 has a file less, then none, then a file that is broken."""
    if fleet.worker_index() == 1:
        data.set_filelist(data._files[:1])
    compat.train_from_dataset(exe, main, data)
    if fleet.worker_index() == 1:
        data.set_filelist([])
    report(no_samples=refused(lambda: compat.train_from_dataset(exe, main, data, fetch_list=[loss])))


def check_metrics() -> None:
    """Each rank's own counts; large ones, which float32 cannot add."""
    random = np.random.default_rng(fleet.worker_index())
    scores, labels = random.random(400), random.integers(0, 2, 400)
    auc = paddle.metric.Auc(num_thresholds=255)
    auc.update(np.stack([1 - scores, scores], axis=1), labels[:, None])
    report(scores=scores, labels=labels, auc=fleet.metrics.auc(auc._stat_pos, auc._stat_neg))
    report(auc_of_rows=fleet.metrics.auc(auc._stat_pos[None], auc._stat_neg[None], util=fleet.util))
    rank = fleet.worker_index()
    report(
        acc=fleet.metrics.acc(np.array([2.0**24 - 1 - rank], "float32"), np.array([2**25 + 1])),
        mae=fleet.metrics.mae(np.array([1.5 + rank]), np.array([4.0])),
        mse=fleet.metrics.mse(np.float32(8 + rank), np.int32(2)),
        rmse=fleet.metrics.rmse([8.0 + rank], [2]),
        sum=fleet.metrics.sum(np.array([[1, rank]], "int32")),
        max=fleet.metrics.max(np.array([rank, -rank], "float32")),
        min=fleet.metrics.min(np.array([rank, -rank], "float32")),
        one_kind=fleet.metrics.auc(np.zeros((1, 4)), np.ones((1, 4))),
        none=refused(lambda: fleet.metrics.acc(0, 0)),
        unknown=refused(lambda: fleet.metrics.sum("no_such_variable")),
    )


def strategies() -> None:
    """What a strategy asks for is seen in the parameters: with the launcher's LocalSGD, ranks differ after a step."""
    stock = paddle.distributed.fleet.DistributedStrategy
    buckets = DistributedStrategy()
    buckets.fuse_grad_size_in_MB = 8
    stock_buckets = stock()
    stock_buckets.fuse_grad_size_in_MB = 0
    cases = {"ours": DistributedStrategy(), "stock": stock(), "none": None, "set": buckets, "stock_set": stock_buckets}
    for case, strategy in cases.items():
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard(f"{case}_"):
            loss = network(declared(), strategy)
            exe = started(startup)
            names = ("dense", "ids", "label")
            exe.run(main, feed=dict(zip(names, share(1)[0], strict=True)), fetch_list=[loss])
        apart = len(set(fleet.gather(digest({"all": parameters(main)})))) > 1
        report(**{f"strategy_{case}": [apart, fleet.profile().fuse_grad_size_in_MB]})


LAUNCHERS = os.environ.pop("FLEET_TRAIN_STRATEGY", "")
paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
check_metrics()
if "only_metrics" not in sys.argv:
    made("reader", py_reader, with_py_reader)
    made("queue", lambda: dataset(compat.QueueDataset, command="rev", reverse=True), pass_over)
    made("memory", lambda: dataset(compat.InMemoryDataset), pass_over)
    if fleet.worker_num() > 1:
        made("uneven", lambda: dataset(compat.QueueDataset), uneven)
        os.environ["FLEET_TRAIN_STRATEGY"] = LAUNCHERS
        strategies()
