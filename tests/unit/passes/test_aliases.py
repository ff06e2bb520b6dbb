"""Assignments to a part of a value: right in one way of writing, refused in the others. The rest is trained in
``tests/parallel/test_gradients.py``."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleet_train.convert.passes.aliases import settle_assignments
from fleet_train.errors import ConversionError
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, relative_difference

ROWS = 4


def sgd() -> Any:
    return paddle.optimizer.SGD(1.0)


def settled(optimizer: Any, loss: Any) -> None:
    settle_assignments(loss)
    optimizer.minimize(loss)


def with_last_rows(change: Any) -> Any:
    def network(features: Any) -> Any:
        return change(paddle.tanh(nn.Linear(FEATURES, CLASSES)(features)))

    return network


def assigned(hidden: Any) -> Any:
    return paddle.static.setitem(hidden, 0, hidden[1] * 0.5)


def assigned_a_number(hidden: Any) -> Any:
    return paddle.static.setitem(hidden, 0, 0.5)


def read_by_the_old_name(hidden: Any) -> Any:
    hidden[0] = hidden[1]
    return hidden


def masked(hidden: Any) -> Any:
    mask = paddle.zeros([1, CLASSES])
    mask[0, 1:] = 1.0
    return hidden * mask


def test_what_an_assignment_overwrites_is_there_for_gradients() -> None:
    written = Trained(sgd, settled, with_last_rows(assigned))
    joined = Trained(sgd, network=with_last_rows(lambda h: paddle.concat([h[1:2] * 0.5, h[1:]], 0)))
    joined.start_from(written.state())
    (batch,) = batches(1, ROWS, 3)
    assert written.step(batch) == pytest.approx(joined.step(batch))
    assert relative_difference(written.parameters(), joined.parameters()) < 1e-5


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (assigned_a_number, r"gives what is overwritten a gradient .*setitem\(x, index, paddle\.full"),
        (read_by_the_old_name, r"test_aliases\.py, line \d+ \(hidden\[0\] = hidden\[1\]\): .* reads x by its old name"),
    ],
)
def test_an_assignment_with_a_wrong_gradient_is_refused_with_its_line(network: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        Trained(sgd, settled, with_last_rows(network))


def test_an_assignment_to_what_needs_no_gradient_is_left_alone() -> None:
    plain, same = Trained(sgd, network=with_last_rows(masked)), Trained(sgd, settled, with_last_rows(masked))
    assert same.operators() == plain.operators()
