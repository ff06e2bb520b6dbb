"""Faults of one machine, each reported with its host: limits, memory, folders, processors, leftovers."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.doctor.conftest import Two
from tests.integration.doctor.sick import HEALTHY, PORT, Patient, Told, examine, host
from tests.support.processes import Job, clean_environ, python

pytestmark = [pytest.mark.root, pytest.mark.long]


def second_is(two: Two, folder: Path, patient: Patient, *flags: str) -> Told:
    return examine(folder, two, [HEALTHY, patient], *(flags or ("--only", "machine")))[0]


def test_too_few_open_files(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient(before=("prlimit", "--nofile=200:200")))
    assert told.hosts("open_files", "FAIL") == [(host(1, two),)]
    assert told.ended.exit_code == 1
    assert f"open_files on {host(1, two)}" in told.made["verdict"]


def test_small_shared_memory(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient("mount -t tmpfs -o size=16m tmpfs /dev/shm"))
    assert told.hosts("shm", "FAIL") == [(host(1, two),)]


def test_full_disk(two: Two, tmp_path: Path) -> None:
    full = "mkdir -p log; mount -t tmpfs -o size=1m tmpfs log; head -c 2m /dev/zero > log/full || true"
    told = second_is(two, tmp_path, Patient(full))
    (finding,) = told.findings("disk", "FAIL")
    assert (finding["hosts"], "No space left" in finding["measured"]) == ([host(1, two)], True)


def test_disk_that_is_nearly_full(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient("mkdir -p log; mount -t tmpfs -o size=500m tmpfs log"))
    assert told.hosts("disk", "WARN") == [(host(1, two),)]


def test_folder_that_cannot_be_written_to(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient("mkdir -p log; mount -t tmpfs -o ro tmpfs log"))
    (finding,) = told.findings("disk", "FAIL")
    assert (finding["hosts"], "Read-only" in finding["measured"]) == ([host(1, two)], True)


def test_folder_that_two_of_three_share(tmp_path: Path) -> None:
    from tools.lab import Lab

    with Lab(3, "none") as lab:
        other = Patient(f"mount -t tmpfs tmpfs {shlex.quote(str(tmp_path / 'log'))}")
        (tmp_path / "log").mkdir()
        flags = ("--only", "machine", "--log_dir", str(tmp_path / "log"), "--output", str(tmp_path / "log"))
        told = examine(tmp_path, lab.nodes, [HEALTHY, HEALTHY, other], *flags)[0]
        assert told.hosts("shared_folder", "WARN") == [(host(0, lab.nodes),), (host(1, lab.nodes),)]


def test_a_listener_on_a_port_of_the_job(two: Two, tmp_path: Path) -> None:
    listen = f"import socket, time; s = socket.create_server(('{two[1].address}', {PORT})); time.sleep(100)"
    with Job(tmp_path / "held") as job:
        job.start("held", [*two[1].prefix, *python("-c", listen)], clean_environ())
        time.sleep(1.0)
        pid = job.started[0].process.pid
        told = second_is(two, tmp_path, HEALTHY, "--only", "network")
    (finding,) = told.findings("ports_held", "FAIL")
    assert finding["hosts"] == [host(1, two)]
    assert finding["measured"].startswith(f"port {PORT} is in use by process {pid} (python")
    assert told.findings("absent", "FAIL") == []  # the doctors have met at another port


def test_processors_that_others_use(two: Two, tmp_path: Path) -> None:
    """A nice'd doctor on one processor, which two busy programs want."""
    last = max(os.sched_getaffinity(0))
    with Job(tmp_path / "busy") as job:
        for name in ("one", "two"):
            job.start(name, ["taskset", "-c", str(last), *python("-c", "while True: pass")], clean_environ())
        told = second_is(two, tmp_path, Patient(before=("taskset", "-c", str(last), "nice", "-n", "15")))
    assert (host(1, two),) in told.hosts("busy", "WARN")


@contextmanager
def control_group(controller: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Path]:
    """A group with these files written: ``first`` where control groups are of version 1, ``second`` of version 2."""
    root = Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").is_file()
    group = (root if is_second else root / controller) / f"ft-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        for name, value in (second if is_second else first).items():
            (group / name).write_text(value)
        yield group
    finally:
        group.rmdir()


def alone_in(group: Path, folder: Path, *flags: str) -> str:
    """Outside namespaces, which hide the control groups."""
    join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    with Job(folder) as job:
        command = python("-m", "fleet_train", "doctor", "--only", "machine", *flags)
        job.start("alone", ["sh", "-c", join, "sh", *command], clean_environ())
        (ended,) = job.wait(timeout_seconds=40)
    return ended.output


def test_memory_limit_of_a_container(tmp_path: Path) -> None:
    with control_group("memory", {"memory.limit_in_bytes": "300M"}, {"memory.max": "300M"}) as group:
        output = alone_in(group, tmp_path)
    assert "FAIL  memory  this machine: " in output
    assert "limit of the control group 315 MB" in output


def test_processor_quota_of_a_container(tmp_path: Path) -> None:
    first = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "80000"}
    with control_group("cpu", first, {"cpu.max": "80000 100000"}) as group:
        output = alone_in(group, tmp_path, "--nproc", "2")
    assert "FAIL  processors  this machine: " in output
    assert "the control group allows 0.8, for 2 processes" in output
