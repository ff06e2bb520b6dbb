"""Machines without a fault: no alarm, whoever starts the doctors; and the doctor's line in a launch's report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.doctor.conftest import HEALTHY, Two, examine, host
from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python, run_alone, write_script
from tools.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.long]


def test_no_alarm_where_nothing_is_wrong_and_the_first_node_prints_the_report(two: Two, tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "train.py").write_text("lr = 0.1\n")
    flags = ("--strategy", "multi_node", "--script", "train.py", "--log_dir", str(tmp_path / "log"))
    # Forming a group takes longer than it should where others use the processors.
    flags = (*flags, "--verbose", "--skip", "group")
    first, second = examine(tmp_path, two, [HEALTHY, HEALTHY], *flags)
    assert first.alarms == second.alarms == []
    assert (first.ended.exit_code, second.ended.exit_code) == (0, 0)
    ids = {one["id"] for one in first.made["findings"]}
    assert ids >= {"absent", "own_name", "route", "port", "mtu", "clock", "latency", "bandwidth", "retransmits"}
    assert ids >= {"memory", "shm", "open_files", "disk", "speed", "busy", "python", "paddle", "package"}
    assert ids >= {"profile", "script"}
    assert first.made["findings"] == second.made["findings"]  # both know everything
    assert {one["measured"] for one in first.findings("shared_folder", "PASS")} == {
        f"{tmp_path} (logs) is seen by all nodes",
        f"{tmp_path / 'node0'} (output) is seen by this node only",
        f"{tmp_path / 'node1'} (output) is seen by this node only",
    }
    assert "PASS  port  2 pairs: " in first.ended.output
    assert "from \\ to  node 0" in first.ended.output
    assert first.ended.output.splitlines()[-1].startswith("OK")
    assert "PASS  port" not in second.ended.output
    assert f"the whole report is on {host(0, two)}" in second.ended.output
    assert not list(tmp_path.rglob(".fleet_train-doctor-*"))


def test_a_group_is_formed(two: Two, tmp_path: Path) -> None:
    first, _ = examine(tmp_path, two, [HEALTHY, HEALTHY], "--only", "group")
    formed = first.findings("group", "PASS", "WARN")  # slow, where others use the processors
    assert ["2 processes added exact integers" in one["measured"] for one in formed] == [True, True], first.ended.output


def test_five_machines_are_examined_within_the_time(tmp_path: Path) -> None:
    """By everything, on the processors of one machine; `examine` kills who is not at its end in time."""
    with Lab(5, "none") as lab:
        for told in examine(tmp_path, lab.nodes, [HEALTHY] * 5):
            assert told.hosts("absent", "PASS") == [("all 5 nodes",)], told.ended.output
            assert len(told.hosts("own_name", "PASS")) == 5


def below(folder: Path, commands: list[list[str]], environs: list[dict[str, str]]) -> list[str]:
    """What the doctors print that something else starts, one on each machine."""
    with Job(folder) as job:
        for node, (doctor, environ) in enumerate(zip(commands, environs, strict=True)):
            job.start(f"node{node}", doctor, clean_environ(environ), cwd=folder / f"node{node}")
        ended = job.wait(timeout_seconds=90)
        assert [one.exit_code for one in ended] == [0, 0], job.report()
        assert job.orphans() == []
    return [one.output for one in ended]


def test_below_our_launcher_the_nodes_are_the_jobs(two: Two, tmp_path: Path) -> None:
    ips = ",".join(machine.address for machine in two)
    launch = ["launch", "--cluster_node_ips", ips, "--nproc_per_node", "2", "-m", "fleet_train", "doctor"]
    doctor = python("-m", "fleet_train", *launch, "--verbose", "--only", "network")
    first, _ = below(tmp_path, [[*machine.prefix, *doctor] for machine in two], [{}, {}])
    assert "PASS  port  2 pairs: 10.78.0.2 answers at 3 ports" in first  # two ranks' and one of the kernel's


def test_alone_it_examines_this_machine_and_prints_json(tmp_path: Path) -> None:
    doctor = python("-m", "fleet_train", "doctor", "--json")
    ended = run_alone(tmp_path, ["sh", "-c", '"$@" > printed.json', "sh", *doctor], timeout_seconds=40)
    made = json.loads((tmp_path / "printed.json").read_text())
    assert made["exit_code"] == ended.exit_code
    assert {tuple(one["hosts"]) for one in made["findings"]} == {("this machine",)}
    assert made["verdict"] == ended.output.splitlines()[-1]


def test_a_signal_cleans_the_folders(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        waits = python("-m", "fleet_train", "doctor", "--ips", "127.0.0.2,127.0.0.3", "--node_ip", "127.0.0.2")
        doctor = job.start("doctor", [*waits, "--started_port", str(free_ports(2, ["127.0.0.2"]))], clean_environ())
        job.wait_until(lambda: "waiting for node 1" in doctor.output, 30, "it waits")
        assert list(tmp_path.glob(".fleet_train-doctor-*"))
        doctor.process.terminate()
        (ended,) = job.wait(timeout_seconds=20)
        assert ended.exit_code == 143, ended.output
        assert job.orphans() == []
    assert not list(tmp_path.glob(".fleet_train-doctor-*"))


FILLS_ITS_DISK = """
    import sys
    try:
        with open("log/more", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:
        sys.exit(3)
"""


def launched(folder: Path, script: str, mounts: str) -> Ended:
    path = write_script(script, folder)
    launch = python("-m", "fleet_train", "launch", "--started_port", str(free_ports(2)), str(path))
    mounted = ["unshare", "--mount", "sh", "-ec", f'{mounts}\nexec "$@"', "sh", *launch]
    ended = run_alone(folder, mounted, timeout_seconds=60)
    assert ended.exit_code == 3, ended.output
    return ended


def test_a_launch_that_failed_ends_with_the_finding_that_explains_it_or_with_none(tmp_path: Path) -> None:
    full = launched(tmp_path, FILLS_ITS_DISK, "mkdir log; mount -t tmpfs -o size=8m tmpfs log")
    last = full.output.splitlines()[-1]
    assert last.startswith(f"fleet_train: doctor: FAIL  disk  node 0 (127.0.0.1): {tmp_path / 'log'} (logs): 0 B free")
    assert last.endswith("; more: fleet_train doctor")
    assert "doctor:" not in launched(tmp_path, "import sys\nsys.exit(3)\n", "true").output
