"""Several machines: links that go down, clocks that jump, barriers through relays."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.launch.conftest import HOSTS, Bench
from tests.support.processes import ROOT, Job, Started, clean_environ, every_python_runs, python, write_script
from tests.support.ranks import run_launchers
from tools.lab import Lab, Node

pytestmark = pytest.mark.long

_SAY = """
import os
print(os.environ["PADDLE_TRAINER_ID"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""

# Ends gracefully when it is no longer the first attempt.
_WAIT = """
import os, time
print("attempt", os.environ["FLEET_TRAIN_ATTEMPT"], "rank", os.environ["PADDLE_TRAINER_ID"], flush=True)
time.sleep(0 if int(os.environ["FLEET_TRAIN_ATTEMPT"]) else 120)
"""


def launch_command(machines: Sequence[Node], *flags_and_script: str | Path) -> list[str]:
    nodes = f"--cluster_node_ips={','.join(machine.address for machine in machines)}"
    return python("-m", "fleet_train", "launch", nodes, "--started_port=6170", *map(str, flags_and_script))


def start_both(job: Job, machines: Sequence[Node], command: Sequence[str]) -> list[Started]:
    return [
        job.start(f"node{node}", [*machine.prefix, *command], clean_environ(), cwd=job.folder / f"node{node}")
        for node, machine in enumerate(machines)
    ]


@pytest.mark.root
def test_each_machine_finds_its_place_and_the_interface_to_the_other(tmp_path: Path) -> None:
    script = write_script(_SAY, tmp_path)
    with Lab(2, "none") as lab:
        command = launch_command(lab.nodes, script)
        result = run_launchers([command] * 2, folder=tmp_path, prefixes=[machine.prefix for machine in lab.nodes])
    logs = [(folder / "log" / "workerlog.0").read_text() for folder in result.folders]
    assert logs == ["0 eth0 =eth0\n", "1 eth0 =eth0\n"], result.report()
    assert "this is node 1 (10.78.0.2)" in result.nodes[1].output


@pytest.mark.root
def test_a_machine_whose_link_is_down_is_named_in_time_and_rejoins(tmp_path: Path) -> None:
    script = write_script(_WAIT, tmp_path)
    with Lab(2, "none") as lab, Job(tmp_path) as job:
        machines = lab.nodes
        flags = "--max_restarts=1 --lost_node_timeout=3 --rejoin_timeout=60".split()
        first, second = start_both(job, machines, launch_command(machines, *flags, script))
        logs = [tmp_path / f"node{node}" / "log" / "workerlog.0" for node in (0, 1)]
        job.wait_until(lambda: all(p.exists() and "attempt 0" in p.read_text() for p in logs), 30, "ranks have begun")
        lab.set_link(1, "down")
        lost = "attempt 0: the launcher of node 1 (10.78.0.2) was lost (not heard of for 3 s)"
        job.wait_until(lambda: lost in first.output, 30, lost)
        job.wait_until(lambda: "waiting for node 1 (10.78.0.2) to come back" in first.output, 20, "node 0 waits")
        job.wait_until(
            lambda: "the launcher of node 0 (10.78.0.1), the leader of the job, cannot be reached" in second.output,
            20,
            "node 1 waits",
        )
        lab.set_link(1, "up")
        assert [one.exit_code for one in job.wait(60)] == [0, 0], job.report()
        assert [p.read_text() for p in logs] == ["attempt 1 rank 0\n", "attempt 1 rank 1\n"]
        assert job.leftovers() == []


@pytest.mark.root
def test_training_resumes_from_its_checkpoint_on_the_remaining_machine(tmp_path: Path) -> None:
    output = tmp_path / "out"
    train = f"--model=mlp --data=digits --epochs=20 --checkpoint_every=1 --evaluate_every=20 --output_dir={output}"
    flags = "--max_restarts=1 --min_nodes=1 --lost_node_timeout=3 --rejoin_timeout=2".split()
    with Lab(2, "none") as lab, Job(tmp_path) as job:
        machines = lab.nodes
        command = launch_command(machines, *flags, ROOT / "tools" / "train.py", *train.split())
        first, _ = start_both(job, machines, command)
        job.wait_until(lambda: len(list((output / "checkpoints").glob("step-*"))) == 2, 60, "two checkpoints")
        lab.set_link(1, "down")
        assert [one.exit_code for one in job.wait(120, None)] == [0, 11], job.report()
        assert (
            "node 1 (10.78.0.2) did not come back within 2 s (--rejoin_timeout); continuing with fewer nodes"
            in first.output
        )
        assert "resumed from" in (tmp_path / "node0" / "log" / "workerlog.0").read_text()
        summary = json.loads((output / "summary.json").read_text())
        assert (summary["world_size"], summary["epochs"]) == (1, 20)
        assert job.leftovers() == []


# Every look at the clock is hours away from the one before it.
_JUMPING = """
import itertools, time
real, hours = time.time, itertools.cycle([0, 7, -5, 30, -12])
time.time = lambda: real() + 3600 * next(hours)
time.time_ns = lambda: int(time.time() * 1e9)
"""
_TRAINER = "--model=mlp --data=digits --log_every=1 --checkpoint_every_steps=5 --keep_checkpoints=1000"


def start_with_jumping_clocks(bench: Bench, *flags: str) -> Path:
    environ = every_python_runs(_JUMPING, bench.folder)
    output = bench.folder / "out"
    for node in range(len(HOSTS)):
        bench.start(
            ROOT / "tools" / "train.py",
            *_TRAINER.split(),
            f"--output_dir={output}",
            *flags,
            flags=["--max_restarts=1", "--lost_node_timeout=10"],
            environ=environ,
            node=node,
        )
    return output


def steps(output: Path) -> list[int]:
    """Of the lines with a loss, in their order."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def test_a_killed_rank_resumes_from_the_newest_checkpoint(bench: Bench) -> None:
    output = start_with_jumping_clocks(bench, "--epochs=10", "--evaluate_every=10")
    bench.wait_for(lambda: len(list(output.glob("checkpoints/step-*"))) > 3, "checkpoints", 60.0)
    os.kill(json.loads(bench.log("node1/log/workerend.0.json"))["pid"], signal.SIGKILL)
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    assert ended[0].output.count("restart 1 of 1") == 1
    assert not any(
        word in one.output for one in ended for word in ("did not connect", "did not arrive", "not heard")
    ), bench.job.report()
    assert steps(output) == sorted(set(steps(output)))
    assert steps(output)[-1] == 10 * 23
    times = [json.loads(line)["time"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert times != sorted(times), "the clock has jumped"


_BARRIERS = """
import os, time
from fleet_train import fleet, role_maker
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
print("pid", os.getpid(), flush=True)
fleet.util.barrier()
time.sleep(1)
if fleet.worker_index() == 3:
    time.sleep(600)
fleet.util.barrier()
"""


def _line(log: str, word: str) -> str:
    found = re.search(rf"^{word} (.*)$", log, re.MULTILINE)
    assert found is not None, log
    return found.group(1)


def test_a_rank_that_dies_behind_a_relay_is_named_on_both_nodes(bench: Bench) -> None:
    bench_logs = ["node1/log/workerlog.1"]
    bench.start_two(_BARRIERS, flags=["--nproc_per_node=2", "--direct_ranks=0"])
    bench.wait_for_output("pid", *bench_logs)
    pid = int(_line(Path(bench.folder / bench_logs[0]).read_text(), "pid"))
    os.kill(pid, signal.SIGKILL)
    ended = bench.ended(60)
    assert [one.exit_code for one in ended] == [137, 137], bench.job.report()
    for one in ended:
        assert f"rank 3 ({HOSTS[1]}" in one.output
        assert "SIGKILL" in one.output
