"""Machines without a fault: no alarm, what each prints, which folder is shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.doctor.conftest import Two
from tests.integration.doctor.sick import HEALTHY, Patient, command, examine, host
from tests.support.ports import free_ports
from tests.support.processes import ROOT, Job, clean_environ, python
from tools.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.long]
EVERYTHING_BUT_PADDLE = ("--skip", "group")


@pytest.mark.parametrize("turn", range(3))
def test_no_alarm_where_nothing_is_wrong(two: Two, tmp_path: Path, turn: int) -> None:
    del turn
    first, second = examine(tmp_path, two, [HEALTHY, HEALTHY], *EVERYTHING_BUT_PADDLE)
    assert first.alarms == second.alarms == []
    assert (first.ended.exit_code, second.ended.exit_code) == (0, 0)
    ids = {one["id"] for one in first.made["findings"]}
    assert ids >= {"absent", "own_name", "route", "port", "mtu", "clock", "latency", "bandwidth", "retransmits"}
    assert ids >= {"memory", "shm", "open_files", "disk", "speed", "busy", "python", "paddle", "package"}
    assert first.made["findings"] == second.made["findings"]  # both know everything


def test_sixteen_machines_are_examined_within_the_time(tmp_path: Path) -> None:
    """By everything, on the processors of one machine; `examine` kills who is not at its end in time."""
    with Lab(16, "none") as lab:
        for told in examine(tmp_path, lab.nodes, [HEALTHY] * 16):
            assert told.hosts("absent", "PASS") == [("all 16 nodes",)], told.ended.output
            assert len(told.hosts("own_name", "PASS")) == 16


def test_lines_matrix_and_verdict_are_on_the_first_node(two: Two, tmp_path: Path) -> None:
    first, second = examine(tmp_path, two, [HEALTHY, HEALTHY], "--only", "network")
    assert "PASS  port  2 pairs: " in first.ended.output
    assert "from \\ to  node 0" in first.ended.output
    assert "PASS  port" not in second.ended.output
    assert f"the whole report is on {host(0, two)}" in second.ended.output
    assert first.ended.output.splitlines()[-1].startswith("FIT (")
    assert not list(tmp_path.glob("node*/.fleet_train-doctor-*"))


def test_folders_are_told_apart_and_shared_ones_recognised(two: Two, tmp_path: Path) -> None:
    shared = ("--log_dir", str(tmp_path / "log"))
    (first, _) = examine(tmp_path, two, [HEALTHY, HEALTHY], "--only", "machine", *shared)
    told = {one["measured"] for one in first.findings("shared_folder", "PASS")}
    assert told == {
        f"{tmp_path} (logs) is seen by all nodes",
        f"{tmp_path / 'node0'} (output) is seen by this node only",
        f"{tmp_path / 'node1'} (output) is seen by this node only",
    }
    assert not list(tmp_path.glob(".fleet_train-doctor-*"))


def test_a_group_is_formed(two: Two, tmp_path: Path) -> None:
    first, _ = examine(tmp_path, two, [HEALTHY, HEALTHY], "--only", "group")
    assert all("2 processes added exact integers" in one["measured"] for one in first.findings("group", "PASS"))
    assert len(first.findings("group", "PASS")) == 2, first.ended.output


def test_with_a_profile_and_a_script(two: Two, tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "train.py").write_text("lr = 0.1\n")
    flags = ("--strategy", "multi_node", "--script", "train.py", "--only", "software")
    first, _ = examine(tmp_path, two, [HEALTHY, HEALTHY], *flags)
    assert first.alarms == []
    assert {"profile", "script"} <= {one["id"] for one in first.made["findings"]}


def test_below_slurm_the_nodes_are_its(two: Two, tmp_path: Path) -> None:
    """By the variables that srun sets."""
    names = "".join(f"{machine.address} node{i}\n" for i, machine in enumerate(two))
    with Job(tmp_path) as job:
        for node, machine in enumerate(two):
            slurm = {
                "SLURM_JOB_ID": "17",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "node[0-1]",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "SLURM_PROCID": str(node),
                "SLURM_NODEID": str(node),
                "SLURM_LOCALID": "0",
            }
            here = tmp_path / f"node{node}"
            doctor = command(machine, node, Patient(hosts=names), here, ["--only", "network"])
            job.start(f"node{node}", doctor, clean_environ(slurm), cwd=here)
        first, second = job.wait(timeout_seconds=60)
        assert (first.exit_code, second.exit_code) == (0, 0), job.report()
    assert "started by Slurm (job 17, step 0): process 0 of 2" in first.output
    assert "PASS  port  2 pairs" in first.output


def test_the_tool_counts_false_alarms(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        tool = [
            *python(str(ROOT / "tools" / "bench.py")),
            "doctor",
            "--rounds",
            "1",
            "--record",
            ".",
            "--name",
            "clean",
        ]
        job.start("tool", tool, clean_environ())
        (ended,) = job.wait(timeout_seconds=90)
    runs = json.loads((tmp_path / "clean.json").read_text())["rounds"]
    assert [one["alarms"] for one in runs] == [[]], ended.output
    assert ended.exit_code == 0


def test_ctrl_c_cleans_the_folders(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        command = python("-m", "fleet_train", "doctor", "--ips", "127.0.0.2,127.0.0.3", "--node_ip", "127.0.0.2")
        doctor = job.start("doctor", [*command, "--started_port", str(free_ports(2, ["127.0.0.2"]))], clean_environ())
        job.wait_until(lambda: "waiting for node 1" in doctor.output, 30, "it waits")
        assert list(tmp_path.glob(".fleet_train-doctor-*"))
        doctor.process.terminate()
        (ended,) = job.wait(timeout_seconds=20)
        assert ended.exit_code == 143, ended.output
        assert job.orphans() == []
    assert not list(tmp_path.glob(".fleet_train-doctor-*"))


def test_below_our_launcher_the_nodes_are_the_job_s(two: Two, tmp_path: Path) -> None:
    ips = ",".join(machine.address for machine in two)
    with Job(tmp_path) as job:
        for node, machine in enumerate(two):
            launch = ["launch", "--cluster_node_ips", ips, "--nproc_per_node", "2", "-m", "fleet_train", "doctor"]
            command = [*machine.prefix, *python("-m", "fleet_train", *launch), "--only", "network"]
            job.start(f"node{node}", command, clean_environ(), cwd=tmp_path / f"node{node}")
        first, second = job.wait(timeout_seconds=90)
        assert (first.exit_code, second.exit_code) == (0, 0), job.report()
        assert job.orphans() == []
    assert "PASS  port  2 pairs: 10.77.0.2 answers at 3 ports" in first.output  # two ranks' and one of the kernel's


def test_alone_it_examines_this_machine_and_prints_json(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start("alone", ["sh", "-c", '"$@" > printed.json', "sh", *_alone("--json")], clean_environ())
        (ended,) = job.wait(timeout_seconds=40)
        assert job.orphans() == []
    made = json.loads((tmp_path / "printed.json").read_text())
    assert made["exit_code"] == ended.exit_code
    assert {tuple(one["hosts"]) for one in made["findings"]} == {("this machine",)}
    assert made["verdict"] == ended.output.splitlines()[-1]


def _alone(*flags: str) -> list[str]:
    return python("-m", "fleet_train", "doctor", *flags)
