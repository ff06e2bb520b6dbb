"""The outer step of LocalSGD: hand-computed values."""

from __future__ import annotations

import paddle
import pytest

from fleet_train.collectives.fragments import OuterOptimizer
from fleet_train.profile import Profile


def steps(kind: str, rate: float, number: int = 3, **knobs: float) -> list[float]:
    """From 8, with differences of 1, 2, 4, ...; the values go on in the memory of the anchor."""
    outer = OuterOptimizer(Profile(use_local_sgd=True, outer_optimizer=kind, **knobs))  # type: ignore[arg-type]
    anchor, found = [paddle.full([3], 8.0)], []
    for step in range(number):
        anchor = outer.step(anchor, [paddle.full([3], 2.0**step)], rate)
        found.append(float(anchor[0][2]))
    return found


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_plain_averaging_takes_the_difference(rate: float) -> None:
    assert steps("none", rate) == [7.0, 5.0, 1.0]


def test_slowmo_gives_momentum_to_the_difference_over_the_rate() -> None:
    # u = 1, 2.5, 5.25 at a rate of 1; half of it is taken.
    assert steps("slowmo", 1.0, outer_lr=0.5, outer_momentum=0.5) == [7.5, 6.25, 3.625]
    # At one rate it does not matter which.
    assert steps("slowmo", 0.25, outer_lr=0.5, outer_momentum=0.5) == [7.5, 6.25, 3.625]
    assert steps("slowmo", 0.0, outer_lr=0.5, outer_momentum=0.5) == [7.5, 6.25, 3.625]


def test_slowmo_weighs_what_it_remembers_by_the_rate_of_now() -> None:
    outer = OuterOptimizer(Profile(use_local_sgd=True, outer_optimizer="slowmo", outer_lr=1.0, outer_momentum=0.5))
    anchor = outer.step([paddle.full([1], 8.0)], [paddle.full([1], 1.0)], 0.5)
    assert (anchor[0].item(), outer.velocity[0].item()) == (7.0, 2.0)  # type: ignore[index]
    anchor = outer.step(anchor, [paddle.full([1], 1.0)], 0.25)
    assert (anchor[0].item(), outer.velocity[0].item()) == (5.75, 5.0)  # type: ignore[index]


def test_slowmo_remembers_the_difference_itself_while_the_rate_is_zero() -> None:
    outer = OuterOptimizer(Profile(use_local_sgd=True, outer_optimizer="slowmo", outer_lr=1.0, outer_momentum=0.5))
    anchor = outer.step([paddle.full([1], 8.0)], [paddle.full([1], 1.0)], 0.0)
    assert (anchor[0].item(), outer.velocity[0].item()) == (7.0, 1.0)  # type: ignore[index]
    anchor = outer.step(anchor, [paddle.full([1], 1.0)], 0.5)
    assert (anchor[0].item(), outer.velocity[0].item()) == (5.75, 2.5)  # type: ignore[index]


def test_diloco_looks_ahead() -> None:
    # u = 1, 2.5, 5.25; half of difference + u / 2 is taken: 0.75, 1.625, 3.3125.
    assert steps("diloco", 0.25, outer_lr=0.5, outer_momentum=0.5) == [7.25, 5.625, 2.3125]
