"""Every strategy learns the digits as well as synchronous training does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long  # five trainings

POINTS = 0.5


def test_accuracy_is_within_half_a_point_of_synchronous_training(tmp_path: Path) -> None:
    result = run_ranks(ROOT / "tests/parallel/convergence.py", 2, folder=tmp_path, nodes=2, timeout_seconds=170)
    first, second = result.of_all("right")
    assert first == second, "ranks hold other parameters after they were made equal"
    accuracy = {name: 100 * right / result.values[0]["of"] for name, right in first.items()}
    assert accuracy["synchronous"] > 96
    worse = {name: found for name, found in accuracy.items() if found < accuracy["synchronous"] - POINTS}
    assert not worse, f"of {accuracy}"
