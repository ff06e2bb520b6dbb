"""A job that several modules inspect. They must not change its results."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks


class Watched(NamedTuple):
    job: RanksResult
    folder: Path
    """Has the run in runs/slow."""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "slow"


@pytest.fixture(scope="session")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Two ranks on two nodes that have learnt the digits; rank 1 has a slow processor."""
    folder = tmp_path_factory.mktemp("slowed")
    script = ROOT / "tests" / "support" / "train_with_a_slow_rank.py"
    args = ["--model=mlp", "--data=digits", "--epochs=4", "--log_every=5", "--gradient_norm"]
    args.append(f"--output_dir={folder}/runs/slow")
    return Watched(run_ranks(script, 2, folder=folder / "job", nodes=2, args=args), folder)
