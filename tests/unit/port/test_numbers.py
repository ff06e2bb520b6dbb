"""A ported line computes what it computed in Paddle 1.8.5, whose numbers are in numbers_1_8.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train.port import port
from tests.support.processes import ROOT, clean_environ, python
from tests.unit.port import fluid_numbers

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "numbers_1_8.json").read_text())
# Paddle 1.8 gave a scalar one dimension, today it has none.
SCALARS = ([], [1])
NO_NUMBERS = {*fluid_numbers.RANDOM, *fluid_numbers.NAMED}


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same figures from the ported snippets, all in one process."""
    folder = tmp_path_factory.mktemp("numbers")
    ported = port(fluid_numbers.module().encode(), "numbers.py")
    assert ported.marks == ()
    (folder / "script.py").write_bytes(ported.new)
    script = python(str(HERE / "run_ported.py"), str(folder / "script.py"), str(folder / "numbers.json"))
    done = subprocess.run(
        script,
        cwd=folder,
        env=clean_environ({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    return found


def test_every_snippet_is_recorded() -> None:
    assert list(RECORDED) == sorted(name for name, _ in fluid_numbers.cases())


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in NO_NUMBERS])
def test_ported_snippet_gives_the_numbers_of_1_8(name: str, today: dict[str, Any]) -> None:
    now = today[name]
    assert not isinstance(now, str), now
    assert len(now) == len(RECORDED[name])
    for (shape, values), (old_shape, old_values) in zip(now, RECORDED[name], strict=True):
        assert shape == old_shape or (shape in SCALARS and old_shape in SCALARS)
        np.testing.assert_allclose(values, old_values, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", fluid_numbers.NAMED)
def test_parameters_have_the_names_of_1_8(name: str, today: dict[str, Any]) -> None:
    assert today[name] == RECORDED[name]


@pytest.mark.parametrize("name", fluid_numbers.RANDOM)
def test_ported_start_values_spread_as_in_1_8(name: str, today: dict[str, Any]) -> None:
    now = today[name]
    assert not isinstance(now, str), now
    for (spread, largest), (old_spread, old_largest) in zip(now, RECORDED[name], strict=True):
        assert spread == pytest.approx(old_spread, rel=0.08, abs=1e-7)
        assert largest == pytest.approx(old_largest, rel=0.25)
