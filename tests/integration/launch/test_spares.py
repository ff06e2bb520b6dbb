"""Spare processes in real jobs: ranks go on in them, and train and end as new processes do."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress

import psutil
import pytest

from tests.integration.launch.conftest import Bench, send
from tests.support.processes import Started

SCRIPT = """
import os, sys, time
{before}import numpy as np
import paddle
from paddle import nn, static
from fleet_train import fleet
from of_my_own import samples
{after}
paddle.enable_static()
paddle.seed(5)
fleet.init()
rank, attempt = fleet.worker_index(), int(os.environ["FLEET_TRAIN_ATTEMPT"])
x = static.data("x", [None, 8])
loss = (nn.functional.dropout(nn.Linear(8, 8)(x)) ** 2).mean()
fleet.distributed_optimizer(paddle.optimizer.Adam(0.1)).minimize(loss)
exe = static.Executor()
exe.run(static.default_startup_program())
for step in range(6):
    if step == 3 and rank == 1 and attempt < int(sys.argv[1]):
        time.sleep(600)
    if step == 4 and rank == 1 and sys.argv[2:] == ["raises"]:
        raise ValueError("as a script does")
    (value,) = exe.run(feed={{"x": samples(step, rank)}}, fetch_list=[loss])
    print(rank, step, value.tobytes().hex(), sys.argv, __name__, flush=True)
"""
OWN = """
import numpy as np
def samples(step, rank):
    return np.random.default_rng([step, rank]).standard_normal((4, 8)).astype("float32")
"""
WAITS = "after a failure 2 ranks will go on in spare processes"


def start(
    bench: Bench, *arguments: str, flags: tuple[str, ...] = (), before: str = "", after: str = "", job: str = ""
) -> Started:
    script = bench.folder / "train.py"
    script.write_text(SCRIPT.format(before=before and before + "\n", after=after))
    (bench.folder / "of_my_own.py").write_text(OWN)
    flags = ("--nproc_per_node=2", "--max_restarts=3", *flags)
    return bench.start(script, *arguments, flags=flags, job=job)


def children(launcher: Started) -> dict[int, str]:
    found = {}
    for each in psutil.Process(launcher.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended; also as a zombie
            found[each.pid] = " ".join(each.cmdline())
    return found


def spares_of(launcher: Started) -> set[int]:
    """Processes that were started as spares; some are ranks by now."""
    return {pid for pid, command in children(launcher).items() if "launch/spare.py" in command}


def pid_of(bench: Bench, local: int, node: int = 0) -> int:
    """Of its process in this attempt; 0 until it is known."""
    return int(json.loads(bench.log(f"node{node}/log/workerend.{local}.json") or '{"pid": 0}')["pid"])


def printed(bench: Bench, rank: int) -> list[str]:
    return re.findall(rf"^{rank} \d .*$", bench.log(f"node0/log/workerlog.{rank}"), re.MULTILINE)


def kill_rank_1(bench: Bench, launcher: Started, attempt: int) -> None:
    """Once both ranks have a spare; they go on in these in this attempt."""
    ranks = {pid_of(bench, 0), pid_of(bench, 1)}
    bench.wait_for(lambda: len(spares_of(launcher) - ranks) == 2, "two spares", 60.0)
    waiting, killed = spares_of(launcher) - ranks, pid_of(bench, 1)
    os.kill(killed, signal.SIGKILL)
    bench.wait_for(lambda: f"log; attempt {attempt}" in launcher.output, "a restart")
    bench.wait_for(lambda: {pid_of(bench, 0), pid_of(bench, 1)} <= waiting, "ranks in spares")
    assert f"restart {attempt} of 3 now" in launcher.output


def test_ranks_go_on_in_spares_with_the_same_bits_and_leave_nothing_behind(bench: Bench) -> None:
    undisturbed = start(bench, "0")
    assert undisturbed.process.wait(timeout=90) == 0, undisturbed.output
    expected = [printed(bench, rank) for rank in (0, 1)]
    assert [len(lines) for lines in expected] == [6, 6]
    launcher = start(bench, "2", job=" with faults")
    bench.wait_for(lambda: WAITS in launcher.output, "spares that wait", 60.0)
    kill_rank_1(bench, launcher, 1)
    kill_rank_1(bench, launcher, 2)
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    for rank, lines in enumerate(expected):
        assert printed(bench, rank) == [line.replace("'0']", "'2']") for line in lines]
    bench.no_orphans_within(10.0)


def test_an_error_in_a_spare_is_shown_as_in_a_new_process(bench: Bench) -> None:
    launcher = start(bench, "1", "raises")
    bench.wait_for(lambda: WAITS in launcher.output, "spares that wait", 90.0)
    os.kill(pid_of(bench, 1), signal.SIGKILL)
    assert launcher.process.wait(timeout=120) == 1, launcher.output
    assert "rank 1" in launcher.output
    assert "ValueError: as a script does" in launcher.output
    shown = bench.log("node0/log/workerlog.1.attempt1")
    trace = shown[shown.index("Traceback (most recent call last):") :]
    assert trace.splitlines()[1].strip().startswith(f'File "{bench.folder / "train.py"}", line '), trace
    assert "it failed twice in the same way" in launcher.output
    bench.no_orphans_within(10.0)


@pytest.mark.long
def test_a_script_that_does_something_before_it_imports_paddle_starts_anew_and_trains_alike(bench: Bench) -> None:
    sets = 'os.environ["FLAGS_benchmark"] = "1"'
    shows = 'print("flag", paddle.get_flags("FLAGS_benchmark"), flush=True)'
    launcher = start(bench, "1", before=sets, after=shows)
    bench.wait_for(lambda: "no more spare processes" in launcher.output, "that there are none", 90.0)
    assert "line 3 of the script stands above its import of Paddle" in launcher.output
    os.kill(pid_of(bench, 1), signal.SIGKILL)
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    assert len(printed(bench, 0)) == 6
    for log in ("workerlog.0.attempt0", "workerlog.0"):
        assert "flag {'FLAGS_benchmark': True}" in bench.log(f"node0/log/{log}")


@pytest.mark.long
def test_without_spares_there_is_none_and_ctrl_c_leaves_none(bench: Bench) -> None:
    launcher = start(bench, "1", flags=("--spares=0",))
    bench.wait_for(lambda: len(printed(bench, 0)) == 3, "three steps", 90.0)
    bench.wait_for(lambda: (bench.folder / "node0/log/.trained").exists(), "a step")
    assert not spares_of(launcher)
    os.kill(pid_of(bench, 1), signal.SIGKILL)
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    again = start(bench, "3", job=" stopped")
    bench.wait_for(lambda: WAITS in again.output, "spares that wait", 90.0)
    send(again, signal.SIGINT)
    again.process.wait(timeout=60)
    bench.no_orphans_within(10.0)


UNTIL_TOLD = """
import sys, time
from contextlib import suppress
from pathlib import Path
import numpy as np
import paddle
from paddle import nn, static
from fleet_train import fleet

