"""``fleet_train.spawn`` with real ranks: results, failures with the rank's name, and no process left behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train import spawn
from fleet_train.errors import RankFailed
from fleet_train.profile import Profile
from tests.support.processes import Job, clean_environ, python, write_script

STEPS, SAMPLES_PER_RANK = 12, 6
# As in tests/parallel/test_strategies.py: the sum over two ranks is rounded in another order.
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rank() -> int:
    return int(os.environ["PADDLE_TRAINER_ID"])


def join() -> Any:
    import paddle

    from fleet_train import fleet, role_maker

    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    return fleet


def trained(joint_batch: int, start: dict[str, Any] | None = None, fails: Callable[[int], None] | None = None) -> Any:
    """(start values, parameters, losses, profile's name) after some steps on this rank's share of each batch."""
    import paddle

    from fleet_train.selftest.training import SEVERAL_BUCKETS, Trained, batches

    fleet = join()
    paddle.seed(3 + rank())
    training = Trained(SEVERAL_BUCKETS, fleet.distributed_optimizer, lambda: paddle.optimizer.Momentum(0.05, 0.9))
    if start is not None:
        training.start_from(start)
    began, losses = training.state(), []
    share = joint_batch // fleet.worker_num()
    mine = slice(rank() * share, (rank() + 1) * share)
    for step, (features, labels) in enumerate(batches(STEPS, joint_batch, seed=5)):
        losses.append(training.step(features[mine], labels[mine]))
        print("step", step)
        if fails is not None:
            fails(step)
    return began, training.parameters(), losses, fleet.profile().name


def test_results_come_in_the_order_of_ranks_and_a_second_spawn_works() -> None:
    base, values = 10, np.arange(3_000_000, dtype="float64")

    def number(add: int, large: Any) -> tuple[int, int, Any]:
        return rank(), base + add, large * 2

    results = spawn(number, (1, values), nprocs=3)
    assert [result[:2] for result in results] == [(0, 11), (1, 11), (2, 11)]
    for *_, doubled in results:
        np.testing.assert_array_equal(doubled, values * 2)
    assert spawn(number, (2, 1), nprocs=1) == [(0, 12, 2)]


def test_two_ranks_train_as_one_process_with_the_joint_batch() -> None:
    from fleet_train.selftest.training import digest, relative_difference

    joint = 2 * SAMPLES_PER_RANK
    two = spawn(trained, (joint,), strategy="unfused")
    ((_, alone, _, _),) = spawn(trained, (joint, two[0][0]), nprocs=1)
    assert digest(two[0][0]) == digest(two[1][0]), "ranks started from different values"
    assert digest(two[0][1]) == digest(two[1][1]), "replicas differ"
    weights = {name: value for name, value in two[0][0].items() if name in alone and np.any(value)}  # biases start at 0
    assert relative_difference({name: alone[name] for name in weights}, weights) > 1e-3, "nothing was trained"
    assert relative_difference(two[0][1], alone) < RELATIVE_TOLERANCE
    assert [result[3] for result in two] == ["unfused", "unfused"]


def set_by_its_own_strategy() -> tuple[bool, str]:
    import paddle

    from fleet_train import DistributedStrategy

    fleet = join()
    own = DistributedStrategy(num_threads=2, environment={"NCCL_DEBUG": "WARN"})
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), own)
    name = "FLAGS_new_executor_serial_run"
    return paddle.get_flags(name)[name], os.environ["NCCL_DEBUG"]


def test_variables_of_spawns_strategy_give_way_to_those_of_the_functions_own() -> None:
    assert spawn(set_by_its_own_strategy, nprocs=1, strategy=Profile(environment={"NCCL_DEBUG": "INFO"})) == [
        (False, "WARN")
    ]


def raises(step: int) -> None:
    if step == 4 and rank() == 1:
        raise ValueError("batch 4 is empty")


def test_the_rank_that_fails_first_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailed) as failed:
        spawn(trained, (2 * SAMPLES_PER_RANK, None, raises))
    text = str(failed.value)
    assert text.startswith("rank 1 of 2 failed first: ValueError: batch 4 is empty")
    assert 'raise ValueError("batch 4 is empty")' in text
    assert "rank 0 followed: WorkerFailed: rank 1" in text
    assert (failed.value.rank, failed.value.rank_exit_code, failed.value.signal_number) == (1, 1, None)


def ends_itself() -> None:
    if rank() == 0:
        os._exit(0)


def ends_itself_before_it_joins() -> None:
    ends_itself()
    join()


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank() == 0:
        raise OSError("disk full")
    os.system("sleep 300")
    time.sleep(300)


def makes_a_lock() -> Any:
    return {"loss": 1.0, "lock": threading.Lock()}


@pytest.mark.parametrize(
    ("train", "first"),
    [
        (ends_itself, "rank 0 of 2 failed first: .*exit code 0 before its function had returned"),
        (ends_itself_before_it_joins, r"rank 0 of 2 failed first: exit code 0 \(left the job while others waited"),
        (ignores_sigterm, "rank 0 of 2 failed first: OSError: disk full"),
        (makes_a_lock, r"the value under 'lock' is a value of type _thread\.lock"),
    ],
)
def test_every_kind_of_exit_is_reported_and_the_others_are_stopped(train: Callable[[], None], first: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=first):
        spawn(train)
    assert time.monotonic() - began < 200, "the others, which would take 300 s, were waited for"


def printing() -> str | None:
    for number in range(3):
        print(f"rank {rank()} says {number}")
        time.sleep(0.4)
    return os.environ.get("PADDLE_LOG_DIR")


class Cell(io.StringIO):
    """A notebook cell's output: no file descriptor; remembers when it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[float] = []

    def write(self, text: str) -> int:
        self.moments.append(time.monotonic())
        return super().write(text)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def test_what_rank_0_prints_appears_live_in_a_stdout_without_a_descriptor(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(Cell()) as cell:
        assert spawn(printing, log_dir=tmp_path / "log") == [f"{tmp_path}/log"] * 2
    assert cell.getvalue() == "rank 0 says 0\nrank 0 says 1\nrank 0 says 2\n"
    assert cell.moments[-1] - cell.moments[0] > 0.6, "it came all at once, at the end"
    assert (tmp_path / "log" / "workerlog.1").read_text().splitlines()[-1] == "rank 1 says 2"
    cell.close()
    with contextlib.redirect_stdout(cell):
        assert spawn(printing) == [None, None], "a temporary folder: nothing else may be written there"


SLOW_SCRIPT = """
    import subprocess, sys, time
    from fleet_train import spawn

    def train():
        helper = subprocess.Popen(["sleep", "600"])
        print("started", flush=True)
        for _ in range(600):
            time.sleep(1)

    try:
        spawn(train)
    except KeyboardInterrupt:
        print("interrupted")
        print(spawn(lambda: 5))
        sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_and_what_they_have_started_die_with_their_parent_or_at_ctrl_c(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = write_script(SLOW_SCRIPT, tmp_path)
    with Job(tmp_path / "job") as job:
        parent = job.start("parent", python(str(script)), clean_environ())
        job.wait_until(lambda: "started" in parent.output, 60, "a rank runs")
        (os.killpg if number == signal.SIGINT else os.kill)(parent.process.pid, number)
        (ended,) = job.wait(60)
        assert job.orphans() == []
    if number == signal.SIGINT:
        assert (ended.exit_code, ended.output.splitlines()[-2:]) == (130, ["interrupted", "[5, 5]"]), ended.output
