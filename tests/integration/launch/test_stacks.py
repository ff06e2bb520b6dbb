"""Where ranks stand that hang: in the errors, the launcher's report and files, and on request; two machines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_train.cluster.flight.ring import read_ring
from tests.integration.launch.conftest import HOSTS, SECRET, Bench
from tests.support.processes import clean_environ, output_of, python, until

# At step 4 rank 1 does what the first argument says; the second one is the timeout of a collective.
SCRIPT = """
import os, re, sys, threading, time
import numpy as np
import paddle
import fleet_train
from fleet_train import fleet

def wait_for(ready):
    while not ready: pass  # not ready

def hang(how):
    if how == "loop":
        wait_for([])
    if how == "native":
        re.match(r"(a+)+b", "a" * 60)  # native

paddle.enable_static()
fleet.init(is_collective=True)
x = paddle.static.data("x", [8, 4])
loss = paddle.mean(paddle.static.nn.fc(x, 1) ** 2)
strategy = fleet_train.DistributedStrategy()
strategy.collective_timeout_seconds = int(sys.argv[2])
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
for step in range(1, 7):
    if step == 4 and sys.argv[1] == "saves alone":
        if fleet.worker_index() == 0:
            fleet.save_persistables(exe, "state")  # saves
    elif step == 4 and fleet.worker_index() == 1:
        hang(sys.argv[1])
    exe.run(feed={"x": np.ones((8, 4), "float32")}, fetch_list=[loss])  # step
if fleet.worker_index() == 1 and sys.argv[1] == "slow exit":
    threading.Event().wait()  # slow
