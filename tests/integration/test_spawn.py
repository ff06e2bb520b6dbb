"""``fleet_train.spawn`` with real ranks: results, failures with the rank's name, and no process left behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_train import DistributedStrategy, spawn
from fleet_train.errors import ClusterError, FleetTrainError, Preempted, RankFailed
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
    base = 10

    def number(add: int) -> tuple[int, int]:
        return rank(), base + add

    assert spawn(number, (1,), nprocs=3) == [(0, 11), (1, 11), (2, 11)]
    assert spawn(number, (2,), nprocs=1) == [(0, 12)]


def test_two_ranks_train_as_one_process_with_the_joint_batch() -> None:
    from fleet_train.selftest.training import digest, relative_difference

    joint = 2 * SAMPLES_PER_RANK
    two = spawn(trained, (joint,), strategy="unfused")
    ((_, alone, _, _),) = spawn(trained, (joint, two[0][0]), nprocs=1)
    assert digest(two[0][0]) == digest(two[1][0]), "ranks started from different values"
    assert digest(two[0][1]) == digest(two[1][1]), "replicas differ"
    start = {name: two[0][0][name] for name in alone}
    assert relative_difference(alone, start) > 1e-3, "nothing was trained"
    assert relative_difference(two[0][1], alone) < RELATIVE_TOLERANCE
    assert [result[3] for result in two] == ["unfused", "unfused"]


def knobs() -> tuple[str, int, str]:
    import paddle

    from fleet_train.convert import fleet as facade

    fleet = join()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1))
    profile = facade.profile()
    return profile.name, profile.nccl_comm_num, os.environ.get("SPAWN_TEST", "")


def test_a_rank_whose_call_has_returned_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_train.timeouts.SPAWN_EXIT_SECONDS", 0.2)

    def lingers() -> int:
        threading.Thread(target=time.sleep, args=(120,)).start()
        return rank()

    began = time.monotonic()
    assert spawn(lingers) == [0, 1]
    assert time.monotonic() - began < 60


@pytest.mark.long
def test_a_strategy_is_the_default_of_the_ranks_as_name_path_and_object(tmp_path: Path) -> None:
    strategy = DistributedStrategy()
    strategy.nccl_comm_num = 3
    assert [knobs_[1] for knobs_ in spawn(knobs, strategy=strategy)] == [3, 3]
    path = tmp_path / "mine.yaml"
    path.write_text("extends: unfused\nnccl_comm_num: 2\nenvironment: {SPAWN_TEST: here}\n")
    assert spawn(knobs, nprocs=1, strategy=path) == [("mine", 2, "here")]


USES_PADDLE = """
    import os
    import numpy as np
    import paddle
    from fleet_train import fleet, spawn

    def mean(values):
        paddle.enable_static()
        fleet.init()
        return float(fleet.all_reduce(np.array(values[fleet.worker_index()], "float32"), "mean"))

    tensor = paddle.to_tensor([1.0, 2.0])
    before = dict(os.environ)
    print(spawn(mean, ([1.0, 3.0],)))
    assert dict(os.environ) == before
    print(float((tensor * 2).sum()))
    fleet.init()
    print(fleet.worker_num())
