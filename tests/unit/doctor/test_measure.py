"""What a doctor reads from files and outputs, with recorded ones, and measures together with others on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fleet_train import timeouts
from fleet_train.cluster.flight.stands import from_json
from fleet_train.cluster.store.access import Access
from fleet_train.doctor import measure_apart, measure_machine
from fleet_train.doctor.facts import FAIL, UNLIMITED, Folder, Gpu, Gpus, PortTry
from fleet_train.doctor.judge import _of_gpus
from fleet_train.doctor.measure_machine import package_digest
from fleet_train.doctor.measure_network import outgoing_ports, proxies_in_the_way, wrong_interfaces
from fleet_train.doctor.meeting import Meeting
from fleet_train.doctor.pairs import Rounds, dial, partner, stream_seconds
from fleet_train.doctor.participants import Participants, without_loopback_name
from fleet_train.doctor.sockets import KEY_BYTES, Door, Sockets, held_ports, sweep_packet_sizes
from fleet_train.errors import JoinTimeout, WorkerFailed
from fleet_train.launch.node import Node
from tests.support.ports import free_ports


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_limits_of_version_2_are_the_tightest_of_all_levels_and_none_without_groups(tmp_path: Path) -> None:
    assert measure_machine.memory_quota(tmp_path, tmp_path / "none") == (UNLIMITED, UNLIMITED, 0)
    assert measure_machine.processor_quota(tmp_path, tmp_path / "none") == UNLIMITED
    root = tree(
        tmp_path / "cgroup",
        {
            "job/memory.max": "1000000\n",
            "job/memory.current": "400000\n",
            "job/memory.stat": "anon 1\ninactive_file 100000\n",
            "job/step/memory.max": "max\n",
            "job/step/memory.current": "400000\n",
            "job/step/memory.events": "oom 3\noom_kill 2\n",
            "job/step/cpu.max": "150000 100000\n",
            "job/cpu.max": "max 100000\n",
        },
    )
    cgroups = tmp_path / "self"
    cgroups.write_text("0::/job/step\n")
    assert measure_machine.memory_quota(root, cgroups) == (1000000, 700000, 2)
    assert measure_machine.processor_quota(root, cgroups) == 1.5


def test_limits_of_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cgroup",
        {
            "memory/job/memory.limit_in_bytes": "1000000\n",
            "memory/job/memory.usage_in_bytes": "400000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
    )
    cgroups = tmp_path / "self"
    cgroups.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n")
    assert measure_machine.memory_quota(root, cgroups) == (1000000, 600000, 0)
    assert measure_machine.processor_quota(root, cgroups) == 0.5


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, ()),
        ({"http_proxy": ""}, ()),
        ({"http_proxy": "http://p"}, ("http_proxy",)),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "10.0.0.2"}, ("HTTPS_PROXY",)),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "10.0.0.2, 10.0.0.3"}, ()),
        ({"all_proxy": "http://p", "NO_PROXY": "10.0.0.0/24"}, ()),
        ({"all_proxy": "http://p", "NO_PROXY": "*"}, ()),
    ],
)
def test_proxies_that_stand_between_nodes(environ: dict[str, str], named: tuple[str, ...]) -> None:
    assert proxies_in_the_way(environ, ["10.0.0.2", "10.0.0.3"]) == named


@pytest.mark.parametrize(
    ("environ", "wrong"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ()),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, ("GLOO_SOCKET_IFNAME",)),
        ({"GLOO_SOCKET_IFNAME": "lo"}, ("GLOO_SOCKET_IFNAME",)),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ()),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ("NCCL_SOCKET_IFNAME",)),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, ()),
    ],
)
def test_variables_that_name_an_interface(environ: dict[str, str], wrong: tuple[str, ...]) -> None:
    interfaces = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)}
    assert wrong_interfaces(environ, interfaces, "10.0.0.1") == wrong


def test_ports_of_outgoing_connections(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("1024\t65000\n")
    assert outgoing_ports(tmp_path / "range") == (1024, 65000)
    assert outgoing_ports(tmp_path / "none") == (32768, 60999)


def test_a_package_is_known_by_its_files(tmp_path: Path) -> None:
    same, more = {"a.py": "1", "b/c.py": "2"}, {"a.py": "1", "b/c.py": "2", "x.pyc": ""}
    others = {"a.py": "1", "b/d.py": "2"}, {"a.py": "1", "b/c.py": "3"}
    first, second, *different = (
        package_digest(tree(tmp_path / str(number), files)) for number, files in enumerate((same, more, *others))
    )
    assert first == second
    assert first not in different


def test_a_folder_is_written_to_and_left_with_the_mark_alone(tmp_path: Path) -> None:
    folder = Folder("logs", **measure_apart.write_into(tmp_path / "not" / "there", f"{measure_apart.MARK}ab"))  # type: ignore[arg-type]
    assert (folder.path, folder.error) == (str(tmp_path), "")
    assert folder.bytes_per_second > 0
    assert measure_apart.seen(folder, f"{measure_apart.MARK}ab")
    measure_apart.clean((folder,), f"{measure_apart.MARK}ab")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_doctor_has_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    now = time.time()
    for name, age in (("long_ago", 4000), ("long_ago.trial", 4000), ("at_work", 60)):
        path = tmp_path / f"{measure_apart.MARK}{name}"
        path.touch()
        os.utime(path, (now - age, now - age))
    measure_apart.write_into(tmp_path, f"{measure_apart.MARK}mine")
    assert sorted(path.name.removeprefix(measure_apart.MARK) for path in tmp_path.iterdir()) == ["at_work", "mine"]


def test_a_folder_of_data_is_read_by_a_process_of_its_own_that_may_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (str(tmp_path), "20", "16", "1")
    (found,) = measure_apart.of_data(arguments)
    assert (found.id, found.level, found.hosts) == ("data", FAIL, ())
    assert f"image folder {tmp_path}" in found.measured

    def hangs(seconds: float, *_: str, **__: str) -> None:
        raise subprocess.TimeoutExpired("python", seconds)

    monkeypatch.setattr(measure_apart, "run_apart", hangs)
    (found,) = measure_apart.of_data(arguments)
    assert found.measured == f"{tmp_path}: nothing could be measured within 40 s"


# As the manual of nvidia-smi shows them; no GPU was asked.
TABLE = """\
0, NVIDIA A100-SXM4-40GB, 535.161.08, 0, 4
1, NVIDIA A100-SXM4-40GB, 535.161.08, 2, 2231
2, NVIDIA GeForce RTX 3090, 535.161.08, [N/A], 11
"""
LINKS = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-b8ea0e6b-9b3e-0a4b-0000-000000000000)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b8ea0e6b-9b3e-0a4b-0000-000000000001)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
GPU 2: NVIDIA GeForce RTX 3090 (UUID: GPU-b8ea0e6b-9b3e-0a4b-0000-000000000002)
\t Link 0: <inactive>
"""


