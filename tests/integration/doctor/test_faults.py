"""Faults of one of two machines, or between them, each reported with its host or with both ends.

Faults that do not hide each other are examined at once.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fleet_train.errors import JoinTimeout
from tests.integration.doctor.conftest import (
    HEALTHY,
    PORT,
    WHOLE_SECONDS,
    Machine,
    Patient,
    Two,
    command,
    examine,
    host,
)
from tests.support.namespaces import Namespace
from tests.support.processes import ROOT, Job, clean_environ, python
from tools.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.long]
MACHINE, NETWORK, SOFTWARE = (("--only", part) for part in ("machine", "network", "software"))
# The kernel looks up its own addresses first; rules about what comes in must stand before that.
LOCAL_LATER = ("ip rule add pref 100 lookup local", "ip rule del pref 0")
SLOW = "tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 50ms"
ANOTHER_ADDRESS = ("ip addr add 10.77.0.99/24 dev eth0", "ip route add 10.77.0.1/32 dev eth0 src 10.77.0.99")
FULL_LOG = "mkdir -p log; mount -t tmpfs -o size=1m tmpfs log; head -c 2m /dev/zero > log/full || true"
NEARLY_FULL_LOG = "mkdir -p log; mount -t tmpfs -o size=500m tmpfs log"
READ_ONLY_LOG = "mkdir -p log; mount -t tmpfs -o ro tmpfs log"


def on(machine: Machine, *commands: str) -> None:
    for each in commands:
        subprocess.run([*machine.prefix, *each.split()], check=True, capture_output=True)


@dataclass(frozen=True)
class Fault:
    """``told``: finding -> the nodes that it names, each time. ``measured``: words of it."""

    told: Mapping[str, Sequence[tuple[int, ...]]]
    patient: Patient = HEALTHY
    before: Sequence[str] = ()
    flags: Sequence[str] = NETWORK
    measured: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None


PROXY = {"http_proxy": "http://user:verysecret@proxy:3128", "no_proxy": "localhost"}
EXCEPTED = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,10.77.0.0/24"}
FAULTS = {
    "limits and memory": Fault(
        {"open_files FAIL": [(1,)], "shm FAIL": [(1,)], "disk FAIL": [(1,)]},
        Patient(f"mount -t tmpfs -o size=16m tmpfs /dev/shm; {FULL_LOG}", before=("prlimit", "--nofile=200:200")),
        flags=MACHINE,
        measured={"disk": "No space left"},
        exit_code=1,
    ),
    "nearly full disk": Fault({"disk WARN": [(1,)]}, Patient(NEARLY_FULL_LOG), flags=MACHINE),
    "read-only disk": Fault(
        {"disk FAIL": [(1,)]}, Patient(READ_ONLY_LOG), flags=MACHINE, measured={"disk": "Read-only"}
    ),
    "loopback name, proxy, interface": Fault(
        {"own_name WARN": [(1,)], "proxy WARN": [(1,)], "interface_variables FAIL": [(1,)]},
        Patient(hosts="127.0.0.1 localhost\n127.0.1.1 node1\n", environ=PROXY | {"GLOO_SOCKET_IFNAME": "enp3s0"}),
        measured={"own_name": "its own name 'node1' resolves to 127.0.1.1"},
    ),
    "unknown name, proxy with exceptions, ports that the kernel gives away": Fault(
        {"own_name WARN": [(1,)], "proxy WARN": [], "proxy FAIL": [], "ports_range WARN": [(0,), (1,)]},
        Patient(hosts="127.0.0.1 localhost\n", environ=EXCEPTED),
        flags=(*NETWORK, "--started_port", "40000"),
    ),
    "port closed in one direction": Fault(
        {"port FAIL": [(0, 1)], "port PASS": [(1, 0)]},
        before=(*LOCAL_LATER, f"ip rule add pref 10 iif eth0 ipproto tcp dport {PORT} blackhole"),
        measured={"port": f"port {PORT}: timed out"},
    ),
    "ports refused on the way out": Fault(
        {"port FAIL": [(1, 0)]},
        before=(f"ip rule add pref 10 to 10.77.0.1 ipproto tcp dport {PORT}-{PORT + 1} prohibit", *LOCAL_LATER),
        measured={"port": f"port {PORT}, {PORT + 1}: no route"},
    ),
    "datagrams are dropped": Fault(
        {"mtu FAIL": []},
        before=(*LOCAL_LATER, "ip rule add pref 10 iif eth0 ipproto udp blackhole"),
        measured={"mtu": "could not be measured"},
    ),
    "packets leave from another address": Fault({"route WARN": [(1, 0)]}, before=ANOTHER_ADDRESS),
    "one direction is slow": Fault({"bandwidth WARN": [(1, 0)]}, before=(SLOW,)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_host(name: str, two: Two, tmp_path: Path) -> None:
    fault = FAULTS[name]
    on(two[1], *fault.before)
    told = examine(tmp_path, two, [HEALTHY, fault.patient], *fault.flags)[0]
    for finding, nodes in fault.told.items():
        assert told.hosts(*finding.split()) == [tuple(host(node, two) for node in each) for each in nodes], (
            told.ended.output
        )
    for id, words in fault.measured.items():
        assert words in told.findings(id, "FAIL", "WARN")[0]["measured"]
    if fault.exit_code is not None:
        assert told.ended.exit_code == fault.exit_code
        assert f"open_files on {host(1, two)}" in told.made["verdict"]
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or "verysecret" not in file.read_text(errors="replace")


def test_the_ports_of_the_kernels_choice_are_closed(two: Two, tmp_path: Path) -> None:
    """What Gloo and NCCL take: a firewall that lets in the job's own ports only breaks them."""
    on(two[1], *LOCAL_LATER, "ip rule add pref 10 iif eth0 ipproto tcp dport 32768-60999 sport 32768-60999 blackhole")
    told = examine(tmp_path, two, [HEALTHY, HEALTHY], *NETWORK)[0]
    # A rule without memory of connections drops the answers to node 1's own, too.
    assert (host(0, two), host(1, two)) in told.hosts("port", "FAIL")


