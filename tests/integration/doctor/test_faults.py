"""Faults of machines, or between them, each reported with its host or with both ends.

Faults that do not hide each other are examined at once, on three machines.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.doctor.conftest import (
    HEALTHY,
    PORT,
    WHOLE_SECONDS,
    Patient,
    Told,
    Two,
    command,
    examine,
    host,
)
from tests.support.processes import ROOT, Job, clean_environ, every_python_runs, python
from tools.lab import Lab, Node

pytestmark = [pytest.mark.root, pytest.mark.long]
MACHINE, NETWORK, SOFTWARE = (("--only", part) for part in ("machine", "network", "software"))
# The kernel looks up its own addresses first; rules about what comes in must stand before that.
LOCAL_LATER = ("ip rule add pref 100 lookup local", "ip rule del pref 0")
KERNELS_PORTS_CLOSED = "ip rule add pref 10 iif eth0 ipproto tcp dport 32768-60999 sport 32768-60999 blackhole"
ANOTHER_ADDRESS = ("ip addr add 10.78.0.99/24 dev eth0", "ip route add 10.78.0.1/32 dev eth0 src 10.78.0.99")


@pytest.fixture
def three() -> Iterator[Lab]:
    with Lab(3, "none") as lab:
        yield lab


def on(machine: Node, *commands: str) -> None:
    for each in commands:
        subprocess.run([*machine.prefix, *each.split()], check=True, capture_output=True)


def assert_told(told: Told, lab: Lab, expected: Mapping[str, list[tuple[int, ...]]]) -> None:
    """``expected``: finding and level -> the nodes that it names, each time."""
    hosts = {finding: told.hosts(*finding.split()) for finding in expected}
    named = {
        finding: [tuple(host(i, lab.nodes) for i in nodes) for nodes in each] for finding, each in expected.items()
    }
    assert hosts == named, told.ended.output


def measured(told: Told, id: str, *levels: str) -> str:
    return "\n".join(one["measured"] for one in told.findings(id, *(levels or ("WARN", "FAIL"))))


def test_limits_disks_a_shared_folder_and_busy_processors(three: Lab, tmp_path: Path) -> None:
    """Node 1 has little of everything; nodes 0 and 1 share the logs' folder; node 2 is niced on a busy processor."""
    logs, last = tmp_path / "log", str(max(os.sched_getaffinity(0)))
    logs.mkdir()
    shm = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    full = "mkdir -p runs; mount -t tmpfs -o size=1m tmpfs runs; head -c 2m /dev/zero > runs/full || true"
    nearly_full = "mkdir -p runs; mount -t tmpfs -o size=500m tmpfs runs"
    read_only = f"mount -t tmpfs -o ro tmpfs {shlex.quote(str(logs))}"
    patients = [
        HEALTHY,
        Patient(f"{shm}; {full}", before=("prlimit", "--nofile=200:200")),
        Patient(f"{read_only}; {nearly_full}", before=("taskset", "-c", last, "nice", "-n", "15")),
    ]
    with Job(tmp_path / "busy") as job:
        for name in ("one", "two"):
            job.start(name, ["taskset", "-c", last, *python("-c", "while True: pass")], clean_environ())
        told = examine(tmp_path, three.nodes, patients, *MACHINE, "--log_dir", str(logs))[0]
    expected = {
        "open_files FAIL": [(1,)],
        "shm FAIL": [(1,)],
        "disk FAIL": [(1,), (2,)],
        "disk WARN": [(2,)],
        "shared_folder WARN": [(0,), (1,)],
    }
    assert_told(told, three, expected)
    assert [words in measured(told, "disk", "FAIL") for words in ("No space left", "Read-only")] == [True, True]
    assert (host(2, three.nodes),) in told.hosts("busy", "WARN")
    assert told.ended.exit_code == 1
    assert f"open_files on {host(1, three.nodes)}" in told.made["verdict"]


