"""Measurements become tags: literal numbers in, literal tags out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from fleet_train.profile import Profile, load_profile
from fleet_train.train.metrics import check_tags
from fleet_train.train.reporter import (
    Speed,
    chosen_settings,
    confusion_picture,
    profile_settings,
    profile_text,
    rank_scalars,
    speed_scalars,
)

SPEED = Speed(samples_per_second=640.0, step_ms=200.0, data_wait_share=0.1)


def communication(**changed: Any) -> Any:
    """Two ranks; ours stood still for 50 ms of a step of 200 ms."""
    values = {
        "exposed_ms": 50.0,
        "gate_wait_ms": 30.0,
        "bytes_sent": 4e6,
        "local_sgd_period": 1,
        "rank_step_ms": [150.0, 190.0],
        "rank_wait_ms": [30.0, 1.0],
    }
    return SimpleNamespace(**values | changed)


def test_a_step_is_split_into_data_compute_and_exposed_communication() -> None:
    assert speed_scalars(SPEED, communication()) == {
        "speed/samples_per_second": 640.0,
        "speed/step_ms": 200.0,
        "speed/data_ms": 20.0,
        "speed/compute_ms": 130.0,
        "speed/exposed_communication_ms": 50.0,
        "speed/data_wait_share": 0.1,
        "speed/compute_share": 0.65,
        "speed/exposed_communication_share": 0.25,
        "communication/bytes_per_second": 2e7,
        "communication/gate_wait_ms": 30.0,
        "communication/local_sgd_period": 1.0,
        "ranks/median_step_ms": 170.0,
        "ranks/slowest_step_ms": 190.0,
        "ranks/step_ms/0": 150.0,
        "ranks/step_ms/1": 190.0,
        "ranks/wait_ms/0": 30.0,
        "ranks/wait_ms/1": 1.0,
    }


def test_one_process_has_no_communication() -> None:
    found = speed_scalars(SPEED, communication(exposed_ms=0.0, rank_step_ms=[0.0], rank_wait_ms=[0.0]))
    assert sorted(tag.split("/")[0] for tag in found) == ["speed"] * 6
    assert (found["speed/data_ms"], found["speed/compute_ms"]) == (20.0, 180.0)


def test_an_interval_without_a_barrier_says_nothing_of_the_ranks() -> None:
    assert rank_scalars([0.0, 0.0], [0.0, 0.0]) == {}


def test_many_ranks_have_two_curves_together() -> None:
    found = rank_scalars([100.0] * 16 + [300.0], [0.0] * 17)
    assert found == {"ranks/median_step_ms": 100.0, "ranks/slowest_step_ms": 300.0}


def test_profile_text_makes_the_profile_again() -> None:
    profile = load_profile("multi_node")
    assert Profile(**yaml.safe_load(profile_text(profile, {}))).digest() == profile.digest()
    chosen = chosen_settings("nccl_comm_num: 2, fuse_grad_size_in_MB: 0.5")
    settled = Profile(**yaml.safe_load(profile_text(Profile(), chosen)))
    assert (settled.nccl_comm_num, settled.fuse_grad_size_in_MB) == (2, 0.5)
    assert chosen_settings("") == {}


def test_settings_have_the_knobs_that_are_not_at_their_default() -> None:
    assert profile_settings(Profile()) == {"profile": "default"}
    settings = profile_settings(Profile(name="mine", nccl_comm_num=3))
    assert settings == {"profile": "mine", "nccl_comm_num": 3}
    check_tags(settings)


def test_confusion_is_blue_on_the_diagonal_and_red_beside_it() -> None:
    picture = confusion_picture(np.array([[90, 10, 0], [0, 0, 100], [0, 0, 0]], dtype=np.int64))
    cell, corner = 640 // 3, 56

    def colour(row: int, column: int) -> list[int]:
        return picture[corner + row * cell + 5, corner + column * cell + 5].tolist()

    red, green, blue = colour(0, 0)
    assert blue > green > red
    for row, column in ((0, 1), (1, 2)):
        red, green, blue = colour(row, column)
        assert red > green > blue
    assert colour(0, 2) == colour(2, 2) == [244, 244, 244]
    assert confusion_picture(np.eye(100, dtype=np.int64)).shape == (672, 672, 3)
