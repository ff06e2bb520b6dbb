"""The network lab: nodes that reach each other, links of the requested rate, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.processes import ROOT
from tools.lab import Lab, LabError, lab_names, namespaces, take_down

pytestmark = pytest.mark.long

LAB = ROOT / "tools" / "lab.py"
_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20): pass
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as connection:
    began = time.monotonic()
    connection.sendall(bytes(5_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.monotonic() - began)
"""
# Ends only when it is told to.
_HOLD_A_LAB = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tools.lab import Lab
with Lab(2) as lab:
    print(lab.name, flush=True)
    time.sleep(60)
"""


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LAB), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"test{os.getpid()}"
    yield chosen
    take_down(chosen)


@pytest.mark.root
def test_a_link_is_as_slow_as_asked() -> None:
    with Lab(3, "100mbit") as nodes:
        assert [node.address for node in nodes.nodes] == ["10.78.0.1", "10.78.0.2", "10.78.0.3"]
        first, last = nodes.nodes[0], nodes.nodes[2]
        receive = [*last.prefix, sys.executable, "-c", _RECEIVE, last.address]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            send = [*first.prefix, sys.executable, "-c", _SEND, last.address]
            seconds = float(subprocess.run(send, capture_output=True, text=True, check=True, timeout=180).stdout)
    # 40 Mbit at 100 Mbit/s; a busy machine may be slower, a link never faster than its rate and its burst.
    assert 0.38 < seconds < 5
    assert namespaces(nodes.name) == []


@pytest.mark.root
def test_a_lab_is_removed_when_what_is_inside_fails() -> None:
    with pytest.raises(RuntimeError, match="the job failed"), Lab(2) as nodes:
        raise RuntimeError("the job failed")
    assert namespaces(nodes.name) == []


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_the_lab(number: signal.Signals) -> None:
    with holder() as (process, held):
        process.send_signal(number)
        assert process.wait(120) == 128 + number
        assert namespaces(held) == []


@pytest.mark.root
def test_what_a_killed_process_leaves_is_found_by_down(name: str) -> None:
    with holder() as (process, held):
        process.kill()
        process.wait(30)
        assert len(namespaces(held)) == 3
        assert held in lab("down", "--name", name).stdout
        assert held not in lab_names()


@pytest.mark.root
def test_the_host_never_sees_the_lab() -> None:
    before = subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout
    with Lab(2):
        shown = subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout
    assert "10.78.0." not in shown
    assert shown.count("link/ether") == before.count("link/ether")


@pytest.mark.root
def test_commands_up_exec_status_down(name: str) -> None:
    up = lab("up", "--nodes", "2", "--rate", "50mbit", "--name", name)
    assert up.stdout.splitlines() == [
        f"node 0  10.78.0.1  ftlab-{name}-0  50mbit",
        f"node 1  10.78.0.2  ftlab-{name}-1  50mbit",
    ]
    assert "is up already" in lab("up", "--name", name).stderr
    inside = lab("exec", "--name", name, "1", "--", "sh", "-c", "ip -4 -o addr show dev eth0; exit 7")
    assert "10.78.0.2/24" in inside.stdout
    assert inside.returncode == 7
    assert f"ftlab-{name}-0  10.78.0.1/24  50mbit  0 processes" in lab("status").stdout
    assert "has no node 2" in lab("exec", "--name", name, "2", "true").stderr
    assert name in lab("down", "--name", name).stdout
    again = lab("down", "--name", name)
    assert (again.returncode, namespaces(name)) == (0, [])


@pytest.mark.root
def test_down_ends_what_runs_on_a_node(name: str) -> None:
    with Lab(1, name=name) as nodes:
        says = [*nodes.nodes[0].prefix, "sh", "-c", "echo inside; exec sleep 60"]
        sleeper = subprocess.Popen(says, stdout=subprocess.PIPE, text=True)
        assert sleeper.stdout is not None
        with sleeper.stdout:
            assert sleeper.stdout.readline() == "inside\n"
    assert sleeper.wait(10) != 0


def test_wrong_values_are_refused() -> None:
    with pytest.raises(LabError, match=r"rate='fast' is not a rate of tc such as 1gbit"):
        Lab(2, "fast")
    with pytest.raises(LabError, match="nodes=0: a lab has 1 to 200 nodes"):
        Lab(0)
    with pytest.raises(LabError, match=r"name='\.\./x': a lab's name"):
        Lab(1, name="../x")


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds a lab; gives the process and the lab's name."""
    command = [sys.executable, "-c", _HOLD_A_LAB, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            name = process.stdout.readline().strip()
            assert len(namespaces(name)) == 3, "two nodes and the switch"
            yield process, name
        finally:
            process.kill()
            take_down(name)
