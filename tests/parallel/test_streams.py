"""Every strategy where collectives are enqueued and end late, as on GPUs: the bits of the thread engine.

The stream engine is the real one; its groups are Gloo's, whose buffers hold NaN until they are waited for
(``tests.support.late``). Whatever reads a value in a step raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.parallel.streams import CASES, Case
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]
Found = Callable[[str], Ranks]

HIERARCHICAL = [name for name in CASES if "hierarchical" in name or "local groups" in name]
FLAT = [name for name in CASES if name not in HIERARCHICAL]
SHORT = FLAT[::6]
# Ranks, nodes, and the cases of one launch; all but the first are long.
LAUNCHES = [(2, 2, SHORT), (2, 2, [name for name in FLAT if name not in SHORT]), (4, 2, HIERARCHICAL)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks found for a case; each launch is made once."""

    @cache
    def launch(number: int) -> Ranks:
        world_size, nodes, chosen = LAUNCHES[number]
        result = run_ranks(
            ROOT / "tests/parallel/streams.py",
            world_size,
            folder=tmp_path_factory.mktemp("streams"),
            nodes=nodes,
            args=[json.dumps(chosen)],
            timeout_seconds=400,
        )
        cases: Ranks = result.of_all("cases")
        return cases

    launch_of = {name: number for number, (_, _, chosen) in enumerate(LAUNCHES) for name in chosen}
    return lambda name: [rank[name] for rank in launch(launch_of[name])]


@pytest.mark.parametrize(
    "name",
    [
        name if number == 0 else pytest.param(name, marks=pytest.mark.long)
        for number, (_, _, chosen) in enumerate(LAUNCHES)
        for name in chosen
    ],
)
def test_late_streams_give_the_bits_of_the_threads(found: Found, name: str) -> None:
    for rank, seen in enumerate(found(name)):
        assert seen["differing"] == [], f"rank {rank}"
        assert seen["finite"], f"rank {rank} has read what had not ended"
        assert seen["moved"], f"rank {rank} was not trained"
        assert seen["begun"] > 0, f"rank {rank} has begun nothing on its streams"
        assert seen["early"] <= allowed_reads(CASES[name]), f"rank {rank} has waited for its device in a step"


def allowed_reads(case: Case) -> int:
    """Gradient merge reads the program's count up to the first update, and again where other state was loaded."""
    size: int = case.settings.get("accumulate_steps", 1)
    return 0 if size == 1 else size * (1 + case.loads)
