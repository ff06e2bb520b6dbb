"""The selftest's checks where calls are enqueued, as on GPUs: on a stream engine whose collectives end late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet_train.errors import WorkerFailed
from fleet_train.selftest.check_collectives import KINDS
from fleet_train.selftest.options import Options
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

pytestmark = pytest.mark.long

UNDER_STREAMS = ROOT / "tests/support/late.py"
SUBJECT = ROOT / "fleet_train/selftest/subject.py"


def run(folder: Path, job: str, options: Options, world_size: int, **more: Any) -> RanksResult:
    arguments = [str(SUBJECT), job, str(folder / "reports.jsonl"), json.dumps(options.to_json())]
    return run_ranks(UNDER_STREAMS, world_size, folder=folder, args=arguments, **more)


def test_collectives_and_overlap(tmp_path: Path) -> None:
    options = Options(("collectives", "overlap"), rounds=1)
    run(tmp_path, "together", options, 2)
    reports = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    results = [report["result"] for report in reports if "result" in report]
    assert len(results) == len(KINDS) + 1
    assert [one for one in results if one["status"] not in ("ok", "warn")] == []
    assert results[-1]["name"] == "overlap"


def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path) -> None:
    options = Options(("faults",))
    result = run(tmp_path, "skips a collective", options, 3, check=False, patience_after_failure_seconds=14)
    for rank in (0, 1):
        assert result.exit_codes[rank] == WorkerFailed.exit_code, result.report()
        said = [line for line in result.ranks[rank].output.splitlines() if line.startswith("fleet_train: Worker")]
        assert "rank 2 (127.0.0.2:" in said[-1], result.report()
