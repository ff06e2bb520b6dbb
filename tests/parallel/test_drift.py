"""The divergence sentinel. Where collectives end late, the ranks compare a step later, and before they save."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_train.errors import ScheduleMismatch
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

SCRIPT = ROOT / "tests/parallel/drift.py"


@pytest.mark.parametrize(
    ("every", "before", "told_at"),
    [pytest.param(2, 3, 5, id="in a run"), pytest.param(1, 5, 6, id="before a save", marks=pytest.mark.long)],
)
def test_parameter_changed_on_one_rank_stops_the_job_and_is_named(
    tmp_path: Path, late_streams: bool, every: int, before: int, told_at: int
) -> None:
    args = [str(every), str(before)]
    result = run_ranks(SCRIPT, 3, folder=tmp_path, nodes=3, args=args, check=False, late_streams=late_streams)
    assert result.exit_codes == [ScheduleMismatch.exit_code] * 3, result.report()
    for rank in result.ranks:
        told = [line for line in rank.output.splitlines() if line.startswith("fleet_train: ScheduleMismatch")][-1]
        assert f"diverged at step {told_at}: 'fc_1.w_0' of rank 2 (127.0.0.4:" in told
    assert not (tmp_path / "saved").exists()


@pytest.mark.long
def test_sentinel_can_be_switched_off(tmp_path: Path) -> None:
    result = run_ranks(SCRIPT, 3, folder=tmp_path, nodes=3, args=["0", "3"])
    assert result.of_all("trained") == [True] * 3


def test_local_sgd_does_not_begin_from_unequal_parameters(tmp_path: Path, late_streams: bool) -> None:
    script = ROOT / "tests/parallel/unequal_start.py"
    result = run_ranks(script, 2, folder=tmp_path, nodes=2, check=False, late_streams=late_streams)
    assert result.exit_codes == [ScheduleMismatch.exit_code] * 2, result.report()
    assert not result.values
    assert "replicas have diverged at the start: 'linear_0.w_0' differs between rank 0" in result.report()
