"""After which local steps LocalSGD averages: hand-computed periods."""

from __future__ import annotations

import math

import pytest

from fleet_train.plan.build import LocalSgdSchedule
from fleet_train.profile import Profile


def schedule(kind: str = "constant", **knobs: object) -> LocalSgdSchedule:
    knobs = {"use_local_sgd": True, "local_sgd_schedule": kind, "local_sgd_is_warm_steps": 2, **knobs}
    return LocalSgdSchedule.of(Profile(**knobs))  # type: ignore[arg-type]


def averagings(made: LocalSgdSchedule, steps: int) -> list[tuple[int, int]]:
    """(local step from 1, fragment) of each averaging."""
    found = []
    for step in range(1, steps + 1):
        fragment = made.count()
        if fragment is not None:
            found.append((step, fragment))
            made.begin_period()
    return found


def test_steps_up_to_the_last_of_the_warm_up_are_synchronous() -> None:
    assert [schedule().is_synchronous(step) for step in (1, 2, 3)] == [True, True, False]


def test_a_constant_period() -> None:
    assert averagings(schedule(local_sgd_steps=3), 10) == [(3, 0), (6, 0), (9, 0)]
    assert averagings(schedule(local_sgd_steps=1), 3) == [(1, 0), (2, 0), (3, 0)]


def test_a_period_that_doubles_up_to_the_asked_steps() -> None:
    assert averagings(schedule("doubling", local_sgd_steps=5), 22) == [
        (1, 0),
        (3, 0),
        (7, 0),
        (12, 0),
        (17, 0),
        (22, 0),
    ]


def test_fragments_are_spread_over_a_period_with_the_last_one_at_its_end() -> None:
    spread = averagings(schedule(local_sgd_steps=8, local_sgd_fragments=3), 16)
    assert spread == [(2, 0), (5, 1), (8, 2), (10, 0), (13, 1), (16, 2)]


def test_the_first_adaptive_period_is_the_asked_one() -> None:
    adaptive = schedule("adaptive", local_sgd_steps=4)
    assert adaptive.period == 4
    adaptive.adapt(0.1, 2.0)
    assert adaptive.period == 4


@pytest.mark.parametrize(
    ("rate", "loss", "period"),
    [
        (0.1, 2.0, 4),
        (0.1, 8.0, 8),  # the root of 4 times the loss
        (0.025, 2.0, 8),  # and of a quarter of the rate
        (0.1, 1.9, 4),  # 3.9 steps, rounded up
        (0.1, 0.125, 1),
        (0.1, 0.0, 1),
        (0.1, -5.0, 1),
        (0.1, 200.0, 10),  # 40 steps, of which 10 are allowed
        (1e-9, 2.0, 10),
    ],
)
def test_an_adaptive_period_follows_loss_and_rate_within_its_bounds(rate: float, loss: float, period: int) -> None:
    adaptive = schedule("adaptive", local_sgd_steps=4, local_sgd_max_steps=10)
    adaptive.adapt(0.1, 2.0)
    adaptive.adapt(rate, loss)
    assert adaptive.period == period


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_a_loss_or_rate_without_a_meaning_keeps_the_period(rate: float, loss: float) -> None:
    adaptive = schedule("adaptive", local_sgd_steps=4)
    adaptive.adapt(0.1, 2.0)
    adaptive.adapt(0.1, 8.0)
    adaptive.adapt(rate, loss)
    assert adaptive.period == 8
    adaptive.adapt(0.0, 2.0)
    assert adaptive.period == 8
    adaptive.adapt(0.1, 2.0)
    assert adaptive.period == 4


def test_a_first_loss_of_nothing_does_not_divide_by_it() -> None:
    adaptive = schedule("adaptive", local_sgd_steps=4, local_sgd_max_steps=10)
    adaptive.adapt(0.1, 0.0)
    assert adaptive.period == 1
    adaptive.adapt(0.1, 1.0)
    assert adaptive.period == 10


def test_a_schedule_resumes_from_its_numbers() -> None:
    one, other = schedule("adaptive", local_sgd_steps=4), schedule("adaptive", local_sgd_steps=4)
    one.adapt(0.1, 2.0)
    one.adapt(0.1, 8.0)
    assert averagings(one, 3) == []
    assert one.numbers() == [8.0, 3.0, 0.1, 2.0]
    other.restore(one.numbers())
    assert averagings(other, 5) == [(5, 0)]
    other.adapt(0.1, 4.5)
    assert other.period == 6
