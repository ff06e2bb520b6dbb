"""What launchers decide, replayed in virtual time: machines and networks that fail, several at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet_train import timeouts
from fleet_train.launch import election, job
from fleet_train.launch.attempts import Attempt
from fleet_train.launch.election import Standing, Status
from fleet_train.launch.events import Answered, Ask, Connected, Follow, Look, StoreSeen, Wait
from fleet_train.launch.job_state import JobState, Phase
from fleet_train.launch.request import FaultPolicy
from tests.unit.launch.replay import Broken, replay


def broken_of(seeds: range) -> list[str]:
    found: list[str] = []
    for seed in seeds:
        try:
            replay(seed)
        except Broken as error:
            found.append(str(error).splitlines()[0])
    return found


@pytest.mark.parametrize("number", [2000, pytest.param(20_000, marks=pytest.mark.long)])
def test_no_schedule_has_two_jobs_two_leaders_of_a_term_or_a_wait_without_end(number: int) -> None:
    assert broken_of(range(number)) == []


def test_schedules_are_full_of_faults_and_jobs_survive_them() -> None:
    words = "\n".join("\n".join(replay(seed).trace) for seed in range(300))
    for event in (
        "restart 3 of",
        "is the leader from now on",
        "joins at the next restart",
        "continuing with fewer nodes",
        "was unreachable for too long",
        "is not the larger one",
    ):
        assert event in words, event
    assert sum(bool(replay(seed).done) for seed in range(300)) > 80


def test_a_later_leader_that_cannot_be_reached_is_asked_again() -> None:
    attempt, policy = Attempt(0, 0, (0, 1)), FaultPolicy(max_restarts=1, min_nodes=1)
    state = JobState(0, 2, policy, 9.0, str, phase=Phase.DIVIDED, leader=0, term=0, attempt=attempt, here=(0,))
    later = Status(Standing.LEADING, 1, 1)
    state, actions = job.step(state, Answered(1.0, {1: later}))
    assert actions[-1] == Follow(1, 1, 1.0 + timeouts.FIND_LEADER_SECONDS)
    state, actions = job.step(state, Connected(2.0, connected=False))
    assert actions == [Look(here=1)]
    state, actions = job.step(state, StoreSeen(1000.0))
    assert actions == [Ask((1,))]


Planted = Callable[[pytest.MonkeyPatch], Any]


def any_side_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "may_go_on", lambda *_: True)


def silence_is_taken_for_death(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (election, job):
        monkeypatch.setattr(module, "silent", lambda *_: set())


def a_lost_leader_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Phase.FOLLOWING, StoreSeen
    real = job._STEPS[key]
    waits = lambda state, event: real(replace(state, bounded=False), replace(event, lost=False))  # noqa: E731
    monkeypatch.setitem(job._STEPS, key, waits)


def nobody_is_elected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(job._STEPS, (Phase.LOOKING, Answered), lambda state, _: (state, [Wait(1.0)]))


@pytest.mark.parametrize(
    ("plant", "told", "schedules"),
    [
        (any_side_goes_on, "run at the same time", 1000),
        (a_lost_leader_is_waited_for, "waits without end", 100),
        (nobody_is_elected, "waits without end", 100),
        (silence_is_taken_for_death, "run at the same time", 1000),
    ],
)
def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, plant: Planted, told: str, schedules: int) -> None:
    plant(monkeypatch)
    assert any(told in each for each in broken_of(range(schedules)))
