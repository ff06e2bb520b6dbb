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

from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.methods import COMPRESSIONS
from tests.parallel.streams import CASES, Case
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]
Found = Callable[[str], Ranks]

HIERARCHICAL = [name for name in CASES if "hierarchical" in name or "local groups" in name]
FLAT = [name for name in CASES if name not in HIERARCHICAL]
# Ranks, nodes, and the cases of one launch: so few that a launch takes seconds.
LAUNCHES = [(2, 2, FLAT[part::6]) for part in range(6)] + [(4, 2, HIERARCHICAL[part::2]) for part in range(2)]

# Values of knobs that have no case, and why.
FLOAT16 = "Paddle has no float16 on a CPU: Gloo's sums are inf, and there is no matmul"
ONLY_ON_GPUS = {"compression": "fp16", "amp_dtype": "float16"}
WITHOUT_A_CASE: dict[str, str] = {
    **dict.fromkeys([name for name in KNOBS if name.startswith("amp_") and name != "amp_level"], FLOAT16),
    **dict.fromkeys(["recompute_every_blocks", "recompute_checkpoints"], "another way to cut what segments cut"),
    **dict.fromkeys(["name", "description", "measured", "environment"], "nothing in a step depends on it"),
    "quantised_rounding": "a device draws other random numbers than a CPU",
    **dict.fromkeys(["fetch_frequency", "num_iteration_per_drop_scope"], "a matter of the script's loop"),
    **dict.fromkeys(
        ["link_gigabits", "link_latency_ms", "compression_declines"],
        "what they choose is a case: buckets, communicators, compressions",
    ),
    "collective_timeout_seconds": "tests/parallel/faults.py",
}


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
            timeout_seconds=170,
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


def test_every_case_is_launched_once() -> None:
    assert sorted(name for _, _, chosen in LAUNCHES for name in chosen) == sorted(CASES)


def test_every_compression_is_a_case_or_has_no_way_on_a_cpu() -> None:
    assert tried("compression") | {ONLY_ON_GPUS["compression"]} == COMPRESSIONS.keys()


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob in Profile.model_fields])
def test_every_knob_is_set_in_a_case_to_each_of_its_values(knob: str) -> None:
    """A new strategy needs a case here, or a reason in ``WITHOUT_A_CASE``."""
    changed = tried(knob) - {KNOBS[knob].default} if knob not in WITHOUT_A_CASE else set()
    assert bool(changed) != (knob in WITHOUT_A_CASE)
    if knob not in WITHOUT_A_CASE:
        assert set(KNOBS[knob].choices) <= tried(knob) | {ONLY_ON_GPUS.get(knob)}


def tried(knob: str) -> set[Any]:
    """The values that the cases have a knob at."""
    return {case.settings.get(knob, KNOBS[knob].default) for case in CASES.values()}
