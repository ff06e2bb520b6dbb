"""The package without one of its parts: it is imported, helps, plans and trains; what needs the part is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environ

_COMMAND = "-m", "fleet_train"
PARTS = {
    "port": (*_COMMAND, "port", "train.py"),
    "compat": ("-c", "import fleet_train.compat"),
    "spawning": ("-c", "import fleet_train; fleet_train.spawn"),
    "recommend": (*_COMMAND, "recommend", "--script", "train.py"),
    "doctor": (*_COMMAND, "doctor"),
    "selftest": (*_COMMAND, "selftest"),
    "data": (*_COMMAND, "train", "--data", "digits"),
    "train": (*_COMMAND, "train", "--data", "digits"),
    "compression/powersgd": (*_COMMAND, "plan", "--script", "train.py", "--nodes", "2", "--strategy", "powersgd"),
}
"""Folders of the package, and what cannot be done without each."""


def without(part: str, folder: Path) -> Path:
    """A copy of the package and of the catalogue of profiles, without the part, beside a script."""
    shutil.copytree(ROOT / "fleet_train", folder / "fleet_train", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "strategies", folder / "strategies")
    shutil.rmtree(folder / "fleet_train" / part)
    for name in ("__init__.py", "support/__init__.py", "support/worker.py", "support/train_few_steps.py"):
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    return shutil.copy(ROOT / "tests/support/train_few_steps.py", folder / "train.py").parent


def python_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = clean_environ({"PYTHONPATH": str(folder), "FLEET_TRAIN_TEST_RESULTS": str(folder)})
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_the_package_does_its_work_without_a_part(part: str, tmp_path: Path, free_ports: Callable[..., int]) -> None:
    folder = without(part, tmp_path)
    port = f"--started_port={free_ports(3)}"
    imports = "from fleet_train import fleet, role_maker, DistributedStrategy; print(fleet.__file__)"
    where = python_in(folder, "-c", imports)
    assert where.stdout.startswith(str(folder)), where.stderr
    assert python_in(folder, *_COMMAND, "--help").returncode == 0
    plan = python_in(folder, *_COMMAND, "plan", "--script", "train.py", "--nodes", "2")
    assert plan.returncode == 0, plan.stderr
    run = python_in(folder, *_COMMAND, "launch", "--nproc_per_node=2", port, "--strategy=multi_node", "train.py")
    assert run.returncode == 0, run.stderr
    assert "rank 0 of 2 has trained" in (folder / "log/workerlog.0").read_text()
    refused = python_in(folder, *PARTS[part])
    assert refused.returncode != 0
    assert f"fleet_train.{part.replace(chr(47), chr(46))}" in refused.stderr
    assert "Traceback" not in refused.stderr or PARTS[part][0] == "-c"


@pytest.mark.parametrize("part", PARTS)
def test_few_lines_elsewhere_name_a_part(part: str) -> None:
    name, package = f"fleet_train.{part.replace('/', '.')}", ROOT / "fleet_train"
    others = [path for path in package.rglob("*.py") if package / part not in path.parents]
    lines = [f"{path}: {line}" for path in others for line in path.read_text().splitlines() if name in line]
    assert len(lines) <= 30, lines
