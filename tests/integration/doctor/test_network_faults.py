"""Faults of the network, each reported with its host, or with both ends."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from fleet_train.errors import JoinTimeout
from tests.integration.doctor.conftest import Two
from tests.integration.doctor.sick import HEALTHY, PORT, WHOLE_SECONDS, Patient, Told, command, examine, host
from tests.support.namespaces import Namespace
from tests.support.processes import ROOT, Job, clean_environ
from tools.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.long]
NETWORK = ("--only", "network")
# The kernel looks up its own addresses first; rules about what comes in must stand before that.
LOCAL_LATER = ("ip rule add pref 100 lookup local", "ip rule del pref 0")


def on(machine: Namespace, *commands: str) -> None:
    for each in commands:
        subprocess.run([*machine.prefix, *each.split()], check=True, capture_output=True)


def second_is(two: Two, folder: Path, patient: Patient) -> Told:
    return examine(folder, two, [HEALTHY, patient], *NETWORK)[0]


def test_own_name_means_a_loopback_address(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient(hosts="127.0.0.1 localhost\n127.0.1.1 node1\n"))
    (finding,) = told.findings("own_name", "WARN")
    assert finding["hosts"] == [host(1, two)]
    assert finding["measured"] == "its own name 'node1' resolves to 127.0.1.1"


def test_own_name_is_unknown(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient(hosts="127.0.0.1 localhost\n"))
    assert told.hosts("own_name", "WARN") == [(host(1, two),)]


def test_the_node_list_has_a_name_that_means_a_loopback_address_there(two: Two, tmp_path: Path) -> None:
    names, addresses = ("node0", "node1"), [machine.address for machine in two]
    right = f"{addresses[0]} node0\n{addresses[1]} node1\n"
    wrong = f"{addresses[0]} node0\n127.0.1.1 node1\n"
    patients = [Patient(hosts=right), Patient(hosts=wrong)]
    told = examine(tmp_path, two, patients, *NETWORK, names=names)[0]
    assert told.hosts("own_name", "FAIL") == [(host(1, two),)]


def test_a_port_that_is_closed_in_one_direction(two: Two, tmp_path: Path) -> None:
    drop = f"ip rule add pref 10 iif eth0 ipproto tcp dport {PORT} blackhole"
    on(two[1], *LOCAL_LATER, drop)
    told = second_is(two, tmp_path, HEALTHY)
    (finding,) = told.findings("port", "FAIL")
    assert finding["hosts"] == [host(0, two), host(1, two)]
    assert finding["measured"] == f"port {PORT}: timed out"
    assert told.hosts("port", "PASS") == [(host(1, two), host(0, two))]


def test_ports_that_a_firewall_refuses_on_the_way_out(two: Two, tmp_path: Path) -> None:
    on(two[1], f"ip rule add pref 10 to {two[0].address} ipproto tcp dport {PORT}-{PORT + 1} prohibit")
    on(two[1], *LOCAL_LATER)
    told = second_is(two, tmp_path, HEALTHY)
    assert told.hosts("port", "FAIL") == [(host(1, two), host(0, two))]
    assert f"port {PORT}, {PORT + 1}: no route" in told.findings("port", "FAIL")[0]["measured"]


def test_the_ports_of_the_kernels_choice_are_closed(two: Two, tmp_path: Path) -> None:
    """What Gloo and NCCL take: a firewall that lets in the job's own ports only breaks them."""
    on(two[1], *LOCAL_LATER, "ip rule add pref 10 iif eth0 ipproto tcp dport 32768-60999 sport 32768-60999 blackhole")
    told = second_is(two, tmp_path, HEALTHY)
    # A rule without memory of connections drops the answers to node 1's own, too.
    assert (host(0, two), host(1, two)) in told.hosts("port", "FAIL")


def test_interfaces_with_different_mtu(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient("ip link set eth0 mtu 1400"))
    assert {frozenset(pair) for pair in told.hosts("mtu", "WARN", "FAIL")} == {frozenset((host(0, two), host(1, two)))}
    assert any("ip link set dev eth0 mtu 1400" in one["fix"] for one in told.findings("mtu", "WARN", "FAIL"))


def test_large_packets_vanish_on_the_way(tmp_path: Path) -> None:
    with Lab(2, "none") as lab:
        subprocess.run(["ip", "-n", lab.switch, "link", "set", "port1", "mtu", "1400"], check=True)
        told = examine(tmp_path, lab.nodes, [HEALTHY, HEALTHY], *NETWORK)[0]
        found = told.findings("mtu", "FAIL")
        assert (host(0, lab.nodes), host(1, lab.nodes)) in [tuple(one["hosts"]) for one in found], told.ended.output
        assert all("packets of 1400 bytes arrive, of 1500 do not" in one["measured"] for one in found)


def test_datagrams_are_dropped(two: Two, tmp_path: Path) -> None:
    on(two[1], *LOCAL_LATER, "ip rule add pref 10 iif eth0 ipproto udp blackhole")
    told = second_is(two, tmp_path, HEALTHY)
    assert "could not be measured" in told.findings("mtu", "WARN")[0]["measured"]
    assert told.findings("mtu", "FAIL") == []


def test_a_proxy_without_exceptions(two: Two, tmp_path: Path) -> None:
    proxy = {"http_proxy": "http://user:verysecret@proxy:3128", "no_proxy": "localhost"}
    told = second_is(two, tmp_path, Patient(environ=proxy))
    assert told.hosts("proxy", "WARN") == [(host(1, two),)]
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or "verysecret" not in file.read_text(errors="replace")


