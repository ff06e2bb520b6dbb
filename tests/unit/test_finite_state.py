"""Searching for NaN in one pass over saved tensors."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_train.convert.program_state import State, is_finite, what_is_not_finite

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
    assert is_finite(np.array(values, "float32")) is expected
    bits = np.array(values, "float32").view(np.uint32) >> 16
    assert is_finite(bits.astype(np.uint16)) is expected, "bfloat16's bits"


def test_integers_are_finite() -> None:
    assert is_finite(np.array([2**62, 2**62]))


KINDS = {"w": "parameter", "mask": "parameter", "w_moment2_0": "optimizer", "best": "optimizer", "w@average": "pass"}


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("w", [np.nan, np.inf, 1.0], r"'w' is NaN in 1 and infinite in 1 of 3 elements"),
        ("w", [-np.inf], r"'w' is infinite in 1 of 1 elements"),
        ("w@average", [np.inf], r"'w@average' is infinite in 1 of 1 elements"),
        ("fleet_train/dgc/w.velocity", [np.nan], r"'fleet_train/dgc/w.velocity' is NaN in 1 of 1 elements"),
        ("mask", [np.nan, -np.inf], r"'mask' is NaN in 1 and infinite in 1 of 2 elements"),
        (
            "w_moment2_0",
            [np.inf, 0.0],
            "'w_moment2_0' is infinite in 1 of 2 elements; this is state of the optimizer: where it is infinite, the "
            "weights never change again, or become infinite themselves (a gradient was too large)",
        ),
        # Healthy: what a script has made for itself, a mask, an update that may be skipped, no loss so far.
        ("mask", [0.0, -np.inf], None),
        ("best", [np.inf], None),
        ("w@gradient_merge", [np.nan], None),
        ("fleet_train/local_sgd/numbers", [4.0, 0.0, 0.1, np.nan], None),
    ],
)
def test_what_is_not_finite_is_named_unless_it_may_be(name: str, values: list[float], said: str | None) -> None:
    found = np.array(values, "float32")
    good = {"w": np.ones(3, "float32"), "step": np.array([3])}
    assert what_is_not_finite(State({**good, name: found}, KINDS), {"mask"}) == said
    own = [{"own": np.zeros(1, "float32")}, {"own": np.ones(1, "float32"), name: found}]
    expected = None if said is None else f"rank 1's {said}"
    assert what_is_not_finite(State(good, KINDS, own), {"mask"}) == expected