def test_recorded_output_of_nvidia_smi_and_its_findings(tmp_path: Path) -> None:
    down = measure_machine.parse_links(LINKS)
    assert down == {1: 1}
    assert measure_machine.parse_table(TABLE, down) == (
        Gpu(0, "NVIDIA A100-SXM4-40GB", "535.161.08", 0, 4 << 20, 0),
        Gpu(1, "NVIDIA A100-SXM4-40GB", "535.161.08", 2, 2231 << 20, 1),
        Gpu(2, "NVIDIA GeForce RTX 3090", "535.161.08", 0, 11 << 20, 0),
    )
    assert measure_machine.parse_table("No devices were found\n", {}) == ()
    assert measure_machine.gpus(tmp_path) is None
    gpus = Gpus(measure_machine.parse_table(TABLE, measure_machine.parse_links(LINKS)), "2.21.5")
    levels = {
        (finding.id, finding.level, finding.hosts) for finding in _of_gpus("node 0", gpus) if finding.level != "PASS"
    }
    second = ("node 0 GPU 1",)
    assert levels == {("ecc", "FAIL", second), ("nvlink", "WARN", second), ("gpu_memory", "WARN", second)}
    (silent,) = _of_gpus("node 0", Gpus(error="nvidia-smi has not answered within 10 s"))
    assert silent.level == "FAIL"


# between doctors of one process on loopback addresses


HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
T = TypeVar("T")


class Doctor:
    """One node's sockets and its place in the meeting."""

    def __init__(self, index: int, port: int, job: str = "job") -> None:
        self.node = Node(HOSTS, index, port, 1, None, None)
        self.difference = ""
        held = held_ports(HOSTS[index], (port, port + 1))
        free = [each for each in (port, port + 1) if each not in held]
        there = Participants(self.node, ((port, port + 1),) * 3, Access(job, source=HOSTS[index]))
        self.meeting = Meeting(there, free, lambda: self.difference)
        self.sockets = Sockets(HOSTS[index], free[index == 0 :], f"{index:02}" * KEY_BYTES)

    def join(self, seconds: float) -> list[int]:
        return [*self.meeting.join(self.sockets.door, seconds)]

    def dialled(self) -> tuple[PortTry, ...]:
        return dial(self.node, {node: door.ports for node, door in self.meeting.read("here", Door).items()})


@contextmanager
def doctors(indices: Iterable[int], port: int, **changed: Any) -> Iterator[list[Doctor]]:
    with ExitStack() as closing:
        made = []
        for index in indices:
            made.append(Doctor(index, port, **changed))
            closing.callback(made[-1].meeting.close)
            closing.callback(made[-1].sockets.close)
        yield made


