"""LocalSGD and its outer optimizers: real ranks against a simulation of all ranks, after every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from fleet_train.profile import load_profile
from fleet_train.selftest.check_profiles import tolerance_of
from tests.parallel.local_sgd import CASES, PROFILES, SELFTEST_STEPS
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

Ranks = list[dict[str, Any]]
HIERARCHICAL = [case for case in CASES if case.startswith("hierarchical")]
FLAT = [case for case in CASES if case not in HIERARCHICAL]


@pytest.fixture(scope="module")
def result_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], RanksResult]:
    """What the ranks found, by number of ranks and of nodes; each is run once."""

    @cache
    def run(world_size: int, nodes: int) -> RanksResult:
        chosen = FLAT if nodes == world_size else HIERARCHICAL
        script, folder = ROOT / "tests/parallel/local_sgd.py", tmp_path_factory.mktemp("local_sgd")
        names = [*chosen, *(PROFILES if world_size == 2 else [])]
        result = run_ranks(
            script, world_size, folder=folder, nodes=nodes, args=[json.dumps(names)], timeout_seconds=600
        )
        assert all(list(rank) == chosen for rank in result.of_all("cases"))
        return result

    return run


@pytest.fixture(scope="module")
def ranks_of(result_of: Callable[[int, int], RanksResult]) -> Callable[[int, int], Ranks]:
    return lambda world_size, nodes: result_of(world_size, nodes).of_all("cases")


EACH_CASE = pytest.mark.parametrize(
    ("world_size", "nodes", "case"),
    [
        *((2, 2, case) for case in FLAT),
        *(pytest.param(3, 3, case, marks=pytest.mark.long) for case in FLAT),
        *(pytest.param(4, 2, case, marks=pytest.mark.long) for case in HIERARCHICAL),
    ],
)


@EACH_CASE
def test_parameters_follow_the_simulation_step_by_step(
    ranks_of: Callable[[int, int], Ranks], world_size: int, nodes: int, case: str
) -> None:
    # Where 16 bits are rounded, the last bit of a float32 decides now and then to which side.
    tolerance = 1e-3 if any(rounded in case for rounded in ("bf", "int", "streaming")) else 1e-5
    for rank in ranks_of(world_size, nodes):
        assert rank[case]["difference"] < tolerance
        assert rank[case]["synchronised"] < tolerance


@EACH_CASE
def test_replicas_are_bit_equal_exactly_at_synchronisation_points(
    ranks_of: Callable[[int, int], Ranks], world_size: int, nodes: int, case: str
) -> None:
    ranks = ranks_of(world_size, nodes)
    first = ranks[0][case]
    # With an overlap each rank keeps its own progress beside every averaging, with fragments that of the other ones.
    never = first["overlap"] or first["fragments"] > 1
    expected = [*range(1, first["warm"] + 1), *([] if never else first["averagings"])]
    by_rank = zip(*(rank[case]["digests"] for rank in ranks), strict=True)
    equal = [step for step, digests in enumerate(by_rank, 1) if len(set(digests)) == 1]
    assert equal == expected


@EACH_CASE
def test_nothing_is_sent_in_local_steps(
    ranks_of: Callable[[int, int], Ranks], world_size: int, nodes: int, case: str
) -> None:
    first = ranks_of(world_size, nodes)[0][case]
    sending = [step for step, calls in enumerate(first["collectives"], 1) if calls]
    if not first["overlap"]:
        assert sending == [*range(1, first["warm"] + 1), *first["averagings"]]
        return
    # The averaging runs on a thread of its own, in one of the steps up to the one that takes it in.
    beside = {step + later for step in first["averagings"] for later in range(first["overlap"] + 1)}
    assert sending[: first["warm"]] == [*range(1, first["warm"] + 1)]
    assert set(sending[first["warm"] :]) <= beside
    assert len(sending) > first["warm"]


def test_doubling_periods_double(ranks_of: Callable[[int, int], Ranks]) -> None:
    assert ranks_of(2, 2)[0]["doubling"]["averagings"] == [4, 6, 10, 14]


def test_adaptive_periods_change(ranks_of: Callable[[int, int], Ranks]) -> None:
    averagings = ranks_of(2, 2)[0]["adaptive"]["averagings"]
    periods = [later - earlier for earlier, later in pairwise(averagings)]
    assert averagings[0] == 3 + 4
    assert any(period != 4 for period in periods)


@pytest.mark.parametrize("name", PROFILES)
def test_the_selftest_can_end_after_any_number_of_steps(
    result_of: Callable[[int, int], RanksResult], name: str
) -> None:
    profile = load_profile(name)
    first, second = (rank[name] for rank in result_of(2, 2).of_all("profiles"))
    assert [end["steps"] for end in first["ends"]] == list(SELFTEST_STEPS)
    for ours, theirs in zip(first["ends"], second["ends"], strict=True):
        assert ours["difference"] < tolerance_of(profile, on_gpu=False) / 2, ours
        assert ours["digest"] == theirs["digest"], ours
    assert any(end["underway"] for end in first["ends"]) == bool(profile.local_sgd_overlap_steps)
    assert first["check"].startswith(f"ok    profile {name}: 50 steps"), first["check"]
