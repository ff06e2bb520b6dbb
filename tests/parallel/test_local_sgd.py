"""LocalSGD and its outer optimizers: real ranks against a simulation of all ranks, after every step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.parallel.local_sgd import CASES
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("local_sgd")
    result = run_ranks(
        ROOT / "tests/parallel/local_sgd.py", request.param, folder=folder, nodes=request.param, timeout_seconds=170
    )
    cases: Ranks = result.of_all("cases")
    return cases


@pytest.mark.parametrize("case", CASES)
def test_parameters_follow_the_simulation_step_by_step(ranks: Ranks, case: str) -> None:
    # bfloat16 keeps 8 bits of a difference; the simulation averages exactly.
    tolerance = 1e-2 if case == "bfloat16 differences" else 1e-5
    for rank in ranks:
        assert rank[case]["difference"] < tolerance


@pytest.mark.parametrize("case", CASES)
def test_replicas_are_bit_equal_exactly_at_synchronisation_points(ranks: Ranks, case: str) -> None:
    first = ranks[0][case]
    expected = [*range(1, first["warm"] + 1), *first["averagings"]]
    by_rank = zip(*(rank[case]["digests"] for rank in ranks), strict=True)
    equal = [step for step, digests in enumerate(by_rank, 1) if len(set(digests)) == 1]
    assert equal == expected


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_sent_in_local_steps(ranks: Ranks, case: str) -> None:
    first = ranks[0][case]
    sending = [step for step, calls in enumerate(first["collectives"], 1) if calls]
    assert sending == [*range(1, first["warm"] + 1), *first["averagings"]]


def test_doubling_periods_double(ranks: Ranks) -> None:
    assert ranks[0]["doubling"]["averagings"] == [4, 6, 10, 14]


def test_adaptive_periods_change(ranks: Ranks) -> None:
    averagings = ranks[0]["adaptive"]["averagings"]
    periods = [later - earlier for earlier, later in pairwise(averagings)]
    assert averagings[0] == 3 + 4
    assert any(period != 4 for period in periods)
