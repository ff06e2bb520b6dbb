"""No silent knob: every knob changes what real ranks send, compute, wait for, fetch, write or print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_train.profile import KNOBS
from tests.parallel.knob_effects_case import ByRank, Case
from tests.parallel.knob_effects_table import CASES
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Seen = dict[str, list[dict[str, Any]]]
NODES = 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By case, what each rank has seen: all cases of two ranks in one launch, all of four in another."""
    found: Seen = {}
    for ranks in (2, 4):
        names = [name for name, case in CASES.items() if case.ranks == ranks]
        script, folder = ROOT / "tests/parallel/knob_effects.py", tmp_path_factory.mktemp(f"ranks{ranks}")
        result = run_ranks(script, ranks, folder=folder, nodes=NODES, args=[json.dumps(names)], timeout_seconds=200)
        by_rank = result.of_all("seen")
        assert all(list(rank) == names for rank in by_rank)
        found |= {name: [rank[name] for rank in by_rank] for name in names}
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_knob_does_what_it_says(seen: Seen, name: str) -> None:
    case = CASES[name]
    for look, expected in case.sees.items():
        ranks = [rank["with"][look.__name__] for rank in seen[name]]
        assert ranks == (list(expected) if isinstance(expected, ByRank) else [expected] * case.ranks), look.__name__


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_default])
def test_without_the_knob_something_else_is_seen(seen: Seen, name: str) -> None:
    """Were the knob read by nobody, this run would be the same as the one with it."""
    assert [rank["without"] for rank in seen[name]] != [rank["with"] for rank in seen[name]]


def test_every_knob_has_a_case() -> None:
    assert sorted({case.knob for case in CASES.values() if not case.is_default}) == sorted(KNOBS)


@pytest.mark.parametrize("knob", [name for name, knob in KNOBS.items() if knob.choices])
def test_every_choice_has_a_case(knob: str) -> None:
    assert {case.value for case in CASES.values() if case.knob == knob} >= set(KNOBS[knob].choices) - {
        KNOBS[knob].default
    }


def test_mapped_settings_are_logged() -> None:
    mapped = [case for case in CASES.values() if KNOBS[case.knob].fate == "mapped" and not case.is_default]
    assert mapped
    assert all("said" in _looks(case) and len(case.sees) > 1 for case in mapped)


def _looks(case: Case) -> set[str]:
    return {look.__name__ for look in case.sees}
