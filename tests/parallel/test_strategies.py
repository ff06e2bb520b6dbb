"""Every strategy that a profile can name, through the facade, on two, three and four ranks.

All are compared with the simulator of all ranks, after every step. Those that only send otherwise what synchronous
training computes are also compared with one process that has the joint batch; the others take another path on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from tests.parallel.strategies import CASES
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

# Largest relative difference of a value; in exact strategies only the order of float32 sums differs.
EXACT = 1e-5
# Where values are rounded, the last bit of a float32 decides now and then to which side.
ROUNDED = 1e-3
ROUNDING = {"compression": ("bf16", "int8", "int4"), "local_sgd_dtype": ("bfloat16", "int8", "int4")}
LOSSY = ("bf16", "int8", "int4", "powersgd", "amp")

HIERARCHICAL = [name for name in CASES if name.startswith("hierarchical")]
FLAT = [name for name in CASES if name not in (*HIERARCHICAL, "local groups of two")]
# What combines others of the cases is left to the long launches.
COMBINING = ("two dtypes", "two communicators", "without", "threads", "shortcut", "batch norm, ", "warm-up and")
SINGLE = [name for name in FLAT if "passes" in name or not any(word in name for word in COMBINING)]
# Of these the number of ranks decides what is sent, or in which order it is added.
ON_THREE = ("fused", "merge", "int8", "int4", "powersgd", "diloco", "local sgd, overlap", "streaming diloco")
# Ranks, nodes, the cases of one launch; the last two are long.
LAUNCHES = (
    (2, 2, SINGLE),
    (4, 2, [name for name in HIERARCHICAL if not CASES[name].is_local]),
    (3, 3, [name for name in FLAT if name not in SINGLE or name in ON_THREE]),
    (4, 2, [name for name in HIERARCHICAL if CASES[name].is_local]),
)
Ranks = list[dict[str, Any]]
Found = Callable[[int, str], Ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found for a case of a launch; each launch is made once."""

    @cache
    def launch(number: int) -> Ranks:
        cases: Ranks = run(tmp_path_factory, *LAUNCHES[number]).of_all("cases")
        return cases

    return lambda number, name: [rank[name] for rank in launch(number)]


def run(factory: pytest.TempPathFactory, world_size: int, nodes: int, names: list[str]) -> RanksResult:
    script, folder = ROOT / "tests/parallel/strategies.py", factory.mktemp("strategies")
    return run_ranks(script, world_size, folder=folder, nodes=nodes, args=[json.dumps(names)], timeout_seconds=600)


EACH = pytest.mark.parametrize(
    ("launch", "name"),
    [
        pytest.param(number, name, marks=pytest.mark.long if number > 1 else (), id=f"{world_size}-{name}")
        for number, (world_size, _, chosen) in enumerate(LAUNCHES)
        for name in chosen
    ],
)


@EACH
def test_parameters_follow_the_simulation_step_by_step_and_one_process_with_the_joint_batch(
    found: Found, launch: int, name: str
) -> None:
    case, ranks = CASES[name], found(launch, name)
    assert len({rank["start"] for rank in ranks}) == 1
    assert ranks[0]["moved"] > 1e-3
    settings = case.settings
    is_rounded = any(settings.get(knob) in values for knob, values in ROUNDING.items()) or "amp_level" in settings
    for rank in ranks:
        assert not case.is_simulated or rank["from simulation"] < (ROUNDED if is_rounded else EXACT)
        if not case.is_local and any(word in name for word in LOSSY):
            assert rank["from one process"] > EXACT, "the setting had no effect"
        elif not case.is_local:
            assert rank["from one process"] < EXACT


@EACH
def test_replicas_are_bit_equal_and_send_exactly_at_synchronisation_points(
    found: Found, launch: int, name: str
) -> None:
    case, ranks = CASES[name], found(launch, name)
    size, averagings = case.settings.get("accumulate_steps", 1), ranks[0]["averagings"]
    steps = range(1, case.steps + 1)
    warm = case.settings["local_sgd_is_warm_steps"] if case.is_local else case.steps
    overlap = size * case.settings.get("local_sgd_overlap_steps", 0)
    # With an overlap each rank keeps its own progress beside every averaging, with fragments that of the other ones.
    never = overlap or case.settings.get("local_sgd_fragments", 1) > 1
    met = set() if never else {step // size for step in averagings}
    by_rank = zip(*(rank["digests"] for rank in ranks), strict=True)
    equal = [step for step, digests in enumerate(by_rank, 1) if len(set(digests)) == 1]
    assert equal == [step for step in steps if step // size <= warm or step // size in met]
    sending = [step for step, calls in enumerate(ranks[0]["sent"], 1) if calls]
    synchronous = [step for step in steps if step % size == 0 and step // size <= warm]
    if case.settings.get("sync_batch_norm"):
        assert sending == list(steps)
    elif not overlap:
        assert sending == [*synchronous, *averagings]
    else:
        # The averaging runs on a thread of its own, in one of the steps up to the one that takes it in.
        beside = {step + later for step in averagings for later in range(overlap + 1)}
        assert sending[: len(synchronous)] == synchronous
        assert set() < set(sending[len(synchronous) :]) <= beside


def test_periods_double_or_adapt(found: Found) -> None:
    assert found(0, "local sgd, doubling")[0]["averagings"] == [4, 6, 10, 14]
    averagings = found(0, "local sgd, adaptive")[0]["averagings"]
    assert averagings[0] == 3 + 4
    assert any(later - earlier != 4 for earlier, later in pairwise(averagings))


@pytest.mark.long
def test_local_groups_inside_of_one_machine_train_as_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank in run(tmp_path_factory, 4, 1, ["local groups of two"]).of_all("cases"):
        assert rank["local groups of two"]["from one process"] < EXACT


@pytest.mark.long
def test_more_ranks_than_gather_sum_the_statistics_alike(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sums of batch norms travel by allgather among few ranks, by allreduce among more."""
    for rank in run(tmp_path_factory, 5, 5, ["sync batch norm, shortcut"]).of_all("cases"):
        assert rank["sync batch norm, shortcut"]["from one process"] < EXACT


@pytest.mark.long
def test_three_local_groups_send_few_bits_as_simulated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Three leaders exchange parts before they gather the sums; the others wait for as many stages."""
    name = "hierarchical, int4"
    ranks = run(tmp_path_factory, 6, 3, [name]).of_all("cases")
    assert len({rank[name]["digests"][-1] for rank in ranks}) == 1
    assert max(rank[name]["from simulation"] for rank in ranks) < ROUNDED
