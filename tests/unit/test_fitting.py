"""Which saved tensors a program accepts, and the first one that makes it refuse."""

from __future__ import annotations

import pytest

from fleet_train.convert.program_state import fit
from fleet_train.errors import CheckpointError

WEIGHT = {"w": ("parameter", [3, 4], "float32")}
VELOCITY = {"w_velocity_0": ("optimizer", [3, 4], "float32")}
SUMS = {"w@gradient_merge": ("pass", [3, 4], "float32"), "gradient_merge_count_0": ("pass", [1], "int64")}


def test_equal_tensors_are_all_taken() -> None:
    assert fit(WEIGHT | VELOCITY, WEIGHT | VELOCITY, "here") == (["w", "w_velocity_0"], [])


@pytest.mark.parametrize(
    ("saved", "ours", "told"),
    [
        (WEIGHT, WEIGHT | VELOCITY, "here has no tensor 'w_velocity_0', which this program needs"),
        (WEIGHT | VELOCITY, VELOCITY, "here has a tensor 'w' that this program does not have"),
        (WEIGHT | VELOCITY | {"v": VELOCITY["w_velocity_0"]}, WEIGHT | VELOCITY, "here has a tensor 'v' that this"),
        (
            WEIGHT,
            {"w": ("parameter", [4, 3], "float32")},
            r"'w' is \[3, 4\] float32, this program needs \[4, 3\] float",
        ),
        (
            WEIGHT,
            {"w": ("parameter", [3, 4], "float64")},
            r"'w' is \[3, 4\] float32, this program needs \[3, 4\] float64",
        ),
        ({}, {"b": WEIGHT["w"], "a": WEIGHT["w"]}, "here has no tensor 'a'"),
    ],
)
def test_first_tensor_that_does_not_fit_is_named(saved: dict, ours: dict, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        fit(saved, ours, "here")


def test_program_without_an_optimizer_leaves_its_state_aside() -> None:
    assert fit(WEIGHT | VELOCITY | SUMS, WEIGHT, "here") == (["w"], [])


def test_what_a_pass_keeps_may_be_on_one_side_only() -> None:
    trained = WEIGHT | VELOCITY
    names = ["w", "w_velocity_0"]
    missing = "here has no 'gradient_merge_count_0' and 1 more, which keep their start values"
    assert fit(trained, trained | SUMS, "here") == (names, [missing])
    unused = "here has 'gradient_merge_count_0' and 1 more, which this profile does not use"
    assert fit(trained | SUMS, trained, "here") == (names, [unused])
