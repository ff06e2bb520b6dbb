"""Every strategy that a profile can name, through the facade, on two and three ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import pytest

from tests.parallel.strategies import CASES
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]
# Largest relative difference of a parameter from one process with the joint batch, in float32 and uncompressed.
EXACT = 1e-5
TOLERANCES = {
    "int8": 3e-2,
    "int8, merge, two communicators": 3e-2,
    "bf16": 3e-2,
    "hierarchical, bf16": 3e-2,
    "amp O1": 1e-1,
    "amp O2, merge": 2e-1,
}
# Strategies that take another path than synchronous training on purpose.
OTHER_PATHS = (
    "int4",
    "int4, stochastic",
    "hierarchical, int4",
    "powersgd",
    "dgc",
    "dgc, ramp",
    "hierarchical, powersgd",
    "amp O1, local_sgd",
    "merge, local_sgd",
)
# The ranks talk within their passes, where the simulator does not look.
NOT_SIMULATED = ("sync batch norm",)
# Where 16 bits are rounded, the last bit of a float32 decides now and then to which side.
ROUNDED = 1e-3

HIERARCHICAL = [case for case in CASES if case.startswith("hierarchical")]
FLAT = [case for case in CASES if case not in HIERARCHICAL]
Run = Callable[[int, int], Ranks]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the ranks found, by number of ranks and of nodes; each is run once."""

    @cache
    def run(world_size: int, nodes: int) -> Ranks:
        chosen = FLAT if nodes == world_size else HIERARCHICAL
        script, folder = ROOT / "tests/parallel/strategies.py", tmp_path_factory.mktemp("strategies")
        result = run_ranks(
            script, world_size, folder=folder, nodes=nodes, args=[json.dumps(chosen)], timeout_seconds=230
        )
        cases: Ranks = result.of_all("cases")
        assert all(list(rank) == chosen for rank in cases)
        return cases

    return run


def each(*left_out: str, only: Collection[str] = CASES) -> pytest.MarkDecorator:
    """Two and three nodes of one rank; two nodes of two for the hierarchical ones."""
    flat, hierarchical = (
        [case for case in cases if case in only and case not in left_out] for cases in (FLAT, HIERARCHICAL)
    )
    return pytest.mark.parametrize(
        ("world_size", "nodes", "case"),
        [
            *((2, 2, case) for case in flat),
            *(pytest.param(3, 3, case, marks=pytest.mark.long) for case in flat),
            *((4, 2, case) for case in hierarchical),
        ],
    )


@each()
def test_replicas_start_equal_and_end_bit_equal(ranks_of: Run, world_size: int, nodes: int, case: str) -> None:
    ranks = ranks_of(world_size, nodes)
    assert len({rank[case]["start"] for rank in ranks}) == 1
    assert len({rank[case]["parameters"] for rank in ranks}) == 1
    assert ranks[0][case]["moved"] > 1e-3


@each(*NOT_SIMULATED)
def test_parameters_follow_the_simulation_step_by_step(ranks_of: Run, world_size: int, nodes: int, case: str) -> None:
    tolerance = ROUNDED if any(rounded in case for rounded in ("bf16", "amp", "int")) else EXACT
    for rank in ranks_of(world_size, nodes):
        assert rank[case]["from_reference"] < tolerance


@each(*OTHER_PATHS)
def test_parameters_are_those_of_one_process_with_the_joint_batch(
    ranks_of: Run, world_size: int, nodes: int, case: str
) -> None:
    for rank in ranks_of(world_size, nodes):
        assert rank[case]["difference"] < TOLERANCES.get(case, EXACT)


@each(only=[*TOLERANCES, *OTHER_PATHS])
def test_strategy_changes_what_is_computed(ranks_of: Run, world_size: int, nodes: int, case: str) -> None:
    assert ranks_of(world_size, nodes)[0][case]["difference"] > 1e-5, "the setting had no effect"


def test_merged_gradients_are_sent_once_per_update(ranks_of: Run) -> None:
    sending = [step for step, calls in enumerate(ranks_of(2, 2)[0]["merge"]["sent"], 1) if calls]
    assert sending == [3, 6, 9, 12]


def test_micro_batches_of_local_steps_send_nothing(ranks_of: Run) -> None:
    # Updates end at 2, 4, 6 ..; two synchronous ones, then an averaging after every second.
    sending = [step for step, calls in enumerate(ranks_of(2, 2)[0]["merge, local_sgd"]["sent"], 1) if calls]
    assert sending == [2, 4, 8, 12]