def test_the_node_list_has_a_name_that_means_a_loopback_address_there(two: Two, tmp_path: Path) -> None:
    first, second = (machine.address for machine in two)
    patients = [Patient(hosts=f"{first} node0\n{address} node1\n") for address in (second, "127.0.1.1")]
    told = examine(tmp_path, two, patients, *NETWORK, names=("node0", "node1"))[0]
    assert told.hosts("own_name", "FAIL") == [(host(1, two),)]


def test_interfaces_with_different_mtu(two: Two, tmp_path: Path) -> None:
    told = examine(tmp_path, two, [HEALTHY, Patient("ip link set eth0 mtu 1400")], *NETWORK)[0]
    assert {frozenset(pair) for pair in told.hosts("mtu", "WARN", "FAIL")} == {frozenset((host(0, two), host(1, two)))}
    assert any("ip link set dev eth0 mtu 1400" in one["fix"] for one in told.findings("mtu", "WARN", "FAIL"))


def test_large_packets_vanish_on_the_way(tmp_path: Path) -> None:
    with Lab(2, "none") as lab:
        subprocess.run(["ip", "-n", lab.switch, "link", "set", "port1", "mtu", "1400"], check=True)
        told = examine(tmp_path, lab.nodes, [HEALTHY, HEALTHY], *NETWORK)[0]
        assert (host(0, lab.nodes), host(1, lab.nodes)) in told.hosts("mtu", "FAIL"), told.ended.output
        found = [one["measured"] for one in told.findings("mtu", "FAIL")]
        assert all("packets of 1400 bytes arrive, of 1500 do not" in measured for measured in found)


def test_a_clock_that_is_ahead(two: Two, tmp_path: Path) -> None:
    """Linux has one clock of the day for all namespaces: the one that the second doctor's Python asks is changed."""
    early = tmp_path / "clock"
    early.mkdir()
    (early / "sitecustomize.py").write_text("import time\nright = time.time\ntime.time = lambda: right() + 5\n")
    patient = Patient(environ={"PYTHONPATH": f"{early}{os.pathsep}{ROOT}"})
    told = examine(tmp_path, two, [HEALTHY, patient], *NETWORK)[0]
    pair = [host(0, two), host(1, two)]  # on a busy machine the other direction may be told as well
    (finding,) = [one for one in told.findings("clock", "WARN") if one["hosts"] == pair]
    assert "5.0" in finding["measured"] or "4.9" in finding["measured"]
    assert "behind" in finding["measured"]


