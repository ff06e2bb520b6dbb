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
    found: dict[str, Any] = run_ported(fluid_numbers.module(), folder, str(HERE / "run_ported.py"))
    return found


@pytest.fixture(scope="module")
def two_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What the ported script records, for each of its recipes."""
    text = (HERE / "fluid_two_programs.py").read_text()
    found: dict[str, list[float]] = run_ported(text, tmp_path_factory.mktemp("two_programs"))
    return found


def run_ported(text: str, folder: Path, *runner: str) -> Any:
    """The JSON that a script writes once it is ported, which leaves nothing to do by hand; ``runner`` runs it."""
    ported = port(text.encode(), "script.py")
    assert ported.marks == ()
    (folder / "script.py").write_bytes(ported.new)
    done = subprocess.run(
        python(*runner, "script.py", "numbers.json"),
        cwd=folder,
        env=clean_environ({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "numbers.json").read_text())


# Of fluid_two_programs.py: three figures after each of five steps, then sums of parameters.
TWO_PROGRAMS = [
    *(19.5733719, 1.3715005, -0.144581, 2.4725106, 2.7216637, -0.4325058, 4.2223501, 2.1994722, -0.9508662),
    *(0.5759767, 1.4517274, -1.1589659, 6.2621284, 0.5837148, -2.3125319),
    *(15.0764217, -0.2561814, -0.0868514, -0.0510598, 1.01129),
]


@pytest.mark.parametrize("recipe", ["built twice below unique_name.guard", "cloned", "cloned behind minimize"])
def test_a_ported_script_tests_what_it_trains_as_in_1_8(recipe: str, two_programs: dict[str, list[float]]) -> None:
    np.testing.assert_allclose(two_programs[recipe], TWO_PROGRAMS, rtol=2e-5, atol=5e-6)


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
