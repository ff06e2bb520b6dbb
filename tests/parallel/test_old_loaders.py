"""Loaders, datasets and metrics of old scripts: several ranks against one process.

Each rank has its share of every batch of 24 samples, so one process trains on the joint batches. The ranks run this
file, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import compat, fleet, role_maker
from fleet_train.errors import FleetTrainError
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import report

STEPS, JOINT = 20, 24


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
    files = [str(Path(sys.argv[1]) / f"{ranks}-{rank}-{part}.txt") for rank in range(ranks) for part in "ab"]
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


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    check_metrics()
    made("reader", py_reader, with_py_reader)
    made("queue", lambda: dataset(compat.QueueDataset, command="rev", reverse=True), pass_over)
    made("memory", lambda: dataset(compat.InMemoryDataset), pass_over)
    if fleet.worker_num() > 1:
        made("uneven", lambda: dataset(compat.QueueDataset), uneven)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return run_ranks(Path(__file__), 1, folder=folder, args=[str(folder)]).values[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(Path(__file__), 2, folder=folder, args=[str(folder)])


@pytest.mark.parametrize("case", ["reader", "queue", "memory"])
def test_old_loader_trains_as_one_process_with_the_joint_batches(
    case: str, two: RanksResult, alone: dict[str, Any]
) -> None:
    first, second = two.of_all(case)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone[case], rtol=1e-4, atol=1e-5)
    # Three steps and a pass of the reader, two passes of the datasets: they saw the same samples, or different ones.
    np.testing.assert_allclose(alone["queue"], alone["memory"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(alone["reader"], alone["queue"], rtol=1e-2)


def test_a_pass_has_all_batches_and_values_are_printed_every_period(two: RanksResult, alone: dict[str, Any]) -> None:
    assert [alone["reader_steps"], *two.of_all("reader_steps")] == [20, 20, 20]
    assert [alone["samples"], *two.of_all("samples")] == [480, 480, 480]
    for rank in two.ranks:
        assert rank.output.count("batch 8, loss: ") == rank.output.count("batch 16, loss: ") == 4


def test_ranks_make_the_steps_of_the_rank_with_the_fewest_batches(two: RanksResult) -> None:
    first, second = two.of_all("uneven")
    np.testing.assert_array_equal(first, second)
    said = "stopped after 10 steps, when rank 1 had no batch left; further batches of rank 0 are left out"
    assert [said in rank.output for rank in two.ranks] == [True, False]
    assert two.ranks[0].output.count("thread_num=4 is mapped") == 1
    for message in two.of_all("no_samples"):
        assert message == "train_from_dataset: rank 1 has no samples; give each rank about as many samples"


def test_metrics_are_those_of_all_samples(two: RanksResult) -> None:
    scores, labels = np.concatenate(two.of_all("scores")), np.concatenate(two.of_all("labels"))
    bucket = (scores * 255).astype(int)
    above, level = (
        relation(bucket[labels == 1][:, None], bucket[labels == 0]).mean() for relation in (np.greater, np.equal)
    )
    assert two.of_all("auc") == two.of_all("auc_of_rows") == [pytest.approx(above + level / 2, abs=1e-12)] * 2
    for found in two.values.values():
        # Of ranks 0 and 1: 2**24 - 1 and 2**24 - 2 right answers, 1.5 and 2.5 off, squares of 8 and 9.
        assert found["acc"] == (2**25 - 3) / (2 * (2**25 + 1))
        assert (found["mae"], found["mse"], found["rmse"]) == pytest.approx((0.5, 4.25, 4.25**0.5))
        np.testing.assert_array_equal(found["sum"], np.array([[2, 1]], "int64"), strict=True)
        np.testing.assert_array_equal(found["max"], np.array([1, 0], "float32"), strict=True)
        np.testing.assert_array_equal(found["min"], np.array([0, -1], "float32"), strict=True)
        assert found["one_kind"] == 0.5
        assert found["none"] == "fleet.metrics.acc: the number of samples is 0 on all ranks"
        assert "there is no variable 'no_such_variable'; fetch the value" in found["unknown"]


if __name__ == "__main__":
    main()
