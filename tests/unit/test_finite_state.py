"""Searching for NaN in one pass over the parameters."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_train.convert.state.program_state import _is_finite

HUGE = float(np.finfo("float32").max)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([1.0, np.nan], False),
        ([np.inf, -np.inf], False),
        ([-np.inf, 0.0], False),
        ([HUGE, HUGE], True),  # the sum overflows
        ([], True),
    ],
)
def test_only_nan_and_infinity_are_not_finite(values: list[float], expected: bool) -> None:
    assert _is_finite(np.array(values, "float32")) is expected


def test_integers_are_finite() -> None:
    assert _is_finite(np.array([2**62, 2**62]))
