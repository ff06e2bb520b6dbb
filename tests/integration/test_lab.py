"""The network lab and the soak: links of the requested rate, nothing left behind, and faults that lose nothing.

docs/benchmarks has the long soaks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import ROOT, Job, clean_environ, python
from tools.lab import Lab, LabError, lab_names, namespaces, network_of, take_down

pytestmark = pytest.mark.long

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
# Answers each so many bytes with one, and at the end with their checksum.
_ANSWER = """
import socket, sys, zlib
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    size, left, found = int(sys.argv[2]), 0, 0
    while piece := connection.recv(1 << 20):
        found, left = zlib.crc32(piece, found), left + len(piece)
        while left >= size:
            left -= size
            connection.sendall(b"x")
    print(found)
"""
_ASK = """
import random, socket, sys, time, zlib
with socket.create_connection((sys.argv[1], 5001)) as connection:
    size, sent = int(sys.argv[2]), 0
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        message = random.randbytes(size)
        sent = zlib.crc32(message, sent)
        time.sleep(0.03)
        began = time.monotonic()
        connection.sendall(message)
        connection.recv(1)
        print(time.monotonic() - began)
    print(sent)
"""
_RECEIVE_DATAGRAM = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as receiver:
    receiver.bind((sys.argv[1], 5002))
    print("ready", flush=True)
    for _ in range(2):
        receiver.sendto(b"back", receiver.recvfrom(16)[1])
        print("heard", flush=True)
"""
_SEND_DATAGRAM = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as sender:
    sender.settimeout(1)
    sender.sendto(b"there", (sys.argv[1], 5002))
    try:
        sender.recv(16)
        print("answer")
    except TimeoutError:
        print("no answer")
