"""``pip install .``: the installed package works outside the checkout, strategies included."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import INSTALL
from tests.support.processes import ROOT, clean_environ

pytestmark = pytest.mark.long

PARTS_OF_THE_PACKAGE = ("fleet_train", "strategies", "pyproject.toml", "README.md", "LICENSE")


def run(command: str, folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installed_package_finds_its_profiles_and_trains(tmp_path: Path) -> None:
    checkout, site, elsewhere = (tmp_path / name for name in ("checkout", "site", "elsewhere"))
    for folder in (checkout, elsewhere):
        folder.mkdir()
    for part in PARTS_OF_THE_PACKAGE:  # building writes into its folder: not into this checkout
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, checkout / part)
    run(f"{INSTALL} --no-deps --quiet --target {site}", checkout, clean_environ())
    shutil.rmtree(checkout)

    installed = clean_environ({"PYTHONPATH": str(site)})
    where = run('python -c "import fleet_train; print(fleet_train.__file__)"', elsewhere, installed)
    assert where.strip() == str(site / "fleet_train" / "__init__.py")
    assert "multi_node" in run("python -m fleet_train profiles", elsewhere, installed)
    shutil.copy(ROOT / "tools" / "examples" / "train_with_fleet.py", elsewhere / "train.py")
    assert "step99 cost=" in run("python train.py", elsewhere, installed)


def test_an_activated_environment_is_what_python_means(tmp_path: Path) -> None:
    run("python3 -m venv --without-pip .venv", tmp_path, clean_environ())
    told = run(
        "bash -c '. .venv/bin/activate && python -c \"import sys; print(sys.prefix)\"'", tmp_path, clean_environ()
    )
    assert told.strip() == str(tmp_path / ".venv")
