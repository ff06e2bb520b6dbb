"""Two machines connected by a link only: routes, interfaces, own addresses, a link that goes down."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.launchers import run_launchers
from tests.support.namespaces import Namespace, two_machines
from tests.support.processes import ROOT, Job, Started, clean_environ, python, write_script

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


def launch_command(machines: tuple[Namespace, Namespace], *flags_and_script: str | Path) -> list[str]:
    nodes = f"--cluster_node_ips={','.join(machine.address for machine in machines)}"
    return python("-m", "fleet_train", "launch", nodes, "--started_port=6170", *map(str, flags_and_script))


def start_both(job: Job, machines: tuple[Namespace, Namespace], command: Sequence[str]) -> tuple[Started, Started]:
    def start(node: int) -> Started:
        prefix, folder = machines[node].prefix, job.folder / f"node{node}"
        return job.start(f"node{node}", [*prefix, *command], clean_environ(), cwd=folder)

    return start(0), start(1)


@pytest.mark.root
def test_each_machine_finds_its_place_and_the_interface_to_the_other(tmp_path: Path) -> None:
    script = write_script(_SAY, tmp_path)
    with two_machines() as machines:
        command = launch_command(machines, script)
        result = run_launchers([command] * 2, folder=tmp_path, prefixes=[machine.prefix for machine in machines])
    logs = [(folder / "log" / "workerlog.0").read_text() for folder in result.folders]
    assert logs == ["0 eth0 eth0\n", "1 eth0 eth0\n"], result.report()
    assert "this is node 1 (10.77.0.2)" in result.nodes[1].output


@pytest.mark.root
def test_a_machine_whose_link_is_down_is_named_in_time_and_rejoins(tmp_path: Path) -> None:
    script = write_script(_WAIT, tmp_path)
    with two_machines() as machines, Job(tmp_path) as job:
        flags = "--max_restarts=1 --lost_node_timeout=3 --rejoin_timeout=60".split()
        first, second = start_both(job, machines, launch_command(machines, *flags, script))

        def said(node: Started, text: str) -> bool:
            return text in node.output

        logs = [tmp_path / f"node{node}" / "log" / "workerlog.0" for node in (0, 1)]
        job.wait_until(lambda: all(p.exists() and "attempt 0" in p.read_text() for p in logs), 30, "ranks have begun")
        machines[1].set_link("down")
        began = time.monotonic()
        lost = "attempt 0: the launcher of node 1 (10.77.0.2) was lost (not heard of for 3 s)"
        job.wait_until(lambda: said(first, lost), 30, lost)
        assert time.monotonic() - began < 25.0, job.report()
        job.wait_until(lambda: said(first, "waiting for node 1 (10.77.0.2) to come back"), 20, "node 0 waits")
        job.wait_until(
            lambda: said(second, "the launcher of node 0 (10.77.0.1), the leader of the job, cannot be reached"),
            20,
            "node 1 waits",
        )
        machines[1].set_link("up")
        assert [one.exit_code for one in job.wait(60)] == [0, 0], job.report()
        assert [p.read_text() for p in logs] == ["attempt 1 rank 0\n", "attempt 1 rank 1\n"]
        assert job.leftovers() == []


@pytest.mark.root
def test_training_resumes_from_its_checkpoint_on_the_remaining_machine(tmp_path: Path) -> None:
    output = tmp_path / "out"
    train = f"--model=mlp --data=digits --epochs=20 --checkpoint_every=1 --evaluate_every=20 --output_dir={output}"
    flags = "--max_restarts=1 --min_nodes=1 --lost_node_timeout=3 --rejoin_timeout=2".split()
    with two_machines() as machines, Job(tmp_path) as job:
        command = launch_command(machines, *flags, ROOT / "tools" / "train.py", *train.split())
        first, _ = start_both(job, machines, command)
        job.wait_until(lambda: len(list((output / "checkpoints").glob("step-*"))) == 2, 60, "two checkpoints")
        machines[1].set_link("down")
        assert [one.exit_code for one in job.wait(120, None)] == [0, 11], job.report()
        assert (
            "node 1 (10.77.0.2) did not come back within 2 s (--rejoin_timeout); continuing with fewer nodes"
            in first.output
        )
        assert "resumed from" in (tmp_path / "node0" / "log" / "workerlog.0").read_text()
        summary = json.loads((output / "summary.json").read_text())
        assert (summary["world_size"], summary["epochs"]) == (1, 20)
        assert job.leftovers() == []
