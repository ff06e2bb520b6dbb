"""Velocities between DGC, which keeps them per rank, and Momentum, which keeps one for all."""

from __future__ import annotations

import numpy as np

from fleet_train.convert.program_state import State, to_dgc, to_momentum

WEIGHT = np.ones((2, 3), "float32")
MOMENTUM = {"w": ("parameter", [2, 3], "float32"), "w_velocity_0": ("optimizer", [2, 3], "float32")}
SGD = {"w": MOMENTUM["w"]}


def test_momentum_starts_from_the_mean_of_what_dgc_has_on_the_ranks() -> None:
    ranks = [
        {"fleet_train/dgc/w.velocity": np.arange(6, dtype="float32")},
        {"fleet_train/dgc/w.velocity": np.zeros(6, "float32")},
    ]
    saved = State({"w": WEIGHT, "fleet_train/dgc/step": np.array([5])}, {"w": "parameter"}, ranks)
    found = to_momentum(saved, MOMENTUM)
    expected = np.array([[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]], "float32")
    np.testing.assert_array_equal(found.arrays["w_velocity_0"], expected, strict=True)
    assert found.kinds == {"w": "parameter", "w_velocity_0": "optimizer"}


def test_velocities_that_an_overflow_has_cleared_are_zero() -> None:
    saved = State({"w": WEIGHT, "fleet_train/dgc/step": np.array([5])}, {"w": "parameter"}, [])
    np.testing.assert_array_equal(to_momentum(saved, MOMENTUM).arrays["w_velocity_0"], np.zeros((2, 3), "float32"))


def test_state_of_another_optimizer_gets_no_velocities() -> None:
    saved = State({"w": WEIGHT}, {"w": "parameter"})
    assert to_momentum(saved, MOMENTUM) is saved


def test_dgc_starts_from_the_velocities_of_momentum() -> None:
    velocity = np.arange(6, dtype="float32").reshape(2, 3)
    saved = State({"w": WEIGHT, "w_velocity_0": velocity}, {"w": "parameter", "w_velocity_0": "optimizer"})
    found = to_dgc(saved, SGD)
    assert sorted(found.arrays) == ["fleet_train/dgc/w.velocity", "w"]
    np.testing.assert_array_equal(found.arrays["fleet_train/dgc/w.velocity"], velocity.reshape(-1), strict=True)