def test_a_missing_route_between_two_of_three(tmp_path: Path) -> None:
    """Nodes 1 and 2 cannot talk; node 0 tells each of the other."""
    with Lab(3, "none") as lab:
        on(lab.nodes[2], f"ip route add unreachable {lab.nodes[1].address}/32")
        pair = (host(2, lab.nodes), host(1, lab.nodes))
        for one in examine(tmp_path, lab.nodes, [HEALTHY] * 3, *NETWORK):
            assert pair in one.hosts("route", "FAIL"), one.ended.output
            assert pair in one.hosts("port", "FAIL")
            assert one.findings("absent", "FAIL") == []


def test_a_link_that_loses_packets(tmp_path: Path) -> None:
    """A queue of a few packets in the switch: what comes faster is dropped, as by a bad cable or port."""
    with Lab(2, "none") as lab:
        lose = "tc qdisc add dev port1 root tbf rate 50mbit burst 6kb limit 6kb"
        subprocess.run(["ip", "netns", "exec", lab.switch, *lose.split()], check=True)
        told = examine(tmp_path, lab.nodes, [HEALTHY, HEALTHY], *NETWORK)[0]
        assert told.hosts("retransmits", "WARN", "FAIL") == [(host(0, lab.nodes), host(1, lab.nodes))]


def test_a_machine_that_does_not_come_is_named(two: Two, tmp_path: Path) -> None:
    (told,) = examine(tmp_path, two, [HEALTHY, HEALTHY], *NETWORK, "--join_timeout", "5", start=[0])
    assert told.hosts("absent", "FAIL") == [(host(1, two),)]
    assert told.ended.exit_code == JoinTimeout.exit_code


def received(machine: Namespace) -> int:
    """Bytes that have come in from the other machine."""
    count = ["cat", "/sys/class/net/eth0/statistics/rx_bytes"]
    return int(subprocess.run([*machine.prefix, *count], check=True, capture_output=True).stdout)


def test_a_machine_that_is_lost_meanwhile_is_named_in_time(two: Two, tmp_path: Path) -> None:
    """While the first one measures, and so before it has told what it found."""
    with Job(tmp_path) as job:
        ips = ",".join(machine.address for machine in two)
        for node, machine in enumerate(two):
            flags = ("--ips", ips, "--node_ip", machine.address, *NETWORK)
            doctor = command(machine, node, HEALTHY, tmp_path / f"node{node}", flags)
            job.start(f"node{node}", doctor, clean_environ(), cwd=tmp_path / f"node{node}")
        job.wait_until(lambda: received(two[1]) > 1_000_000, 30, "the first doctor sends to the second one")
        first = psutil.Process(job.started[0].process.pid)
        for each in [first, *first.children(recursive=True)]:
            each.send_signal(signal.SIGSTOP)
        job.wait_until(lambda: job.started[1].process.poll() is not None, WHOLE_SECONDS, "the second doctor ends")
        assert f"FAIL  absent  {host(0, two)}: did not connect" in job.started[1].output, job.report()


def test_folder_that_two_of_three_share(tmp_path: Path) -> None:
    with Lab(3, "none") as lab:
        other = Patient(f"mount -t tmpfs tmpfs {shlex.quote(str(tmp_path / 'log'))}")
        (tmp_path / "log").mkdir()
        flags = (*MACHINE, "--log_dir", str(tmp_path / "log"), "--output", str(tmp_path / "log"))
        told = examine(tmp_path, lab.nodes, [HEALTHY, HEALTHY, other], *flags)[0]
        assert told.hosts("shared_folder", "WARN") == [(host(0, lab.nodes),), (host(1, lab.nodes),)]


def test_a_listener_on_a_port_of_the_job(two: Two, tmp_path: Path) -> None:
    listen = (
        f"import socket, time; s = socket.create_server(('{two[1].address}', {PORT})); print('listens', flush=True)"
    )
    with Job(tmp_path / "held") as job:
        holder = job.start("held", [*two[1].prefix, *python("-c", f"{listen}; time.sleep(200)")], clean_environ())
        job.wait_until(lambda: "listens" in holder.output, 20, "the port is taken")
        told = examine(tmp_path, two, [HEALTHY, HEALTHY], *NETWORK)[0]
    (finding,) = told.findings("ports_held", "FAIL")
    assert finding["hosts"] == [host(1, two)]
    assert finding["measured"].startswith(f"port {PORT} is in use by process {holder.process.pid} (python")
    assert told.findings("absent", "FAIL") == []  # the doctors have met at another port


