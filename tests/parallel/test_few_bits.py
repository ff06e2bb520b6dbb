"""Quantised gradients between 2 to 16 real ranks: bytes as planned, and the same bits on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.few_bits_ranks import ELEMENTS, STEPS
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, *(pytest.param(size, marks=pytest.mark.long) for size in (3, 5, 16))])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    script, folder = ROOT / "tests/parallel/few_bits_ranks.py", tmp_path_factory.mktemp("few_bits")
    result = run_ranks(script, request.param, folder=folder, nodes=request.param, timeout_seconds=280)
    cases: Ranks = result.of_all("cases")
    assert len(cases) == request.param
    return cases


@pytest.mark.parametrize("case", ["int8", "int4"])
def test_sockets_send_what_was_planned(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        assert rank[case]["sent"] == pytest.approx(rank[case]["planned"], rel=0.01)
        assert rank[case]["sent"] < STEPS * 2 * 4 * ELEMENTS / 3


@pytest.mark.parametrize("case", ["int8", "int4"])
def test_every_rank_gets_the_same_bits_and_little_is_owed_in_the_end(ranks: Ranks, case: str) -> None:
    assert len({rank[case]["bits"] for rank in ranks}) == 1
    # Of each member's values and of the owners' sums half a level may be owed; a block's largest value is below 6.
    levels = {"int8": 127, "int4": 7}[case]
    assert ranks[0][case]["worst"] < 2 * 6 / levels


@pytest.mark.long
@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_ranks_with_and_without_compiled_loops_get_the_same_bits(tmp_path: Path, compression: str) -> None:
    """Three ranks, so that each rounds for the others, too; rank 0 says that its own codec is the slower one."""
    script, slower = ROOT / "tests/parallel/few_bits_training.py", "numpy encodes int8 and int4"
    states = []
    for number, without in enumerate([(), (0,), (0, 1, 2)]):
        folder = tmp_path / str(number)
        environ = {rank: {"NUMBA_DISABLE_JIT": "1"} for rank in without}
        result = run_ranks(script, 3, folder=folder, nodes=3, args=[compression], env_of_rank=environ)
        assert [rank.output.count(slower) for rank in result.ranks] == [int(bool(without)), 0, 0]
        states += result.of_all("state")
    assert len(states) == 9
    assert len(set(states)) == 1
