"""What the model must find: the old code on NCCL, and the new engine without one of its rules."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.streams.controls import CONTROLS, DEADLOCK, Control, outcome
from tests.streams.quick import replay_quickly, schedule_of
from tests.streams.words import wait_cycle

NAMES = [control.name for control in CONTROLS]


def named(name: str) -> Control:
    return CONTROLS[NAMES.index(name)]


@pytest.mark.parametrize("name", NAMES)
def test_the_model_finds(name: str) -> None:
    control = named(name)
    found = outcome(control, interleavings=60, seed=8)
    assert found.what == control.expected
    if control.expected == DEADLOCK:
        assert found.found.example is not None
        words = wait_cycle(found.found.example)
        assert len(words) > 2
        assert {"rank 0", "rank 1", "rank 2"}.intersection(word for one in words for word in _ranks(one))


def _ranks(sentence: str) -> list[str]:
    words = sentence.replace("'s", "").replace(",", "").split()
    return [f"rank {after}" for word, after in pairwise(words) if word == "rank"]


@pytest.mark.parametrize(
    "name", ["streams, two communicators in flight", "streams, hierarchy with statistics, no rule for groups"]
)
def test_the_quick_replay_finds_it_too(name: str) -> None:
    control = named(name)
    found = replay_quickly(schedule_of(control.traces(4)), 60, np.random.default_rng(8), control.one_resident)
    assert found.deadlocks > 30
    assert found.example is not None
    assert any("which is running" in one for one in wait_cycle(found.example))


def test_the_wait_cycle_of_the_old_code_is_described() -> None:
    """Each rank's calculation stream waits for another bucket: their threads won the race in different orders."""
    found = outcome(named("old code, two communicators"), interleavings=60, seed=8).found.example
    assert found is not None
    words = wait_cycle(found)
    waits = [one for one in words if "calculation stream waits for" in one]
    assert len({one.partition("'s ")[0] for one in waits}) == 2
    assert all("bucket" in one for one in waits)


def test_reads_alone_form_a_wait_cycle() -> None:
    found = outcome(named("reads alone, DGC on the communicators' threads"), interleavings=60, seed=8).found.example
    assert found is not None
    words = " ".join(wait_cycle(found))
    assert "waits for its device (__bool__)" in words
    assert "calculation stream waits" not in words
