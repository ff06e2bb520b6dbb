"""Differences between machines, each reported with the host that differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.doctor.conftest import Two
from tests.integration.doctor.sick import HEALTHY, Patient, Told, examine, host
from tests.support.processes import ROOT

pytestmark = [pytest.mark.root, pytest.mark.long]


def second_is(two: Two, folder: Path, patient: Patient, *flags: str) -> Told:
    return examine(folder, two, [HEALTHY, patient], "--only", "software", *flags)[0]


def copied_package(folder: Path, change: Callable[[Path], None]) -> Patient:
    """Another copy of the checkout, which differs by ``change``."""
    for name in ("fleet_train", "strategies"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    change(folder / "fleet_train")
    return Patient(environ={"PYTHONPATH": str(folder)})


def pretended(folder: Path, name: str, version: str) -> Patient:
    """A distribution of this name and version is found first."""
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return Patient(environ={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"})


def test_another_version_of_fleet_train(two: Two, tmp_path: Path) -> None:
    def change(package: Path) -> None:
        module = package / "__init__.py"
        module.write_text(module.read_text().replace('__version__ = "', '__version__ = "9.'))

    told = second_is(two, tmp_path, copied_package(tmp_path / "copy", change))
    assert told.hosts("fleet_train", "FAIL") == told.hosts("package", "FAIL") == [(host(1, two),)]


def test_one_file_of_the_package_was_changed(two: Two, tmp_path: Path) -> None:
    def change(package: Path) -> None:
        with (package / "plan" / "build.py").open("a") as file:
            file.write("# a local change\n")

    told = second_is(two, tmp_path, copied_package(tmp_path / "copy", change))
    assert told.hosts("package", "FAIL") == [(host(1, two),)]
    assert told.findings("fleet_train", "FAIL") == []


def test_another_paddle(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, pretended(tmp_path / "shim", "paddlepaddle", "3.2.2"))
    assert told.hosts("paddle", "FAIL") == [(host(1, two),)]


def test_another_numpy(two: Two, tmp_path: Path) -> None:
    told = second_is(two, tmp_path, pretended(tmp_path / "shim", "numpy", "1.26.0"))
    assert told.hosts("numpy", "WARN") == [(host(1, two),)]
    assert told.ended.exit_code == 0


def test_another_profile_under_one_name(two: Two, tmp_path: Path) -> None:
    for node, megabytes in enumerate((4, 8)):
        (tmp_path / f"node{node}").mkdir()
        text = f"description: Ours.\nextends: multi_node\nfuse_grad_size_in_MB: {megabytes}\n"
        (tmp_path / f"node{node}" / "mine.yaml").write_text(text)
    told = second_is(two, tmp_path, HEALTHY, "--strategy", "./mine.yaml")
    assert told.hosts("profile", "FAIL") == [(host(1, two),)]


def test_a_profile_that_is_not_there(two: Two, tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "mine.yaml").write_text("description: Ours.\nextends: multi_node\n")
    told = second_is(two, tmp_path, HEALTHY, "--strategy", "./mine.yaml")
    assert told.hosts("profile_or_script", "FAIL") == [(host(1, two),)]


def test_another_script(two: Two, tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "train.py").write_text(f"lr = 0.{node + 1}\n")
    told = second_is(two, tmp_path, HEALTHY, "--script", "train.py")
    assert told.hosts("script", "FAIL") == [(host(1, two),)]
