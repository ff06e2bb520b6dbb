"""What `make wheel` accepts, and where it leaves the checkout; building and installing one is `make wheel` itself."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tools.check_wheel import WheelFailed, check_contents, expected_contents, outside_environment

METADATA = {f"fleet_train-0.1.0.dist-info/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")}
PACKAGE = {"fleet_train/__init__.py", "fleet_train/py.typed", "fleet_train/cli/__init__.py"}
STRATEGIES = {"strategies/multi_node.yaml", "strategies/schema.json"}
WHEEL = PACKAGE | {f"fleet_train/{name}" for name in STRATEGIES} | METADATA


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (WHEEL, ""),
        (WHEEL - {"fleet_train/py.typed"}, "misses fleet_train/py.typed"),
        (WHEEL - {"fleet_train/strategies/schema.json"}, "misses fleet_train/strategies/schema.json"),
        (WHEEL - {"fleet_train-0.1.0.dist-info/entry_points.txt"}, r"misses its entry_points\.txt"),
        (WHEEL | {"tests/test_one.py"}, "should not have tests/test_one.py"),
        (WHEEL | {"fleet_train/deleted.py"}, "should not have fleet_train/deleted.py"),
    ],
)
def test_a_wheel_has_the_checkouts_files_and_no_others(tmp_path: Path, names: set[str], said: str) -> None:
    for name in (*PACKAGE, *STRATEGIES, "tests/test_one.py", "fleet_train/cli/__pycache__/one.cpython-311.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    wheel = tmp_path / "fleet_train-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in sorted(names):
            archive.writestr(name, "")
    with pytest.raises(WheelFailed, match=said) if said else contextlib.nullcontext():
        check_contents(wheel, tmp_path)
    assert {"fleet_train/__main__.py", "fleet_train/strategies/multi_node.yaml"} <= expected_contents(ROOT)


def test_nothing_in_the_environment_leads_to_the_checkout_or_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "PADDLE_TRAINER_ID", "FLEET_TRAIN_ENGINE", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(ROOT))
    found = outside_environment()
    assert not [name for name in found if name.startswith(("PYTHON", "PADDLE_", "FLEET_TRAIN_", "VIRTUAL_ENV"))]
