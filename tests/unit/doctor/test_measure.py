"""What a doctor reads from files and outputs, with recorded ones, and measures together with others on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet_train.cluster.store.access import Access, Refused
from fleet_train.cluster.store.wire import encode
from fleet_train.doctor import channel, measure_apart, measure_machine
from fleet_train.doctor.channel import dialled
from fleet_train.doctor.facts import FAIL, UNLIMITED, Folder, Gpu, Gpus
from fleet_train.doctor.judge import _of_gpus
from fleet_train.doctor.measure_machine import package_digest
from fleet_train.doctor.measure_network import outgoing_ports, proxies_in_the_way, wrong_interfaces
from fleet_train.doctor.participants import Participants, without_loopback_name
from fleet_train.doctor.peer_group import PeerGroup, rounds, stream_seconds
from fleet_train.doctor.responder import ReplicatedState, Responder
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


@contextmanager
def doctor(index: int, port: int, clock: Callable[[], float] = time.time, job: str = "job") -> Iterator[PeerGroup]:
    access = Access(job, source=HOSTS[index])
    participants = Participants(HOSTS, index, ((port, port + 1),) * 3, 1, access)
    state = ReplicatedState()
    responder = Responder(HOSTS[index], participants.ports[index], access, HOSTS, state, clock).start()
    presence = {"open": responder.ports, "extra": responder.extra_port, "udp": responder.udp_port}
    state.put(f"here/{index}", presence)
    try:
        yield PeerGroup(participants, state, responder)
    finally:
        responder.close()


def rendezvous(groups: list[PeerGroup], seconds: float) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.wait_for_nodes(seconds), groups))


def test_all_doctors_gather_all_facts_and_wait_for_an_absent_one_until_their_time_is_over() -> None:
    port = free_ports(2, HOSTS)
    with doctor(0, port) as first, doctor(1, port) as second:
        began = time.monotonic()
        assert rendezvous([first, second], 1.5) == [(0, 1)] * 2
        assert time.monotonic() - began < 30.0
    with doctor(0, port) as first, doctor(1, port) as second, doctor(2, port) as third:
        assert rendezvous([first, second, third], 10.0) == [(0, 1, 2)] * 3
        second.state.put("report/1", {"of": "node 1"})
        assert first.collect("report", [1], 5.0) == set()
        assert first.state.get("report/1") == {"of": "node 1"}
        first.leave([0, 1], 5.0)


def test_a_clock_that_goes_wrong_is_measured() -> None:
    port = free_ports(2, HOSTS)
    with doctor(0, port) as first, doctor(1, port, clock=lambda: time.time() - 7.5) as second:
        assert rendezvous([first, second], 1.0) == [(0, 1)] * 2
        (echo,), streams = first.measure_pairs((0, 1), 2.0)
        assert abs(echo.ahead - 7.5) <= echo.uncertainty + 0.01  # half of the way there and back, on a busy machine too
        assert echo.uncertainty < 2.0
        assert [(stream.source, stream.target, stream.error) for stream in streams] == [(0, 1, ""), (1, 0, "")]
        assert all(stream.best >= stream.bytes_per_second > 0 for stream in streams)
        assert second.measure_pairs((0, 1), 2.0) == ([], [])  # the lower one has begun it


def test_a_port_that_another_program_has_is_held_and_named() -> None:
    port = free_ports(2, HOSTS)
    with socket.create_server((HOSTS[1], port)), doctor(0, port) as first, doctor(1, port) as second:
        assert list(second.responder.held) == [port]
        assert str(second.responder.held[port]).startswith("process ")
        assert rendezvous([first, second], 1.0) == [(0, 1)] * 2
        assert {attempt.outcome for attempt in first.try_ports((0, 1))} == {"open"}


def test_doctors_of_other_jobs_and_strangers_are_refused() -> None:
    port = free_ports(2, HOSTS)
    with doctor(1, port):
        with pytest.raises(Refused, match="another job"), dialled(HOSTS[1], port, Access("other"), 0):
            pass
        with (
            pytest.raises(Refused, match="comes from 127"),
            dialled(HOSTS[1], port, Access("job", source="127.0.0.9"), 0),
        ):
            pass
        with socket.create_connection((HOSTS[1], port), timeout=5) as stranger:
            assert stranger.recv(4096)  # the challenge
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert stranger.recv(100) == b""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_no_doctor_says_ends_its_connection_without_a_word() -> None:
    port = free_ports(2, HOSTS)
    with doctor(1, port):
        for wrong in ({"member": []}, {"nonce": "\ud800"}, {"member": None}):
            with socket.create_connection((HOSTS[1], port), timeout=5, source_address=(HOSTS[0], 0)) as stranger:
                stranger.sendall(encode({"do": "hello", "job": "job", "nonce": "n", "member": 0, **wrong}))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass


def test_packets_of_every_size_are_answered_on_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        done = threading.Event()

        def serve() -> None:
            sock.settimeout(0.2)
            while not done.is_set():
                channel.answer_datagrams(sock, b"12345678")

        thread = threading.Thread(target=serve)
        thread.start()
        largest, known = channel.sweep_packet_sizes("127.0.0.1", sock.getsockname()[1], "127.0.0.1", b"12345678", 9000)
        silent, _ = channel.sweep_packet_sizes("127.0.0.1", sock.getsockname()[1], "127.0.0.1", b"87654321", 600)
        done.set()
        thread.join()
    assert (largest, known >= 9000, silent) == (9000, True, 0)


def test_each_pair_once_and_each_node_once_a_round() -> None:
    for number in range(2, 17):
        made = rounds(range(number))
        pairs = [pair for each in made for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(number) for b in range(a + 1, number)]
        assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in made)
    assert len(rounds(range(16))) == 15
    assert 15 * 2 * (stream_seconds(16, 14.0) + 0.1) < 15.0


def test_lists_without_a_loopback_name_stay_as_they_are() -> None:
    for addresses in (("10.0.0.1", "10.0.0.2"), ("127.0.0.1",), ("127.0.0.2", "127.0.0.3")):
        assert without_loopback_name(addresses, addresses, None) == (addresses, None)
