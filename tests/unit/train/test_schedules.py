"""Learning-rate factors by step, as literal numbers."""

from __future__ import annotations

import pytest

from fleet_train.train.settings import SCHEDULES, Schedule


def factors(shape: str, steps: int, warmup: int = 0) -> list[float]:
    schedule = Schedule(shape, steps, warmup)
    return [round(schedule(step), 4) for step in range(steps + 1)]


def test_constant_stays() -> None:
    assert factors("constant", 4) == [1.0, 1.0, 1.0, 1.0, 1.0]


def test_cosine_goes_to_zero() -> None:
    assert factors("cosine", 4) == [1.0, 0.8536, 0.5, 0.1464, 0.0]


def test_linear_goes_to_zero() -> None:
    assert factors("linear", 4) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_step_drops_at_half_and_at_three_quarters() -> None:
    assert factors("step", 8) == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01]


def test_warm_up_rises_and_the_shape_spans_the_rest() -> None:
    assert factors("linear", 7, warmup=3) == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_milestones_are_steps_and_not_moved_by_the_warm_up() -> None:
    schedule = Schedule("step", 10, warmup_steps=2, milestones=(4, 7), decay=0.5)
    assert [round(schedule(step), 4) for step in range(10)] == [0.3333, 0.6667, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_polynomial_takes_its_power() -> None:
    assert [Schedule("polynomial", 4)(step) for step in range(5)] == [1.0, 0.5625, 0.25, 0.0625, 0.0]
    assert [Schedule("polynomial", 4, power=1.0)(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("shape", SCHEDULES)
def test_steps_after_the_end_keep_the_last_factor(shape: str) -> None:
    assert Schedule(shape, 4)(100) == Schedule(shape, 4)(4)
