"""`fleet_train version`: facts of this machine and of others; no value of a variable."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import fleet_train
from fleet_train.cli.version import facts_of
from fleet_train.cluster import installed
from tests.support.processes import ROOT, output_of, python

SECRET = "abc123-must-not-be-seen"


def run(*arguments: str, **variables: str) -> str:
    return output_of(python("-m", "fleet_train", *arguments), variables)


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


VARIABLES = {"FLEET_TRAIN_JOB_SECRET": SECRET, "FLAGS_call_stack_level": SECRET, "PADDLE_JOB_ID": SECRET, "MY": "x"}


def assert_names_and_no_values(printed: str) -> None:
    assert SECRET not in printed
    assert all(name in printed for name in VARIABLES if name != "MY")
    assert '"MY"' not in printed


def test_json_has_what_a_bug_report_needs() -> None:
    printed = run("version", "--json", **VARIABLES)
    assert_names_and_no_values(printed)
    found = json.loads(printed)
    assert found["fleet_train"]["version"] == fleet_train.__version__
    assert found["paddle"]["version"] == metadata.version("paddlepaddle")
    assert found["paddle"]["build"] == "CPU"
    assert re.fullmatch(r"[0-9a-f]{40}", found["paddle"]["commit"])
    assert {name: found["packages"][name] for name in ("numpy", "visualdl")} == {
        name: metadata.version(name) for name in ("numpy", "visualdl")
    }
    assert "numba" in found["packages"]
    assert 1 <= found["cores"]["usable"] <= found["cores"]["total"]
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0
    assert found["engine"] == "none"


def test_text_has_a_line_for_each_fact_and_is_one_line_where_that_is_asked() -> None:
    printed = run("version", **VARIABLES)
    assert_names_and_no_values(printed)
    names = {line.split()[0] for line in printed.splitlines()}
    assert names >= {"fleet_train", "python", "paddle", "memory", "cgroup", "container", "gpus", "engine", "variables"}
    (line,) = run("--version").splitlines()
    assert line.startswith(f"fleet_train {fleet_train.__version__}")
    assert line.endswith(f"paddlepaddle {metadata.version('paddlepaddle')}")


def test_the_commit_of_a_checkout_and_its_changes_are_reported() -> None:
    told = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    own = installed.own_version()
    if told.returncode != 0:
        assert "commit" not in own
    else:
        assert own["commit"] == told.stdout.strip()
        assert isinstance(own["uncommitted_changes"], bool)


def test_engines_are_named_as_launch_names_them() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert [facts_of(environ)["engine"] for environ in ({}, mpi)] == ["none", "mpi: process 1 of 4"]
    told = "its variables contradict each other or are incomplete: launch --dry-run says how"
    assert facts_of({"FLEET_TRAIN_ENGINE": "slurm"})["engine"] == told


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        (
            {
                "proc/self/cgroup": "0::/pod/container\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/pod/memory.max": "max\n",
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/container/memory.max": "1073741824\n",
            },
            {"cores": 1.5, "memory_bytes": 1 << 30},  # the least of a group and those above
        ),
        # a container whose path is the machine's
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, {"cores": 0.5}),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            {"memory_bytes": 2 << 30},  # version 1
        ),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], limits: dict[str, float]) -> None:
    assert installed.limits(put(tmp_path, files)) == limits


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, ""),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({".dockerenv": ""}, {}, "Docker"),
        ({"run/.containerenv": ""}, {}, "Podman"),
        ({"proc/1/environ": "TERM=linux\0container=systemd-nspawn\0"}, {}, "systemd-nspawn"),
        ({"proc/1/cgroup": "4:memory:/kubepods/burstable/pod1\n"}, {}, "kubepods"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, ""),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str) -> None:
    assert installed.container(environ, put(tmp_path, files)) == kind


def test_gpus_and_driver_by_the_files_of_the_driver(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
    gpus = {f"gpus/0000:0{n}:00.0/information": f"Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   {n}\n" for n in (1, 2)}
    put(tmp_path / "proc/driver/nvidia", {"version": version, **gpus})
    assert installed.gpus(tmp_path) == {"models": ["NVIDIA A100-SXM4-40GB"] * 2, "driver": "535.104.05"}
    assert installed.gpus(tmp_path / "nothing") == {}


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert installed.memory(tmp_path) == {}
    assert installed.limits(tmp_path) == {}
    assert "Linux" in installed.system(tmp_path)
    assert installed.processor(tmp_path / "cpuinfo")