def copy_of_the_package(folder: Path) -> Path:
    for name in ("fleet_train", "strategies"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "fleet_train"


def test_other_software(three: Lab, tmp_path: Path) -> None:
    """Node 1 has other versions, another profile and script; node 2 a changed file of the package and no profile."""
    for name, version in (("paddlepaddle", "3.2.2"), ("numpy", "1.26.0")):  # these distributions are found first
        about = tmp_path / "shim" / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    module = copy_of_the_package(tmp_path / "newer") / "__init__.py"
    module.write_text(module.read_text().replace('__version__ = "', '__version__ = "9.'))
    with (copy_of_the_package(tmp_path / "changed") / "plan" / "build.py").open("a") as source:
        source.write("# a local change\n")
    for node in range(3):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "train.py").write_text(f"lr = {0.2 if node == 1 else 0.1}\n")
        if node < 2:
            text = f"description: Ours.\nextends: multi_node\nfuse_grad_size_in_MB: {4 + node}\n"
            (tmp_path / f"node{node}" / "mine.yaml").write_text(text)
    newer = Patient(environ={"PYTHONPATH": f"{tmp_path / 'shim'}{os.pathsep}{tmp_path / 'newer'}"})
    changed = Patient(environ={"PYTHONPATH": str(tmp_path / "changed")})
    flags = (*SOFTWARE, "--strategy", "./mine.yaml", "--script", "train.py")
    told = examine(tmp_path, three.nodes, [HEALTHY, newer, changed], *flags)[0]
    of_node_1 = ("fleet_train FAIL", "paddle FAIL", "numpy WARN", "profile FAIL", "script FAIL")
    both = {"package FAIL": [(1,), (2,)], "profile_or_script FAIL": [(2,)]}
    assert_told(told, three, {finding: [(1,)] for finding in of_node_1} | both)


def test_names_variables_a_clock_and_a_taken_port(three: Lab, tmp_path: Path) -> None:
    """And packets of node 2 that leave from another address; node 1 admits the job's own ports only."""
    # Linux has one clock of the day for all namespaces: the one that the third doctor's Python asks is changed.
    early = every_python_runs("import time\nright = time.time\ntime.time = lambda: right() + 5\n", tmp_path / "clock")
    proxy = {"http_proxy": "http://user:verysecret@proxy:3128", "no_proxy": "localhost"}
    excepted = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,10.78.0.0/24"}
    patients = [
        HEALTHY,
        Patient(hosts="127.0.0.1 localhost\n127.0.1.1 node1\n", environ=proxy | {"GLOO_SOCKET_IFNAME": "enp3s0"}),
        Patient(hosts="127.0.0.1 localhost\n", environ=excepted | early),
    ]
    on(three.nodes[1], *LOCAL_LATER, KERNELS_PORTS_CLOSED)
    on(three.nodes[2], *ANOTHER_ADDRESS)
    here = three.nodes[2]
    listen = f"import socket, time; s = socket.create_server(('{here.address}', {PORT})); print('listens', flush=True)"
    with Job(tmp_path / "held") as job:
        holder = job.start("held", [*here.prefix, *python("-c", f"{listen}; time.sleep(200)")], clean_environ())
        job.wait_until(lambda: "listens" in holder.output, 20, "the port is taken")
        told = examine(tmp_path, three.nodes, patients, *NETWORK)[0]
    expected = {
        "own_name WARN": [(1,), (2,)],
        "proxy WARN": [(1,)],
        "interface_variables FAIL": [(1,)],
        "route WARN": [(2, 0)],
        "ports_held FAIL": [(2,)],
        "absent FAIL": [],  # the doctors have met at another port
    }
    assert_told(told, three, expected)
    assert "its own name 'node1' resolves to 127.0.1.1" in measured(told, "own_name")
    assert measured(told, "ports_held").startswith(f"port {PORT} is in use by process {holder.process.pid} (python")
    assert (host(0, three.nodes), host(1, three.nodes)) in told.hosts("port", "FAIL")
    pair = [host(0, three.nodes), host(2, three.nodes)]
    (clock,) = [one["measured"] for one in told.findings("clock", "WARN") if one["hosts"] == pair]
    assert "behind" in clock
    assert "5.0" in clock or "4.9" in clock
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or "verysecret" not in file.read_text(errors="replace")