"""


def stands(name: str) -> str:
    """What is said of a rank in the line that ends with this comment."""
    (number,) = [n for n, line in enumerate(SCRIPT.strip().splitlines(), 1) if line.endswith(f"# {name}")]
    return f"script.py:{number} `"


@pytest.mark.parametrize(
    ("how", "words", "where"),
    [
        ("loop", "rank 1 stands in ", "not ready"),
        pytest.param(
            "native",
            "rank 1 computes in native code that keeps Python's lock (state R) and stands in ",
            "native",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_line(bench: Bench, how: str, words: str, where: str) -> None:
    bench.start_two(SCRIPT, how, "3")
    ended = bench.ended(120.0)
    assert [each.exit_code for each in ended] == [11, 11], bench.job.report()
    sentence = words + stands(where)
    (line,) = [
        line for line in bench.log().splitlines() if line.startswith("fleet_train: WorkerFailed: step 4: rank 1")
    ]
    assert f"did not arrive within 3 s; {sentence}" in line
    for each in ended:
        (line,) = [line for line in each.output.splitlines() if line.startswith(sentence)]
        assert line.endswith("; rank 0 waits for it in step 4, barrier"), line
        assert "C++ Traceback" not in each.output
        assert SECRET not in each.output
    for node, rank in enumerate((0, 1)):
        folder = bench.folder / f"node{node}" / "log"
        assert (folder / f"stacks.{rank}.txt").read_text().startswith(f"rank {rank} ")
        ring = read_ring((folder / f"flight.{rank}.bin").read_bytes())
        assert ring is not None
        assert (ring.rank, ring.world_size) == (rank, 2)
        assert {"run", "barrier", "wire"} <= {event.kind for event in ring.events}
    assert bench.files_with(SECRET) == []


def test_ranks_that_wait_at_different_points_are_both_named_with_their_lines(bench: Bench) -> None:
    bench.start_two(SCRIPT, "saves alone", "60")
    ended = bench.ended(120.0)
    assert [each.exit_code for each in ended] == [8, 8], bench.job.report()
    # The one that failed first, which either may be, is named first: the stack below is its.
    (line,) = [line for line in ended[0].output.splitlines() if re.match(r"rank [01] waits in step", line)]
    assert f"rank 0 waits in step 3, barrier fleet.save_persistables, at {stands('saves')}" in line
    assert f"rank 1 waits in step 4, barrier, at {stands('step')}" in line


def ask(bench: Bench, *flags: str) -> subprocess.CompletedProcess[str]:
    command = python("-m", "fleet_train", "stacks", *flags)
    return subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=100, cwd=bench.folder)


def test_a_running_job_shows_where_it_stands_to_whoever_asks(bench: Bench) -> None:
    first, second = bench.start_two(SCRIPT, "loop", "200")
    until(lambda: "not ready" in ask(bench, "--log_dir=node0/log").stdout, 120.0)
    expected = f"rank 1 stands in {stands('not ready')}"
    nodes = f"--ips={','.join(HOSTS)}"
    by_log, by_ips, here = (
        ask(bench, *flags)
        for flags in (["--log_dir=node0/log"], [nodes, f"--started_port={bench.first_port}", "--nproc=1"], [])
    )
    for asked in (by_log, by_ips, here):
        assert asked.returncode == 0, asked.stderr
        assert expected in asked.stdout
        assert "rank 0 waits for it in step 4, barrier" in asked.stdout
        assert SECRET not in asked.stdout
    counted = ask(bench, "--log_dir=node0/log", "--samples=3", "--every=0.1").stdout.splitlines()
    assert re.match(r"rank 0 \(process [0-9]+\), 3 samples", counted[0]), counted
    (((first_stand, second_stand),),) = json.loads(ask(bench, "--json", "--log_dir=node0/log").stdout)
    assert [first_stand["rank"], second_stand["rank"]] == [0, 1]
    command = python("-m", "fleet_train", "top", "--json", nodes, f"--started_port={bench.first_port}")
    rows = json.loads(output_of(command))
    assert [(row["rank"], row["ranks"], row["is_waited_for"]) for row in rows] == [(0, 2, False), (1, 2, True)]
    assert rows[0]["state"].startswith("barrier for ")
    os.kill(second.process.pid, signal.SIGQUIT)
    bench.job.wait_until(lambda: expected in second.output, 30.0, "the stacks on the launcher's terminal")
    os.kill(first.process.pid, signal.SIGINT)
    assert [each.exit_code for each in bench.ended(60.0)] == [130, 130], bench.job.report()


def test_whoever_asks_for_no_job_is_told_so(bench: Bench) -> None:
    asked = ask(bench, "--log_dir=.")
    assert (asked.returncode, asked.stdout) == (5, "")
    assert "there is no job.json" in asked.stderr
    (bench.folder / "job.json").write_text(json.dumps({"store": f"127.0.0.1:{bench.first_port}/0", "job": "ended"}))
    asked = ask(bench, "--log_dir=.")
    assert (asked.returncode, asked.stdout) == (5, "")
    assert f"no job answers at 127.0.0.1:{bench.first_port}/0: it has ended" in asked.stderr
    asked = ask(bench, "--ips=127.0.0.1", f"--started_port={bench.first_port}")
    assert (asked.returncode, asked.stdout) == (5, "")
    assert f"no job answers at 127.0.0.1:{bench.first_port + 1}" in asked.stderr
    assert ask(bench, "--ips=127.0.0.1", "--log_dir=.").returncode == 2


@pytest.mark.long
def test_a_rank_that_does_not_end_is_named_with_its_line(bench: Bench) -> None:
    started = bench.start(SCRIPT, "slow exit", "60", flags=["--nproc_per_node=2"])
    expected = rf"1 rank ended [0-9]+ s ago; rank 1 stands in {re.escape(stands('slow'))}"
    bench.job.wait_until(lambda: re.search(expected, started.output) is not None, 120.0, "the line")
    os.kill(started.process.pid, signal.SIGINT)
    (ended,) = bench.ended(60.0)
    assert ended.exit_code == 130


def test_the_stock_launchers_ranks_are_named_with_their_lines(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.strip())
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=2", "--log_dir=log", str(script)]
    bench.job.start("stock", [*command, "loop", "3"], clean_environ(), tmp_path)
    (ended,) = bench.ended(120.0)
    assert ended.exit_code != 0
    log = (tmp_path / "log" / "workerlog.0").read_text()
    assert f"did not arrive within 3 s; rank 1 stands in {stands('not ready')}" in log
    assert (tmp_path / "log" / "stacks.1.txt").read_text().startswith(f"rank 1 stands in {stands('not ready')}")
    assert bench.job.orphans() == []
