"""The outer step of LocalSGD: hand-computed values, on numpy's arrays as in the simulator and on Paddle's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.errors import ConversionError
from fleet_train.profile import KNOBS
from fleet_train.profile.methods.outer import OUTER_OPTIMIZERS, outer_optimizer_of

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


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_plain_averaging_takes_the_difference(full: Full, rate: float) -> None:
    assert steps(full, "none", rate) == [7.0, 5.0, 1.0]


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
