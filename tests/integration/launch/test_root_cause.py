"""The root cause, where the order in which processes end is misleading: real ranks, real launchers."""

from __future__ import annotations

import re

import pytest

from tests.integration.launch.conftest import SECRET, Bench

# Trains; at step 3 of the first attempt rank 1, or every rank, does what the first argument says.
SCRIPT = """
import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.errors import DataError, FleetTrainError
from fleet_train.profile import Profile

def raise_and_exit_slowly() -> None:
    sys.excepthook = lambda _, error, __: print(f"other hook: {error}", flush=True)
    atexit.register(lambda: time.sleep(60))
    threading.Thread(target=lambda: time.sleep(60)).start()
    raise DataError("bad row")

def make_children() -> None:
    # A child that ends the script, one that calls fleet, and one of multiprocessing; then the parent goes on.
    for child in (sys.exit, ask_in_child):
        pid = os.fork()
        if pid == 0:
            child()
            sys.exit(5)
        os.waitpid(pid, 0)
    worker = multiprocessing.get_context("fork").Process(target=sys.exit)
    worker.start()
    worker.join()

def ask_in_child() -> None:
    try:
        fleet.barrier_worker()
    except FleetTrainError as error:
        print(f"a child was told: {error}", flush=True)
        raise

def break_links() -> None:
    # All connections but those of the job's store end; the processes live.
    store = int(os.environ["FLEET_TRAIN_STORE"].partition("/")[0].rpartition(":")[2])
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as connection:
            if connection.getpeername()[1:2] not in ((store,), ()):
                connection.shutdown(socket.SHUT_RDWR)

FAULTS = {
    "raise, exit slowly": raise_and_exit_slowly,
    "os._exit 0": lambda: os._exit(0),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "children": make_children,
}

def main() -> None:
    paddle.enable_static()
    fleet.init()
    x = paddle.static.data("x", [8, 4])
    loss = paddle.mean(paddle.static.nn.fc(x, 1) ** 2)
    profile = Profile(collective_timeout_seconds=4 if sys.argv[1] == "freeze" else 60)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), profile).minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    for step in range(1, 7):
        if step == 3 and sys.argv[1] == "links break":
            if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
                break_links()
        elif step == 3 and fleet.worker_index() == 1:
            FAULTS[sys.argv[1]]()
        exe.run(fleet.main_program, feed={"x": np.ones((8, 4), "float32")}, fetch_list=[loss])
    print("all steps made", flush=True)

main()
"""


def rows(output: str) -> list[list[str]]:
    """The table below the launcher's last words: role, rank, endpoint, how it ended, after, log file."""
    lines = [line for line in output.splitlines() if line.startswith(("failed first", "secondary"))]
    return [re.split(r"\s{2,}", line) for line in lines]


def check_table(bench: Bench, output: str, guilty: str, how: str) -> None:
    first, other = rows(output)
    assert first[:3] == ["failed first", "1", guilty], bench.job.report()
    assert re.fullmatch(how, first[3]), bench.job.report()
    assert other[:2] == ["secondary", "0"], bench.job.report()


_BROKE = r"was lost \(its connection broke\) while others waited for it at step 3"
_MISSED = r"did not arrive at step 3 within 4 s"


@pytest.mark.parametrize(
    ("fault", "exit_code", "how", "told"),
    [
        # Its exit handler and its thread would run for a minute; the launcher does not wait so long.
        pytest.param(
            "raise, exit slowly",
            10,
            "DataError, then stopped by SIG(TERM|KILL)",
            "bad row",
            marks=pytest.mark.long,
        ),
        # One that is still exiting 5 s after its failure, as on a busy machine, is stopped.
        pytest.param(
            "os._exit 0",
            11,
            rf"exit code 0 \({_BROKE}\)|{_BROKE}, then stopped by SIGTERM",
            "was lost",
            marks=pytest.mark.long,
        ),
        # Before it is ended, it goes on for a moment, to show its stack.
        pytest.param(
            "freeze",
            11,
            rf"{_MISSED}, then .*|exit code 11 \({_MISSED}\)",
            "is stopped by a signal (state T",
            marks=pytest.mark.long,
        ),
        ("kill", 137, "killed by SIGKILL", ""),
    ],
)
def test_the_rank_that_failed_is_named_on_both_nodes(
    bench: Bench, fault: str, exit_code: int, how: str, told: str
) -> None:
    bench.start_two(SCRIPT, fault)
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [exit_code, exit_code], bench.job.report()
    for one in ended:
        check_table(bench, one.output, f"127.0.0.3:{bench.first_port}", how)
        if fault == "raise, exit slowly":
            assert "  | fleet_train.errors.DataError: bad row" in one.output.splitlines(), bench.job.report()
            assert "other hook: bad row" in bench.log("node1/log/workerlog.0").splitlines()
    if told:
        (line,) = [line for line in bench.log().splitlines() if line.startswith("fleet_train: WorkerFailed:")]
        assert f"rank 1 (127.0.0.3:{bench.first_port})" in line
        assert told in line
    assert bench.job.leftovers() == []
    assert bench.files_with(SECRET) == []


def test_a_network_fault_between_living_ranks_is_no_ranks_failure_and_restarts(bench: Bench) -> None:
    bench.start_two(SCRIPT, "links break", flags=["--max_restarts=1"])
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    for one in ended:
        (line,) = [line for line in one.output.splitlines() if line.startswith("fleet_train: attempt 0: ")]
        assert re.match(r"fleet_train: attempt 0: step 3\b.*: the collective failed on every rank \(", line), line
        assert "all ranks are alive" in line
        assert "failed first" not in one.output


def test_children_of_a_rank_have_no_part_in_its_job(bench: Bench) -> None:
    bench.start_two(SCRIPT, "children")
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    log = bench.log("node1/log/workerlog.0")
    assert "a child was told: process" in log
    assert "was forked from rank 1" in log
    assert "all steps made" in log