def together(met: list[Doctor], do: Callable[[Doctor], T]) -> list[T]:
    with ThreadPoolExecutor(len(met)) as pool:
        return list(pool.map(do, met))


def test_all_read_what_each_has_published_and_leave_together() -> None:
    with doctors(range(3), free_ports(2, HOSTS)) as met:
        assert together(met, lambda each: each.join(10.0)) == [[0, 1, 2]] * 3
        reports = {"purpose": "node 0", "path": "/"}, ["nonsense"], {"purpose": "node 2", "path": "/"}
        missing = together(met, lambda each: each.meeting.share("report", reports[each.node.index], range(3), 20.0))
        assert missing == [set()] * 3
        assert met[0].meeting.read("report", Folder) == {node: Folder(f"node {node}", "/") for node in (0, 2)}
        began = time.monotonic()

        def leave(each: Doctor) -> None:
            if each.node.index:
                time.sleep(0.5)
                assert each.meeting.read("report", Folder).keys() == {0, 2}  # node 0 waits for the others
            each.meeting.leave(20.0)
            each.meeting.close()

        together(met, leave)
        assert time.monotonic() - began < 10.0


def test_who_is_absent_is_waited_for_until_the_time_of_one_is_over() -> None:
    with doctors((0, 1), free_ports(2, HOSTS)) as met:
        began = time.monotonic()
        assert together(met, lambda each: each.join((300.0, 1.5)[each.node.index])) == [[0, 1]] * 2
        assert time.monotonic() - began < 30.0
        with doctors((2,), met[0].meeting.port) as (late,), pytest.raises(JoinTimeout, match="came too late"):
            late.join(5.0)


def test_a_lost_node_is_not_waited_for_and_without_node_0_nobody_can_be_asked() -> None:
    with doctors(range(3), free_ports(2, HOSTS)) as met:
        together(met, lambda each: each.join(10.0))
        met[2].meeting.close()
        began = time.monotonic()
        assert met[1].meeting.share("report", 1, range(3), 1.0) == {0, 2}
        assert met[1].meeting.share("report", 1, (1, 2), 60.0) == {2}
        assert time.monotonic() - began < 30.0
        met[0].meeting.close()
        with pytest.raises(WorkerFailed, match="no longer answers"):
            met[1].meeting.share("report", 1, (0,), 60.0)


def test_without_the_store_each_of_its_ports_is_named_with_what_it_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "DOCTOR_STORE_SECONDS", 1.0)
    port = free_ports(2, HOSTS)
    with doctors((1,), port) as (second,):
        with pytest.raises(JoinTimeout, match=f"port {port}: refused; port {port + 1}: refused"):
            second.join(0.3)
        with doctors((0,), port, job="other"), pytest.raises(JoinTimeout, match="it belongs to another job, 'other'"):
            second.join(0.3)
        second.difference = "other flags"
        began = time.monotonic()
        with pytest.raises(JoinTimeout):
            second.join(60.0)
        assert time.monotonic() - began < 30.0
    with ExitStack() as taken:
        for each in (port, port + 1):
            taken.enter_context(socket.create_server((HOSTS[0], each)))
        with doctors((0,), port) as (first,), pytest.raises(JoinTimeout, match="no free port"):
            first.join(60.0)


def measured(met: list[Doctor], tries: dict[int, tuple[PortTry, ...]], behind: float, late: set[int]) -> list[Rounds]:
    """What two doctors measure; the clock of the last one is behind."""

    def measure(one: Doctor) -> Rounds:
        doors = one.meeting.read("here", Door)
        clock = (lambda: time.time() - behind) if one is met[-1] else time.time
        made = Rounds(one.node, one.sockets, doors, tries, lambda _: late, clock)
        made.measure(2.0)
        return made

    return together(met, measure)


def test_a_clock_that_goes_wrong_is_measured_and_the_bytes_of_both_directions() -> None:
    with doctors((0, 1), free_ports(2, HOSTS)) as met:
        together(met, lambda each: each.join(1.0))
        tries = {each.node.index: each.dialled() for each in met}
        assert [{each.outcome for each in made} for made in tries.values()] == [{"open"}] * 2
        first, second = measured(met, tries, 7.5, set())
        (echo,) = first.echoes
        assert abs(echo.ahead - 7.5) <= echo.uncertainty + 0.01  # half of the way there and back, on a busy machine too
        assert echo.uncertainty < 2.0
        assert [(each.source, each.target, each.error) for each in first.streams] == [(0, 1, ""), (1, 0, "")]
        assert all(each.best >= each.bytes_per_second > 0 for each in first.streams)
        assert (second.echoes, second.streams) == ([], [])  # the lower one has called


