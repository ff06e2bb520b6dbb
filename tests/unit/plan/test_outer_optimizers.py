"""LocalSGD by hand: after which local steps it averages, and its outer step, on numpy's arrays and Paddle's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.errors import ConversionError
from fleet_train.plan.build import LocalSgdSchedule
from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.methods.outer import OUTER_OPTIMIZERS, outer_optimizer_of


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


Full = Callable[[float], Any]


@pytest.fixture(
    params=[lambda value: np.full(3, value), lambda value: paddle.full([3], value)], ids=["numpy", "Paddle"]
)
def full(request: pytest.FixtureRequest) -> Full:
    made: Full = request.param
    return made


def steps(full: Full, kind: str, rate: float, number: int = 3, lr: float = 1.0, momentum: float = 0.0) -> list[float]:
    """From 8, with differences of 1, 2, 4, ..."""
    optimizer, anchor, velocity, found = outer_optimizer_of(kind), full(8.0), None, []
    for step in range(number):
        change, velocity = optimizer.step(full(2.0**step), velocity, rate, lr, momentum)
        anchor = anchor - change
        found.append(float(anchor[2]))
    return found


def test_slowmo_gives_momentum_to_the_difference_over_the_rate(full: Full) -> None:
    # u = 1, 2.5, 5.25 at a rate of 1; half of it is taken.
    for rate in (1.0, 0.25, 0.0):  # at one rate it does not matter which
        assert steps(full, "slowmo", rate, lr=0.5, momentum=0.5) == [7.5, 6.25, 3.625]


@pytest.mark.parametrize(
    ("rates", "velocities"),
    [((0.5, 0.25), [2.0, 5.0]), ((0.0, 0.5), [1.0, 2.5])],
    ids=["weighs what it remembers by the rate of now", "remembers the difference itself while the rate is zero"],
)
def test_slowmo_with_changing_rates(full: Full, rates: tuple[float, float], velocities: list[float]) -> None:
    anchor, velocity, found = full(8.0), None, []
    for rate in rates:
        change, velocity = outer_optimizer_of("slowmo").step(full(1.0), velocity, rate, 1.0, 0.5)
        anchor = anchor - change
        found.append(float(velocity[0]))
    assert (found, float(anchor[0])) == (velocities, 5.75)


def test_diloco_looks_ahead(full: Full) -> None:
    # u = 1, 2.5, 5.25; half of difference + u / 2 is taken: 0.75, 1.625, 3.3125.
    assert steps(full, "diloco", 0.25, lr=0.5, momentum=0.5) == [7.25, 5.625, 2.3125]


def test_the_choices_of_the_knob_are_the_list() -> None:
    assert KNOBS["outer_optimizer"].choices == tuple(OUTER_OPTIMIZERS)
    with pytest.raises(ConversionError, match="outer_optimizer: new has no formula"):
        outer_optimizer_of("new")


@pytest.mark.parametrize(
    ("kind", "knobs", "expected"),
    [
        ("constant", {"local_sgd_steps": 3}, [(3, 0), (6, 0), (9, 0)]),
        ("constant", {"local_sgd_steps": 4}, [(4, 0), (8, 0)]),
        ("doubling", {"local_sgd_steps": 5}, [(1, 0), (3, 0), (7, 0), (12, 0), (17, 0), (22, 0)]),
        (
            "constant",
            {"local_sgd_steps": 8, "local_sgd_fragments": 3},
            [(2, 0), (5, 1), (8, 2), (10, 0), (13, 1), (16, 2)],
        ),
    ],
)
def test_local_steps_that_end_in_an_averaging(
    kind: str, knobs: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    """With the fragment that is averaged; fragments are spread over a period, with the last one at its end."""
    made = schedule(kind, **knobs)
    assert [made.is_synchronous(step) for step in (1, 2, 3)] == [True, True, False]
    assert averagings(made, expected[-1][0]) == expected


def test_a_first_loss_of_nothing_does_not_divide_by_it() -> None:
    adaptive, periods = schedule("adaptive", local_sgd_steps=4, local_sgd_max_steps=10), []
    for loss in (0.0, 1.0):
        periods.append(adaptive.period)
        adaptive.adapt(0.1, loss)
    assert [*periods, adaptive.period] == [4, 1, 10]
