"""N ranks give what one process gives with the joint batch, and all ranks hold the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

RELATIVE_TOLERANCE = 1e-5
ALL_OPTIMIZERS = ["SGD", "Momentum", "Adam", "AdamW"]
ALL_PROFILES = ["unfused", "fused", "two communicators"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "nodes", "optimizers", "profiles"),
    [
        (2, 2, ALL_OPTIMIZERS, ["fused"]),
        pytest.param(2, 2, ["Momentum", "AdamW"], ["unfused", "two communicators"], marks=pytest.mark.long),
        pytest.param(3, 3, ["SGD", "AdamW"], ["fused"], marks=pytest.mark.long),
        pytest.param(3, 3, ["Adam"], ["unfused", "two communicators"], marks=pytest.mark.long),
        pytest.param(4, 2, ["AdamW"], ["hierarchical"], marks=pytest.mark.long),
        pytest.param(4, 1, ["Momentum"], ["local groups of two"], marks=pytest.mark.long),
        (2, 1, ["Momentum"], ["no overlap"]),
    ],
)
def test_parameters_after_20_steps(
    tmp_path: Path, world_size: int, nodes: int, optimizers: list[str], profiles: list[str]
) -> None:
    result = run_ranks(
        ROOT / "tests/parity/compare.py",
        world_size,
        folder=tmp_path,
        nodes=nodes,
        args=[json.dumps({"optimizers": optimizers, "profiles": profiles})],
        timeout_seconds=280,
    )
    ranks = result.of_all("cases")
    assert len(ranks[0]) == 5 * len(optimizers) * len(profiles)
    for case, first in ranks[0].items():
        assert first["moved"] > 1e-3, f"{case}: nothing was trained"
        assert first["difference"] < RELATIVE_TOLERANCE, case
        for other in ranks[1:]:
            assert other[case]["start"] == first["start"], f"{case}: ranks started from different values"
            assert other[case]["state"] == first["state"], f"{case}: replicas differ"


@pytest.mark.long
def test_settings_change_the_number_of_collectives(tmp_path: Path) -> None:
    result = run_ranks(
        ROOT / "tests/parity/compare.py",
        2,
        folder=tmp_path,
        nodes=2,
        args=[json.dumps({"optimizers": ["SGD"], "profiles": ALL_PROFILES})],
    )
    cases = result.values[0]["cases"]
    collectives = [cases[f"mlp, SGD, {profile}"]["collectives"] for profile in ALL_PROFILES]
    assert collectives == [6, 1, 3]