def test_who_cannot_be_reached_by_the_lower_node_calls_itself() -> None:
    with doctors((0, 1), free_ports(2, HOSTS)) as met:
        together(met, lambda each: each.join(1.0))
        tries = {0: (PortTry(1, 80, "timed out"),), 1: met[1].dialled()}
        first, second = measured(met, tries, 0.0, {2})  # whom they do not wait for
        assert (first.echoes, first.streams) == ([], [])
        assert [(each.source, each.target, each.error) for each in second.streams] == [(1, 0, ""), (0, 1, "")]


def test_a_transfer_that_fails_says_why_and_a_pair_without_a_way_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DOCTOR_ROUND_SECONDS", 0.5)
    monkeypatch.setattr(timeouts, "DOCTOR_ANSWER_SECONDS", 0.5)
    with doctors((0, 1), free_ports(2, HOSTS)) as met:
        together(met, lambda each: each.join(1.0))
        tries = {0: met[0].dialled(), 1: met[1].dialled()}
        (first,) = measured(met[:1], tries, 0.0, set())
        assert first.streams == []  # the other one does not attend, which is no fault of the network
        met[1].sockets.close()
        (first,) = measured(met[:1], tries, 0.0, set())
        ((why),) = [each.error for each in first.streams]
        assert why == "[Errno 111] Connection refused"
        for tried, late in (({0: (), 1: ()}, set()), (tries, {1})):
            (first,) = measured(met[:1], tried, 0.0, late)
            assert first.streams == []


def test_a_port_that_another_program_has_is_held_and_the_store_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DOCTOR_STORE_SECONDS", 1.0)  # which that program takes
    port = free_ports(2, HOSTS)
    with socket.create_server((HOSTS[0], port)), doctors((0, 1), port) as met:
        assert held_ports(HOSTS[0], (port, port + 1))[port].startswith("process ")
        assert together(met, lambda each: each.join(4.0)) == [[0, 1]] * 2
        assert [each.meeting.port for each in met] == [port + 1] * 2
        assert [each.outcome for each in dial(met[1].node, {0: (port, port + 1)})] == ["open"] * 2
    assert [each.outcome for each in dial(met[1].node, {0: (port, port + 1)})] == ["refused"] * 2


def test_who_has_no_key_is_told_nothing() -> None:
    with doctors((1,), free_ports(2, HOSTS)) as (second,):
        door = second.sockets.door
        calls = []
        for word in (b"GET / HTTP/1.0\r\n\r\n", b"", b"\0" * KEY_BYTES, door.secret):
            calls.append(socket.create_connection((HOSTS[1], door.ports[0]), timeout=5, source_address=(HOSTS[0], 0)))
            calls[-1].sendall(word)
            if not word:
                calls[-1].shutdown(socket.SHUT_WR)
        with second.sockets.accept(door.secret, 20.0) as accepted:
            assert accepted.getpeername() == calls[-1].getsockname()
        for call in calls[:-1]:
            with call, suppress(ConnectionResetError):  # what it has sent was not read to its end
                assert call.recv(100) == b""
        calls[-1].close()
        with pytest.raises(TimeoutError):
            second.sockets.accept(door.secret, 0.3)


@pytest.mark.parametrize("wrong", [{"key": "ab"}, {"key": "no hex"}, {"udp": 0}, {"ports": (99999,)}])
def test_a_door_that_no_node_has_is_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"ports": (80, 81), "udp": 82, "key": "ab" * 16}
    assert from_json(Door, right) == Door(**right)
    with pytest.raises(ValueError, match=r"door|hex"):
        from_json(Door, right | wrong)


def test_packets_of_every_size_are_answered_on_loopback() -> None:
    with doctors((1,), free_ports(2, HOSTS)) as (second,):
        door = second.sockets.door
        largest, known = sweep_packet_sizes(HOSTS[1], door.udp, HOSTS[0], door.secret, 9000)
        silent, _ = sweep_packet_sizes(HOSTS[1], door.udp, HOSTS[0], b"87654321", 600)
    assert (largest, known >= 9000, silent) == (9000, True, 0)


def test_each_pair_meets_once_and_each_node_has_one_partner_a_round() -> None:
    for nodes in (range(1, 2 + number) for number in range(1, 17)):
        pairs = [(a, partner(nodes, a, number)) for number in range(len(nodes)) for a in nodes]
        assert sorted(pairs) == [(a, b) for a in nodes for b in nodes]
        assert set(pairs) == {(b, a) for a, b in pairs}
    assert 16 * 2 * (stream_seconds(16, 14.0) + 0.1) < 15.0


def test_lists_without_a_loopback_name_stay_as_they_are() -> None:
    for addresses in (("10.0.0.1", "10.0.0.2"), ("127.0.0.1",), ("127.0.0.2", "127.0.0.3")):
        assert without_loopback_name(addresses, addresses, None) == (addresses, None)