def test_ports_routes_datagrams_and_a_slow_direction(three: Lab, tmp_path: Path) -> None:
    """Between nodes whose list has names; that of node 1 means a loopback address there."""
    zero, one, two = three.nodes
    port = 40000
    closed = f"ip rule add pref 10 iif eth0 ipproto tcp dport {port} blackhole"
    on(one, *LOCAL_LATER, closed, "ip rule add pref 10 iif eth0 ipproto udp blackhole")
    on(two, f"ip rule add pref 10 to {zero.address} ipproto tcp dport {port + 1} prohibit", *LOCAL_LATER)
    on(two, f"ip route add unreachable {one.address}/32")
    on(two, "tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 50ms")
    hosts = [f"{zero.address} node0\n{address} node1\n{two.address} node2\n" for address in (one.address, "127.0.1.1")]
    patients = [Patient(hosts=hosts[0]), Patient(hosts=hosts[1]), Patient("ip link set eth0 mtu 1400", hosts=hosts[0])]
    flags = (*NETWORK, "--started_port", str(port))
    all_told = examine(tmp_path, three.nodes, patients, *flags, names=("node0", "node1", "node2"))
    told = all_told[0]
    expected = {"own_name FAIL": [(1,)], "ports_range WARN": [(0,), (1,), (2,)], "absent FAIL": []}
    assert_told(told, three, expected | {"route FAIL": [(2, 1)], "bandwidth WARN": [(2, 0)]})
    closed_ports = {(each["hosts"][0], each["hosts"][1]): each["measured"] for each in told.findings("port", "FAIL")}
    names = [host(node, three.nodes) for node in range(3)]
    assert f"port {port}: timed out" in closed_ports[names[0], names[1]]
    assert f"port {port + 1}: no route" in closed_ports[names[2], names[0]]
    assert (names[2], names[1]) in closed_ports
    assert (names[1], names[0]) in told.hosts("port", "PASS")
    assert [each["measured"] for each in told.findings("mtu", "WARN") if set(each["hosts"]) == set(names[:2])] == [
        "no UDP packet is answered: the MTU could not be measured"
    ] * 2
    different = [each for each in told.findings("mtu", "WARN", "FAIL") if set(each["hosts"]) == {names[0], names[2]}]
    assert any("ip link set dev eth0 mtu 1400" in each["fix"] for each in different)
    for other in all_told[1:]:
        assert other.made["findings"] == told.made["findings"]


def test_a_switch_that_loses_packets_and_those_that_are_large(three: Lab, tmp_path: Path) -> None:
    """A queue of a few packets towards node 2: what comes faster is dropped, as by a bad cable or port."""
    lose = "tc qdisc add dev port2 root tbf rate 50mbit burst 6kb limit 6kb"
    for change in ("ip link set port1 mtu 1400", lose):
        subprocess.run(["ip", "netns", "exec", three.switch, *change.split()], check=True)
    told = examine(tmp_path, three.nodes, [HEALTHY] * 3, *NETWORK)[0]
    names = [host(node, three.nodes) for node in range(3)]
    assert (names[0], names[2]) in told.hosts("retransmits", "WARN", "FAIL")
    assert (names[2], names[0]) not in told.hosts("retransmits", "WARN", "FAIL")
    assert (names[0], names[1]) in told.hosts("mtu", "FAIL"), told.ended.output
    for found in measured(told, "mtu", "FAIL").splitlines():
        assert "packets of 1400 bytes arrive, of 1500 do not" in found


def test_a_node_that_node_0_does_not_admit_examines_itself_and_the_others_go_on(three: Lab, tmp_path: Path) -> None:
    """As with a firewall on node 0: what node 2 can dial is told on node 2, and that it runs on node 0."""
    zero, _, two = three.nodes
    on(zero, *LOCAL_LATER, f"ip rule add pref 10 from {two.address} ipproto tcp dport {PORT}-{PORT + 1} blackhole")
    first, second, third = examine(tmp_path, three.nodes, [HEALTHY] * 3, "--skip", "group", "--join_timeout", "12")
    for told in (first, second):
        assert_told(
            told, three, {"absent FAIL": [(2,)], "port PASS": [(0, 1), (1, 0)], "bandwidth PASS": [(0, 1), (1, 0)]}
        )
        assert f"its ports, from {host(0, three.nodes)}, {host(1, three.nodes)}: open" in measured(told, "absent")
        assert told.ended.exit_code == 6
    assert_told(
        third, three, {"absent FAIL": [(0,)], "port FAIL": [(2, 0)], "port PASS": [(2, 1)], "memory PASS": [(2,)]}
    )
    why = f"cannot be reached from here: port {PORT}: timed out; port {PORT + 1}: timed out; nobody else can be asked"
    assert measured(third, "absent").startswith(why)
    assert third.ended.exit_code == 6