"""


@pytest.mark.long
def test_the_parent_has_not_joined_and_may_use_paddle_before_and_after(tmp_path: Path) -> None:
    with Job(tmp_path / "job") as job:
        job.start("parent", python(str(write_script(USES_PADDLE, tmp_path))), clean_environ())
        (ended,) = job.wait(100)
        assert ended.exit_code == 0, ended.output
        assert ended.output.splitlines()[-3:] == ["[2.0, 2.0]", "6.0", "1"]
        assert job.orphans() == []


def test_the_rank_that_fails_first_is_named_with_its_traceback() -> None:
    def fails(step: int) -> None:
        if step == 4 and rank() == 1:
            raise ValueError("batch 4 is empty")

    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        spawn(trained, (2 * SAMPLES_PER_RANK, None, fails))
    assert time.monotonic() - began < 200
    text = str(failed.value)
    assert text.startswith("rank 1 of 2 failed first: ValueError: batch 4 is empty")
    assert 'raise ValueError("batch 4 is empty")' in text
    assert "rank 0 followed: WorkerFailed: rank 1" in text
    assert (failed.value.rank, failed.value.rank_exit_code, failed.value.signal_number) == (1, 1, None)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    def fails(step: int) -> None:
        if step == 4 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="rank 1 of 2 failed first: killed by SIGKILL") as failed:
        spawn(trained, (2 * SAMPLES_PER_RANK, None, fails))
    assert (failed.value.rank, failed.value.signal_number) == (1, signal.SIGKILL)
    assert "| step 4" in str(failed.value), "the last lines of the killed rank are shown"


def segfault() -> None:
    import ctypes

    if rank() == 1:
        ctypes.string_at(0)
    time.sleep(300)


def ends_itself() -> None:
    if rank() == 0:
        os._exit(0)
    time.sleep(300)


def says_exit() -> None:
    sys.exit("no data" if rank() == 1 else 0)


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank() == 0:
        raise OSError("disk full")
    os.system("sleep 300")
    time.sleep(300)


@pytest.mark.parametrize(
    ("train", "first"),
    [
        (segfault, "rank 1 of 2 failed first: killed by SIGSEGV"),
        pytest.param(
            ends_itself,
            "rank 0 of 2 failed first: .*exit code 0 before its function had returned",
            marks=pytest.mark.long,
        ),
        pytest.param(says_exit, "rank 1 of 2 failed first: sys.exit.'no data'.", marks=pytest.mark.long),
        (ignores_sigterm, "rank 0 of 2 failed first: OSError: disk full"),
    ],
)
def test_every_kind_of_exit_is_reported_and_the_others_are_stopped(train: Callable[[], None], first: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=first):
        spawn(train)
    assert time.monotonic() - began < 150, "the others, which would take 300 s, were waited for"


def leaves_early() -> None:
    import numpy as np

    fleet = join()
    if rank() == 1:
        fleet.all_reduce(np.ones(3, "float32"), "sum")


@pytest.mark.long
def test_a_rank_that_returns_while_others_need_it_is_the_one_that_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of 2 failed first: .*left"):
        spawn(leaves_early)


def never_joins() -> None:
    if rank() == 1:
        join()


@pytest.mark.long
def test_a_rank_that_returns_without_joining_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 of 2 failed first"):
        spawn(never_joins)
    assert time.monotonic() - began < 60


def test_ranks_that_stop_gracefully_are_no_failure() -> None:
    def stops() -> None:
        raise Preempted("SIGTERM came; the state is saved")

    with pytest.raises(Preempted, match=r"rank 0 stopped gracefully: .*the state is saved"):
        spawn(stops)


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    def makes_a_lock() -> Any:
        return {"loss": 1.0, "lock": threading.Lock()}

    with pytest.raises(RankFailed, match=r"the value under 'lock' is a value of type _thread\.lock"):
        spawn(makes_a_lock)


def test_large_arguments_and_results_travel() -> None:
    import numpy as np

    def doubled(values: Any) -> Any:
        return values * 2

    values = np.arange(3_000_000, dtype="float64")
    for result in spawn(doubled, (values,)):
        np.testing.assert_array_equal(result, values * 2)


def nested() -> Any:
    return spawn(says_exit)


def test_a_rank_cannot_spawn() -> None:
    with pytest.raises(RankFailed, match=r"fleet_train\.spawn was called in rank 0 of a job"):
        spawn(nested, nprocs=1)


def test_below_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_TRAIN_STORE", "127.0.0.1:1/0")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    with pytest.raises(ClusterError, match="in rank 1 of a job"):
        spawn(says_exit)


def test_a_module_that_spawns_when_it_is_imported_is_named(tmp_path: Path) -> None:
    module = """
        from fleet_train import spawn

        def train():
            return 1

        spawn(train)
    """
    write_script(module, tmp_path, "unguarded.py")
    with Job(tmp_path / "job") as job:
        job.start("parent", python("-c", "import unguarded"), clean_environ(), cwd=tmp_path)
        (ended,) = job.wait(60)
    assert ended.exit_code == 1
    last = ended.output.strip().splitlines()[-1]
    assert last.startswith(
        "fleet_train.errors.ClusterError: fleet_train.spawn is called at the top level of unguarded ("
    )
    assert "unguarded.py:6), which every rank imports to find train" in last
    assert '`if __name__ == "__main__":`' in last


def printing() -> None:
    for number in range(3):
        print(f"rank {rank()} says {number}")
        time.sleep(0.4)


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
        spawn(printing, log_dir=tmp_path / "log")
    assert cell.getvalue() == "rank 0 says 0\nrank 0 says 1\nrank 0 says 2\n"
    assert cell.moments[-1] - cell.moments[0] > 0.6, "it came all at once, at the end"
    logs = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert logs == ["workerlog.0", "workerlog.1"]
    assert (tmp_path / "log" / "workerlog.1").read_text().splitlines()[-1] == "rank 1 says 2"


def test_a_closed_stdout_is_no_failure() -> None:
    cell = Cell()
    cell.close()
    with contextlib.redirect_stdout(cell):
        assert spawn(printing) == [None, None]


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


def test_ctrl_c_ends_all_ranks_and_a_spawn_afterwards_works(tmp_path: Path) -> None:
    script = write_script(SLOW_SCRIPT, tmp_path)
    with Job(tmp_path / "job") as job:
        parent = job.start("parent", python(str(script)), clean_environ())
        job.wait_until(lambda: "started" in parent.output, 60, "a rank runs")
        began = time.monotonic()
        os.killpg(parent.process.pid, signal.SIGINT)
        (ended,) = job.wait(60)
        assert (ended.exit_code, ended.output.splitlines()[-2:]) == (130, ["interrupted", "[5, 5]"]), ended.output
        assert time.monotonic() - began < 60
        assert job.orphans() == []


def test_ranks_and_what_they_have_started_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = write_script(SLOW_SCRIPT, tmp_path)
    with Job(tmp_path / "job") as job:
        parent = job.start("parent", python(str(script)), clean_environ())
        job.wait_until(lambda: "started" in parent.output, 60, "a rank runs")
        parent.process.kill()
        job.wait(60)
        assert job.orphans() == []


@pytest.mark.long
def test_two_spawns_side_by_side_do_not_mix(tmp_path: Path) -> None:
    source = """
        import sys
        import numpy as np
        from fleet_train import spawn

        def total(value):
            import paddle
            from fleet_train import fleet, role_maker
            paddle.enable_static()
            fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
            return float(fleet.all_reduce(np.array(value, "float32"), "sum"))

        print("totals", spawn(total, (float(sys.argv[1]),)))
    """
    script = write_script(textwrap.dedent(source), tmp_path)
    with Job(tmp_path / "job") as job:
        for value in ("1", "5"):
            job.start(f"parent{value}", python(str(script), value), clean_environ())
        ended = job.wait(120)
        assert [one.output.splitlines()[-1] for one in ended] == ["totals [2.0, 2.0]", "totals [10.0, 10.0]"]
        assert job.orphans() == []


@pytest.mark.parametrize("nprocs", [0, -1, "2", True])
def test_a_number_of_ranks_that_cannot_be_is_refused(nprocs: Any) -> None:
    with pytest.raises(ClusterError, match="nprocs="):
        spawn(printing, nprocs=nprocs)


def test_a_wrong_strategy_is_refused_before_a_rank_starts() -> None:
    with pytest.raises(FleetTrainError, match="'nonsense' is not a profile of the catalogue"):
        spawn(printing, strategy="nonsense")
    with pytest.raises(ClusterError, match="a value of type int: it takes a profile's name"):
        spawn(printing, strategy=3)
