"""Every strategy that a profile can name, through the facade, on two and three ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.strategies import CASES
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]
# Largest relative difference of a parameter from one process with the joint batch, in float32 and uncompressed.
EXACT = 1e-5
TOLERANCES = {"bf16": 3e-2, "amp O1": 1e-1, "amp O2, merge": 2e-1}
# Strategies that take another path than synchronous training on purpose.
OTHER_PATHS = ("powersgd", "dgc", "amp O1, local_sgd", "merge, local_sgd")


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("strategies")
    result = run_ranks(
        ROOT / "tests/parallel/strategies.py", request.param, folder=folder, nodes=request.param, timeout_seconds=170
    )
    cases: Ranks = result.of_all("cases")
    return cases


@pytest.mark.parametrize("case", CASES)
def test_replicas_start_equal_and_end_bit_equal(ranks: Ranks, case: str) -> None:
    assert len({rank[case]["start"] for rank in ranks}) == 1
    assert len({rank[case]["parameters"] for rank in ranks}) == 1
    assert ranks[0][case]["moved"] > 1e-3


@pytest.mark.parametrize("case", [case for case in CASES if case not in OTHER_PATHS])
def test_parameters_are_those_of_one_process_with_the_joint_batch(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        assert rank[case]["difference"] < TOLERANCES.get(case, EXACT)


@pytest.mark.parametrize("case", [*TOLERANCES, *OTHER_PATHS])
def test_strategy_changes_what_is_computed(ranks: Ranks, case: str) -> None:
    assert ranks[0][case]["difference"] > 1e-5, "the setting had no effect"


def test_merged_gradients_are_sent_once_per_update(ranks: Ranks) -> None:
    sending = [step for step, calls in enumerate(ranks[0]["merge"]["sent"], 1) if calls]
    assert sending == [3, 6, 9, 12]


def test_micro_batches_of_local_steps_send_nothing(ranks: Ranks) -> None:
    # Updates end at 2, 4, 6 ..; two synchronous ones, then an averaging after every second.
    sending = [step for step, calls in enumerate(ranks[0]["merge, local_sgd"]["sent"], 1) if calls]
    assert sending == [2, 4, 8, 12]