def test_processors_that_others_use(two: Two, tmp_path: Path) -> None:
    """A nice'd doctor on one processor, which two busy programs want."""
    last = str(max(os.sched_getaffinity(0)))
    with Job(tmp_path / "busy") as job:
        for name in ("one", "two"):
            job.start(name, ["taskset", "-c", last, *python("-c", "while True: pass")], clean_environ())
        niced = Patient(before=("taskset", "-c", last, "nice", "-n", "15"))
        told = examine(tmp_path, two, [HEALTHY, niced], *MACHINE)[0]
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


MEMORY = ({"memory.limit_in_bytes": "300M"}, {"memory.max": "300M"})
QUOTA = ({"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "80000"}, {"cpu.max": "80000 100000"})


@pytest.mark.parametrize(
    ("controller", "limits", "found", "measured"),
    [
        ("memory", MEMORY, "memory", "limit of the control group 315 MB"),
        ("cpu", QUOTA, "processors", "the control group allows 0.8, for 2 processes"),
    ],
)
def test_limits_of_a_container(
    tmp_path: Path, controller: str, limits: tuple[dict[str, str], dict[str, str]], found: str, measured: str
) -> None:
    """Outside namespaces, which hide the control groups."""
    with control_group(controller, *limits) as group, Job(tmp_path) as job:
        doctor = python("-m", "fleet_train", "doctor", *MACHINE, "--nproc", "2")
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        job.start("alone", ["sh", "-c", join, "sh", *doctor], clean_environ())
        (ended,) = job.wait(timeout_seconds=40)
    assert f"FAIL  {found}  this machine: " in ended.output
    assert measured in ended.output


@pytest.mark.parametrize(
    ("module", "old", "new", "is_other_version"),
    [("__init__.py", '__version__ = "', '__version__ = "9.', True), ("plan/build.py", "", "# a local change\n", False)],
)
def test_another_copy_of_the_package(
    two: Two, tmp_path: Path, module: str, old: str, new: str, is_other_version: bool
) -> None:
    copy = tmp_path / "copy"
    for name in ("fleet_train", "strategies"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "fleet_train" / module
    changed.write_text(changed.read_text().replace(old, new) if old else changed.read_text() + new)
    told = examine(tmp_path, two, [HEALTHY, Patient(environ={"PYTHONPATH": str(copy)})], *SOFTWARE)[0]
    assert told.hosts("package", "FAIL") == [(host(1, two),)]
    assert told.hosts("fleet_train", "FAIL") == ([(host(1, two),)] if is_other_version else [])


def test_another_paddle_and_another_numpy(two: Two, tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    for name, version in (("paddlepaddle", "3.2.2"), ("numpy", "1.26.0")):  # these distributions are found first
        about = shim / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    patient = Patient(environ={"PYTHONPATH": f"{shim}{os.pathsep}{ROOT}"})
    told = examine(tmp_path, two, [HEALTHY, patient], *SOFTWARE)[0]
    assert told.hosts("paddle", "FAIL") == told.hosts("numpy", "WARN") == [(host(1, two),)]


def test_another_profile_and_another_script_of_the_same_name(two: Two, tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        text = f"description: Ours.\nextends: multi_node\nfuse_grad_size_in_MB: {4 + node}\n"
        (tmp_path / f"node{node}" / "mine.yaml").write_text(text)
        (tmp_path / f"node{node}" / "train.py").write_text(f"lr = 0.{node + 1}\n")
    flags = (*SOFTWARE, "--strategy", "./mine.yaml", "--script", "train.py")
    told = examine(tmp_path, two, [HEALTHY, HEALTHY], *flags)[0]
    assert told.hosts("profile", "FAIL") == told.hosts("script", "FAIL") == [(host(1, two),)]
    (tmp_path / "node1" / "mine.yaml").unlink()
    told = examine(tmp_path, two, [HEALTHY, HEALTHY], *flags)[0]
    assert told.hosts("profile_or_script", "FAIL") == [(host(1, two),)]
