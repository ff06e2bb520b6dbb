"""Saving in the middle of a period: rank 0's file speaks for all, and the resumed run goes on bit by bit."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks


def test_resumed_run_equals_the_one_that_went_on(tmp_path: Path) -> None:
    result = run_ranks(
        ROOT / "tests/parallel/resume_local_sgd.py", 2, folder=tmp_path, nodes=2, args=[str(tmp_path / "saved")]
    )
    ranks = result.of_all("cases")
    assert len(ranks[0]) == 7
    for name, first in ranks[0].items():
        assert first["at_save"] == ranks[1][name]["at_save"], f"{name}: ranks differ after a save"
        for rank in ranks:
            assert rank[name]["resumed"] == rank[name]["straight"], name