"""
# Ends only when it is told to.
_HOLD_A_LAB = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tools.lab import Lab
with Lab(2) as lab:
    print(lab.name, flush=True)
    time.sleep(600)
"""


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = python(str(ROOT / "tools" / "lab.py"), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"test{os.getpid()}"
    yield chosen
    take_down(chosen)


def answers(nodes: Lab, size: int) -> list[float]:
    """Seconds of messages of so many bytes from node 0 to node 1, each after 30 idle ms; they arrive as they were."""
    first, last = nodes.nodes[0], nodes.nodes[1]
    receive = [*last.prefix, sys.executable, "-c", _ANSWER, last.address, str(size)]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        send = [*first.prefix, sys.executable, "-c", _ASK, last.address, str(size)]
        *seconds, sent = subprocess.run(send, capture_output=True, text=True, check=True, timeout=180).stdout.split()
        assert receiver.communicate()[0].split() == [sent]
    return [float(each) for each in seconds]


@pytest.mark.root
def test_a_small_message_after_an_idle_moment_takes_its_time_at_the_rate() -> None:
    with Lab(2, "100mbit") as nodes:
        assert min(answers(nodes, 100_000)) >= 0.9 * 100_000 * 8 / 100e6


@pytest.mark.root
def test_sites_far_from_each_other_have_a_round_trip_and_lose_nothing() -> None:
    with Lab(3, "100mbit", rtt=20.0) as nodes:
        assert min(answers(nodes, 1)) >= 0.02
        assert min(answers(nodes, 300_000)) >= 0.02 + 0.9 * 300_000 * 8 / 100e6
        with pytest.raises(LabError, match="stay up"):
            nodes.set_link(0, "down")
    assert namespaces(nodes.name) == []


@pytest.mark.root
def test_a_node_that_hears_nothing_can_still_send() -> None:
    with Lab(2, "none") as nodes:
        deaf, other = nodes.nodes[1], nodes.nodes[0]
        nodes.set_hearing(deaf.index, False)
        receive = [*other.prefix, sys.executable, "-c", _RECEIVE_DATAGRAM, other.address]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            send = [*deaf.prefix, sys.executable, "-c", _SEND_DATAGRAM, other.address]
            answers = [subprocess.run(send, capture_output=True, text=True, check=True).stdout]
            nodes.set_hearing(deaf.index, True)
            answers.append(subprocess.run(send, capture_output=True, text=True, check=True).stdout)
            assert receiver.communicate()[0].split() == ["heard", "heard"]
        assert answers == ["no answer\n", "answer\n"]


@pytest.mark.root
def test_a_link_is_as_slow_as_asked_and_the_host_never_sees_the_lab() -> None:
    with Lab(3, "100mbit") as nodes:
        assert "10.78.0." not in subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout
        assert [node.address for node in nodes.nodes] == ["10.78.0.1", "10.78.0.2", "10.78.0.3"]
        first, last = nodes.nodes[0], nodes.nodes[2]
        receive = [*last.prefix, sys.executable, "-c", _RECEIVE, last.address]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            send = [*first.prefix, sys.executable, "-c", _SEND, last.address]
            seconds = float(subprocess.run(send, capture_output=True, text=True, check=True, timeout=180).stdout)
    # 40 Mbit at 100 Mbit/s: a link is never faster than its rate and its burst.
    assert seconds > 0.38
    assert namespaces(nodes.name) == []
    with pytest.raises(RuntimeError, match="the job failed"), Lab(1, "none") as failing:
        raise RuntimeError("the job failed")
    assert namespaces(failing.name) == []


@pytest.mark.root
def test_a_signal_removes_the_lab_and_what_a_killed_process_leaves_is_found_by_down(name: str) -> None:
    with holder() as (process, held):
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
        assert namespaces(held) == []

    with holder() as (process, held):
        process.kill()
        process.wait(30)
        assert len(namespaces(held)) == 3
        assert held in lab("down", "--name", name).stdout
        assert held not in lab_names()


@pytest.mark.root
def test_commands_up_exec_status_down(name: str, tmp_path: Path) -> None:
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
    with Job(tmp_path) as job:
        sleeper = ["ip", "netns", "exec", f"ftlab-{name}-0", "sh", "-c", "echo inside; exec sleep 600"]
        started = job.start("sleeper", sleeper, clean_environ())
        job.wait_until(lambda: "inside" in started.output, 10, "the process is in its namespace")
        assert name in lab("down", "--name", name).stdout
        assert started.process.wait(60) != 0
    again = lab("down", "--name", name)
    assert (again.returncode, namespaces(name)) == (0, [])


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


# The seeds are of those whose faults come soon and pass soon.
RANKS = "--faults save,step,start,freeze --network loopback --nodes 2 --epochs 3 --step_seconds 0.2 --seed 599"
# Long enough for local steps: they begin after step 100.
LOCAL_STEPS = "--faults step,freeze --network loopback --nodes 2 --epochs 6 --step_seconds 0.1 --strategy local_sgd"
MACHINES = "--faults machine:0,frozen:leader,cut --epochs 4 --step_seconds 0.3 --next_step_within 240 --seed 149"


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        pytest.param(RANKS, ["save", "step", "start", "freeze"], id="ranks"),
        pytest.param(LOCAL_STEPS, ["step", "freeze"], id="local steps"),
        pytest.param(MACHINES, ["machine", "frozen", "cut"], id="machines", marks=pytest.mark.root),
    ],
)
def test_a_small_soak_loses_nothing(tmp_path: Path, flags: str, kinds: list[str]) -> None:
    words = flags.split()
    if "loopback" in words:
        words += ["--started_port", str(free_ports(3, ["127.0.0.2", "127.0.0.3"]))]
    where = ["--record", str(tmp_path), "--name", "record", "--keep_files", str(tmp_path / "files")]
    soak = python(str(ROOT / "tools" / "soak.py"), *words, *where)
    done = subprocess.run(soak, env=clean_environ(), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [fault["kind"] for fault in record["faults"]] == kinds
    assert len(record.get("attempts") or record["stretches"]) >= 2
    assert record["comparison"]["losses"] > 60
    assert "nothing was lost" in (tmp_path / "record.md").read_text()


def test_a_network_is_a_rate_and_a_round_trip() -> None:
    words = ("1gbit", "100mbit-20ms", "unlimited", "unlimited-1.5ms")
    assert [network_of(word) for word in words] == [("1gbit", 0.0), ("100mbit", 20.0), ("none", 0.0), ("none", 1.5)]
    for word in ("100mbit-", "-20ms", "100mbit-20"):
        with pytest.raises(LabError, match="100mbit-20ms"):
            network_of(word)
