"""Ranks whose collectives are enqueued, and one that does not take part: the others end in time and name it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from fleet_train.errors import ScheduleMismatch, WorkerFailed
from tests.parallel.stream_faults import TIMEOUT_SECONDS
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

SCRIPT = ROOT / "tests" / "parallel" / "stream_faults.py"
# From the start of the ranks on: importing Paddle, joining and three steps, on a busy machine.
_BEFORE_THE_FAULT = 200.0


def run(kind: str, tmp_path: Path, barrier_every_steps: int = 1) -> RanksResult:
    began = time.monotonic()
    # The one at fault may never end; the others have the timeout and 10 s.
    patience = TIMEOUT_SECONDS + 10.0
    args = [kind, str(barrier_every_steps)]
    result = run_ranks(SCRIPT, 3, folder=tmp_path, args=args, check=False, patience_after_failure_seconds=patience)
    assert time.monotonic() - began < _BEFORE_THE_FAULT + 2 * patience, result.report()
    return result


def last_words(result: RanksResult, rank: int) -> str:
    said = re.findall(r"^fleet_train: (?!barrier_every_steps).*$", result.ranks[rank].output, re.MULTILINE)
    assert len(said) == 1, result.report()
    return str(said[0])


@pytest.mark.long
def test_a_collective_that_never_ends_on_any_rank(tmp_path: Path) -> None:
    result = run("never ends", tmp_path)
    assert result.exit_codes == [WorkerFailed.exit_code] * 3, result.report()
    for rank in range(3):
        assert "LinkFailed: step 4, bucket 0 (fc_" in last_words(result, rank), result.report()
        assert f"no collective has ended for {TIMEOUT_SECONDS} s" in last_words(result, rank)
        assert "all ranks are alive, so look at the network between them" in last_words(result, rank)


def test_a_rank_that_is_killed_in_a_collective_is_named(tmp_path: Path) -> None:
    result = run("killed in a collective", tmp_path)
    assert result.exit_codes == [WorkerFailed.exit_code, -9, WorkerFailed.exit_code], result.report()
    for rank in (0, 2):
        assert re.search(r"WorkerFailed: step 4, bucket 0 .*rank 1 \(\S+\) was lost", last_words(result, rank))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["stopped in a collective", "stopped"])
def test_a_rank_that_is_stopped_is_named(kind: str, tmp_path: Path) -> None:
    result = run(kind, tmp_path)
    assert [result.exit_codes[rank] for rank in (0, 2)] == [WorkerFailed.exit_code] * 2, result.report()
    assert not result.ranks[0].killed
    assert not result.ranks[2].killed
    for rank in (0, 2):
        assert re.search(r"WorkerFailed: step 4.*: rank 1 \(\S+\) did not arrive within", last_words(result, rank))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("stopped", "did not arrive within"),
        ("killed", "was lost"),
        ("leaves", "finished and left the job while others still wait for it"),
    ],
)
def test_a_rank_that_is_missing_between_two_barriers_is_named_by_the_watchdog(
    kind: str, told: str, tmp_path: Path
) -> None:
    result = run(kind, tmp_path, barrier_every_steps=50)
    assert [result.exit_codes[rank] for rank in (0, 2)] == [WorkerFailed.exit_code] * 2, result.report()
    for rank in (0, 2):
        said = last_words(result, rank)
        assert re.search(rf"WorkerFailed: step 4, bucket 0 .*: rank 1 \(\S+\) {told}", said), result.report()
        assert "(the collective ended with: no collective has ended for" in said


@pytest.mark.long
def test_a_rank_that_skips_a_collective_is_named_with_its_place(tmp_path: Path) -> None:
    result = run("skips", tmp_path)
    codes = [WorkerFailed.exit_code, ScheduleMismatch.exit_code, WorkerFailed.exit_code]
    assert result.exit_codes == codes, result.report()
    for rank in (0, 2):
        said = last_words(result, rank)
        assert "step 4, bucket 0 (fc_" in said
        assert re.search(r"rank 1 \(\S+\) at 'step 5'", said), said