paddle.enable_static()
fleet.init()
x = static.data("x", [None, 8])
loss = (nn.Linear(8, 8)(x) ** 2).mean()
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = static.Executor()
exe.run(static.default_startup_program())
while not fleet.gather(Path(sys.argv[1]).exists())[0]:
    exe.run(feed={"x": np.ones((4, 8), "float32")}, fetch_list=[])
    print("a step", fleet.worker_num(), flush=True)
    time.sleep(0.05)
"""


@pytest.mark.long
def test_a_node_that_comes_back_imports_before_the_others_stop_for_it(bench: Bench) -> None:
    flags = ["--max_restarts=5", "--min_nodes=1", "--rejoin_timeout=1", "--lost_node_timeout=5"]
    told = str(bench.folder / "told")
    first, second = bench.start_two(UNTIL_TOLD, told, flags=flags)
    for node, launcher in enumerate((first, second)):
        bench.wait_for_output("a step 2", f"node{node}/log/workerlog.0")
        bench.wait_for(lambda of=launcher: WAITS.replace("2 ranks", "1 rank") in of.output, "a spare", 60.0)
    second.process.kill()
    bench.wait_for_output("a step 1", "node0/log/workerlog.0")
    again = bench.start(UNTIL_TOLD, told, flags=flags, node=1, job=" again")
    bench.wait_for(lambda: bool(spares_of(again)), "a spare before the node is part of the job", 60.0)
    waiting = spares_of(again)
    bench.wait_for(lambda: "can join again" in first.output, "the node joins", 60.0)
    bench.wait_for(lambda: pid_of(bench, 0, node=1) in waiting, "its rank in its spare", 60.0)
    bench.wait_for_output("a step 2", "node1/log/workerlog.0")
    (bench.folder / "told").touch()
    assert first.process.wait(timeout=60) == again.process.wait(timeout=60) == 0, first.output + again.output
    bench.no_orphans_within(10.0)
