"""Ranks that differ in what must be equal get the first difference, with both ranks, before any step."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

TOLD = {
    "dtype": "'fc_1.b_0' [8] float32 in bucket 0 (allreduce, communicator 0) here, 'fc_1.b_0' [8] float64",
    "knob outside the plan": "divergence_check_steps is 100 here, 50 there",
    "variable": "environment.NCCL_DEBUG has another value there (values are not shown)",
    "variable on one rank": "environment.NCCL_DEBUG has no value here (values are not shown)",
    "optimizer's state": "2 parameters, 0 statistics and 1 values of the optimizer's state per parameter, "
    "every 2 steps here, 2 parameters, 0 statistics and 2 values",
    "batch norm": "exchanges of synchronised batch norm: 2 of 132 bytes here, 0 of 0 bytes there",
    "steps per epoch": "steps per epoch: rank 0 (127.0.0.2:",
}


def test_every_difference_is_named_on_every_rank(tmp_path: Path) -> None:
    result = run_ranks(ROOT / "tests/parallel/mismatches.py", 3, folder=tmp_path, nodes=3)
    told = result.of_all("told")
    assert all(rank == told[0] for rank in told)
    for case, message in told[0].items():
        assert TOLD.get(case, "") in message
        assert bool(message) == (case in TOLD), f"{case}: {message}"
        assert not message or "rank 1 (127.0.0.3:" in message
        assert "secret" not in message
    assert "has 100, rank 1" in told[0]["steps per epoch"]
    assert "(ranks that also differ: 2)" in told[0]["steps per epoch"]