def received(machine: Node) -> int:
    """Bytes that have come in from the other machine."""
    count = ["cat", "/sys/class/net/eth0/statistics/rx_bytes"]
    return int(subprocess.run([*machine.prefix, *count], check=True, capture_output=True).stdout)


# Less patience with what others have to say.
IMPATIENT = """
from fleet_train import timeouts
timeouts.DOCTOR_PAIRS_SECONDS, timeouts.DOCTOR_EXCHANGE_SECONDS = 5.0, 2.0
"""


def test_a_machine_that_is_lost_meanwhile_is_named_in_time(two: Two, tmp_path: Path) -> None:
    """While the first one measures, and so before it has told what it found."""
    environ = clean_environ(every_python_runs(IMPATIENT, tmp_path))
    with Job(tmp_path) as job:
        ips = ",".join(machine.address for machine in two)
        for node, machine in enumerate(two):
            flags = ("--ips", ips, "--node_ip", machine.address, "--verbose", *NETWORK, *MACHINE)
            doctor = command(machine, node, HEALTHY, tmp_path / f"node{node}", flags)
            job.start(f"node{node}", doctor, environ, cwd=tmp_path / f"node{node}")
        job.wait_until(lambda: received(two[1]) > 1_000_000, 30, "the first doctor sends to the second one")
        first = psutil.Process(job.started[0].process.pid)
        for each in [first, *first.children(recursive=True)]:
            each.send_signal(signal.SIGSTOP)
        job.wait_until(lambda: job.started[1].process.poll() is not None, WHOLE_SECONDS, "the second doctor ends")
        assert f"FAIL  absent  {host(0, two)}: " in job.started[1].output, job.report()
        assert "no longer answers" in job.started[1].output
        assert f"PASS  memory  {host(1, two)}" in job.started[1].output


MEMORY, PERIOD, QUOTA = (
    ("memory.limit_in_bytes", "300M"),
    ("cpu.cfs_period_us", "100000"),
    ("cpu.cfs_quota_us", "80000"),
)
FIRST_VERSION = {"memory": (MEMORY,), "cpu": (PERIOD, QUOTA)}
SECOND_VERSION = {"": (("memory.max", "300M"), ("cpu.max", "80000 100000"))}


@contextmanager
def control_groups() -> Iterator[list[Path]]:
    """New ones that together limit memory and processors, of the version that this machine has."""
    root, made = Path("/sys/fs/cgroup"), []
    is_second = (root / "cgroup.controllers").is_file()
    try:
        for controller, limits in (SECOND_VERSION if is_second else FIRST_VERSION).items():
            made.append(root / controller / f"ft-{uuid.uuid4().hex[:8]}")
            made[-1].mkdir()
            for name, value in limits:
                (made[-1] / name).write_text(value)
        yield made
    finally:
        for group in made:
            group.rmdir()


def test_limits_of_a_container(tmp_path: Path) -> None:
    """Outside namespaces, which hide the control groups."""
    with control_groups() as groups, Job(tmp_path) as job:
        doctor = python("-m", "fleet_train", "doctor", *MACHINE, "--nproc", "2")
        join = "; ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
        job.start("alone", ["sh", "-c", f'{join}; exec "$@"', "sh", *doctor], clean_environ())
        (ended,) = job.wait(timeout_seconds=40)
    for id in ("memory", "processors"):
        assert f"FAIL  {id}  this machine: " in ended.output
    assert "limit of the control group 315 MB" in ended.output
    assert "the control group allows 0.8, for 2 processes" in ended.output