def test_a_proxy_with_exceptions_is_no_alarm(two: Two, tmp_path: Path) -> None:
    excepted = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,10.77.0.0/24"}
    assert second_is(two, tmp_path, Patient(environ=excepted)).alarms == []


def test_a_variable_names_an_interface_that_is_not_there(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, Patient(environ={"GLOO_SOCKET_IFNAME": "enp3s0"}))
    assert told.hosts("interface_variables", "FAIL") == [(host(1, two),)]


@pytest.mark.parametrize(("ahead", "level"), [(5, "WARN"), (300, "FAIL")])
def test_a_clock_that_is_ahead(two: Two, tmp_path: Path, ahead: int, level: str) -> None:
    """Linux has one clock of the day for all namespaces: the one that the second doctor's Python asks is changed."""
    early = tmp_path / "clock"
    early.mkdir()
    (early / "sitecustomize.py").write_text(f"import time\nright = time.time\ntime.time = lambda: right() + {ahead}\n")
    told = second_is(two, tmp_path, Patient(environ={"PYTHONPATH": f"{early}{os.pathsep}{ROOT}"}))
    pair = [host(0, two), host(1, two)]  # on a busy machine the other direction may be told as well
    (finding,) = [one for one in told.findings("clock", level) if one["hosts"] == pair]
    assert f"{ahead}.0" in finding["measured"] or f"{ahead - 1}.9" in finding["measured"]
    assert "behind" in finding["measured"]


def test_packets_leave_from_another_address(two: Two, tmp_path: Path) -> None:
    on(two[1], "ip addr add 10.77.0.99/24 dev eth0", f"ip route add {two[0].address}/32 dev eth0 src 10.77.0.99")
    told = second_is(two, tmp_path, HEALTHY)
    assert told.hosts("route", "WARN") == [(host(1, two), host(0, two))]


def test_a_missing_route_between_two_of_three(tmp_path: Path) -> None:
    """Nodes 1 and 2 cannot talk; node 0 tells each of the other."""
    with Lab(3, "none") as lab:
        on(lab.nodes[2], f"ip route add unreachable {lab.nodes[1].address}/32")  # type: ignore[arg-type]
        told = examine(tmp_path, lab.nodes, [HEALTHY] * 3, *NETWORK)
        for one in told:
            assert (host(2, lab.nodes), host(1, lab.nodes)) in one.hosts("route", "FAIL"), one.ended.output
            assert (host(2, lab.nodes), host(1, lab.nodes)) in one.hosts("port", "FAIL")
            assert one.findings("absent", "FAIL") == []


def test_routes_by_different_interfaces(tmp_path: Path) -> None:
    with Lab(3, "none") as lab:
        add = "ip link add eth1 type veth peer name eth2; ip link set eth2 up; ip link set eth1 up;"
        add += " ip addr add 10.79.0.1/24 dev eth1;"
        wrong = Patient(f"{add} ip route add {lab.nodes[2].address}/32 dev eth1 src {lab.nodes[1].address}")
        told = examine(tmp_path, lab.nodes, [HEALTHY, wrong, HEALTHY], *NETWORK)[0]
        assert (host(1, lab.nodes),) in told.hosts("route", "WARN")


def test_one_direction_is_slow(two: Two, tmp_path: Path) -> None:
    on(two[1], "tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 50ms")
    told = second_is(two, tmp_path, HEALTHY)
    assert told.hosts("bandwidth", "WARN") == [(host(1, two), host(0, two))]


def test_a_link_that_loses_packets(tmp_path: Path) -> None:
    """A queue of a few packets in the switch: what comes faster is dropped, as by a bad cable or port."""
    with Lab(2, "none") as lab:
        lose = "tc qdisc add dev port1 root tbf rate 50mbit burst 6kb limit 6kb"
        subprocess.run(["ip", "netns", "exec", lab.switch, *lose.split()], check=True)
        told = examine(tmp_path, lab.nodes, [HEALTHY, HEALTHY], *NETWORK)[0]
        assert told.hosts("retransmits", "WARN", "FAIL") == [(host(0, lab.nodes), host(1, lab.nodes))]


def test_ports_that_the_kernel_gives_away(two: Two, tmp_path: Path) -> None:
    told = examine(tmp_path, two, [HEALTHY, HEALTHY], *NETWORK, "--started_port", "40000")[0]
    assert told.hosts("ports_range", "WARN") == [(host(0, two),), (host(1, two),)]


def test_a_machine_that_does_not_come_is_named(two: Two, tmp_path: Path) -> None:
    (told,) = examine(tmp_path, two, [HEALTHY, HEALTHY], *NETWORK, "--join_timeout", "5", start=[0])
    assert told.hosts("absent", "FAIL") == [(host(1, two),)]
    assert told.ended.exit_code == JoinTimeout.exit_code
    assert told.ended.seconds < 5 + 55


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
        first = job.started[0].process.pid
        for each in [psutil.Process(first), *psutil.Process(first).children(recursive=True)]:
            each.send_signal(signal.SIGSTOP)
        job.wait_until(lambda: job.started[1].process.poll() is not None, WHOLE_SECONDS, "the second doctor ends")
        output = job.started[1].output
        assert f"FAIL  absent  {host(0, two)}: did not connect" in output, output
