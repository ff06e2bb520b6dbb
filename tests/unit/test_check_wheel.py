"""What `make wheel` accepts as a wheel, and what it runs; building and installing one is `make wheel` itself."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tools.check_wheel import (
    WheelFailed,
    check_contents,
    expected_contents,
    first_commands,
    node_commands_of,
    outside_environment,
    run,
)
from tools.demo import Folders

METADATA = {f"fleet_train-0.1.0.dist-info/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")}
PACKAGE = {"fleet_train/__init__.py", "fleet_train/py.typed", "fleet_train/cli/__init__.py"}
STRATEGIES = {"strategies/multi_node.yaml", "strategies/schema.json"}
WHEEL = PACKAGE | {f"fleet_train/{name}" for name in STRATEGIES} | METADATA


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*PACKAGE, *STRATEGIES, "tests/test_one.py", "fleet_train/cli/__pycache__/one.cpython-311.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def wheel_of(folder: Path, names: set[str]) -> Path:
    wheel = folder / "fleet_train-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in sorted(names):
            archive.writestr(name, "")
    return wheel


def test_wheel_with_the_checkouts_files_is_accepted(checkout: Path) -> None:
    check_contents(wheel_of(checkout, WHEEL), checkout)


@pytest.mark.parametrize("gone", ["fleet_train/py.typed", "fleet_train/strategies/schema.json"])
def test_wheel_without_a_file_is_refused(checkout: Path, gone: str) -> None:
    with pytest.raises(WheelFailed, match=f"misses {gone}"):
        check_contents(wheel_of(checkout, WHEEL - {gone}), checkout)
    with pytest.raises(WheelFailed, match=r"misses its entry_points\.txt"):
        check_contents(wheel_of(checkout, WHEEL - {"fleet_train-0.1.0.dist-info/entry_points.txt"}), checkout)


@pytest.mark.parametrize("added", ["tests/test_one.py", "fleet_train/deleted.py", "conftest.py"])
def test_wheel_with_tests_or_with_deleted_modules_is_refused(checkout: Path, added: str) -> None:
    with pytest.raises(WheelFailed, match=f"should not have {added}"):
        check_contents(wheel_of(checkout, WHEEL | {added}), checkout)


def test_this_checkout_has_all_kinds_of_files_and_no_tests() -> None:
    expected = expected_contents(ROOT)
    assert {"fleet_train/py.typed", "fleet_train/strategies/schema.json", "fleet_train/__main__.py"} <= expected
    assert "fleet_train/strategies/multi_node.yaml" in expected
    assert {Path(name).suffix for name in expected} == {".py", ".typed", ".yaml", ".json"}
    assert not [name for name in expected if "test_" in Path(name).name or name.startswith("tests/")]


def test_nothing_in_the_environment_leads_to_the_checkout_or_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "PADDLE_TRAINER_ID", "FLEET_TRAIN_ENGINE", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(ROOT))
    monkeypatch.setenv("LANG", "C.UTF-8")
    environ = outside_environment()
    assert environ["LANG"] == "C.UTF-8"
    assert not [name for name in environ if name.startswith(("PYTHON", "PADDLE_", "FLEET_TRAIN_", "VIRTUAL_ENV"))]


def test_commands_are_those_of_the_new_environment_and_name_no_file_of_the_checkout(tmp_path: Path) -> None:
    nodes = node_commands_of(tmp_path / "bin", Folders(tmp_path / "elsewhere" / "run"), 17000)
    each = [*first_commands(tmp_path / "bin"), *nodes]
    assert {Path(command[0]).parent for command in each} == {tmp_path / "bin"}
    assert not [word for command in each for word in command if str(ROOT) in word]
    assert [word for word in nodes[0] if word not in nodes[1]] == [
        "--node_ip=127.0.0.2",
        f"--log_dir={tmp_path}/elsewhere/run/log/node0",
    ]
    used = {next(word for word in command[1:] if word not in ("-m", "fleet_train")) for command in each}
    assert used == {"--version", "version", "profiles", "plan", "launch"}


def test_a_failing_command_is_named_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(WheelFailed, match=r"exit code 3: (?s:.*)broken"):
        run(tmp_path, sys.executable, "-c", "print('broken'); raise SystemExit(3)")
    with pytest.raises(WheelFailed, match=r"not finished after 0\.2 s"):
        run(tmp_path, sys.executable, "-c", "import time; time.sleep(60)", timeout_seconds=0.2)
