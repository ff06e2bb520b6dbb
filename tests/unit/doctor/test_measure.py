"""What is read from files and outputs, with recorded ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fleet_train.doctor import measure_apart, measure_machine
from fleet_train.doctor.facts import UNLIMITED, Folder, Gpu, Gpus
from fleet_train.doctor.judge import _of_gpus
from fleet_train.doctor.measure_machine import package_digest
from fleet_train.doctor.measure_network import outgoing_ports, proxies_in_the_way, wrong_interfaces


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
