"""Measurements become tags, pictures and lines: literal numbers in, literal tags and words out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from fleet_train.profile import Profile, load_profile
from fleet_train.train.evaluation import MOST, Mistake, worst
from fleet_train.train.metrics import check_tags
from fleet_train.train.progress import BarProgress, LineProgress
from fleet_train.train.reporter import (
    Speed,
    StepMeter,
    StragglerWatch,
    chosen_settings,
    confusion_picture,
    mistakes_picture,
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


def test_one_process_has_no_communication_and_many_ranks_have_two_curves_together() -> None:
    found = speed_scalars(SPEED, communication(exposed_ms=0.0, rank_step_ms=[0.0], rank_wait_ms=[0.0]))
    assert sorted(tag.split("/")[0] for tag in found) == ["speed"] * 6
    assert (found["speed/data_ms"], found["speed/compute_ms"]) == (20.0, 180.0)
    assert rank_scalars([0.0, 0.0], [0.0, 0.0]) == {}, "without a barrier"
    found = rank_scalars([100.0] * 16 + [300.0], [0.0] * 17)
    assert found == {"ranks/median_step_ms": 100.0, "ranks/slowest_step_ms": 300.0}


def test_profile_text_makes_the_profile_again_and_settings_are_those_that_are_not_defaults() -> None:
    profile = load_profile("multi_node")
    assert Profile(**yaml.safe_load(profile_text(profile, {}))).digest() == profile.digest()
    chosen = chosen_settings("nccl_comm_num: 2, fuse_grad_size_in_MB: 0.5")
    settled = Profile(**yaml.safe_load(profile_text(Profile(), chosen)))
    assert (settled.nccl_comm_num, settled.fuse_grad_size_in_MB) == (2, 0.5)
    assert chosen_settings("") == {}
    settings = [profile_settings(each) for each in (Profile(), Profile(name="mine", nccl_comm_num=3))]
    assert settings == [{"profile": "default"}, {"profile": "mine", "nccl_comm_num": 3}]
    check_tags(settings[1])


def test_confusion_is_blue_on_the_diagonal_and_red_beside_it() -> None:
    picture = confusion_picture(np.array([[90, 10, 0], [0, 0, 100], [0, 0, 0]], dtype=np.int64))
    cells = picture[61 : 640 : 640 // 3, 61 : 640 : 640 // 3].astype(int)
    assert np.sign(cells[..., 2] - cells[..., 0]).tolist() == [[1, -1, 0], [0, 0, -1], [0, 0, 0]]


def test_speed_counts_micro_batches_and_the_share_of_waiting() -> None:
    now = 0.0

    def slow_source() -> Iterator[int]:
        nonlocal now
        for batch in range(2):
            now += 1.0  # one second of reading
            yield batch

    meter = StepMeter(clock=lambda: now)
    assert meter.read().samples_per_second == 0.0
    for _ in meter.timed(slow_source()):
        now += 3.0  # three seconds of computing
        meter.count(samples=8)
    assert meter.read() == (2 * 8 / 8.0, 4000.0, 0.25)
    meter.restart()
    now += 2.0
    meter.count(10)
    assert meter.read() == (5.0, 2000.0, 0.0)
    merged = StepMeter(lambda: now, batches_per_step=2)
    for _ in range(4):
        now += 0.5
        merged.count(samples=8)
    assert merged.read() == (4 * 8 / 2.0, 1000.0, 0.0)


ENDPOINTS = ("10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.2:6171")
SLOW = [100.0, 104.0, 98.0, 180.0]
WAITS = [80.0, 76.0, 82.0, 0.0]
EVEN = [100.0, 104.0, 98.0, 101.0]


def watch(factor: float = 1.5, intervals: int = 3, deals: bool = False) -> StragglerWatch:
    return StragglerWatch(ENDPOINTS, factor, intervals, seconds=0, deals=deals)


def test_it_is_named_with_its_share_of_the_waiting_once_per_change() -> None:
    watching = watch()
    assert {watching.check(step, WAITS) for step in (SLOW, EVEN, SLOW, SLOW, EVEN)} == {None}, "not often enough"
    said = [watching.check(step, WAITS) for step in [SLOW] * 5 + [EVEN] * 4]
    assert [number for number, each in enumerate(said) if each is not None] == [2, 7]
    assert said[2] == (
        "rank 3 (10.0.0.2:6171) takes 1.8x the median step of the others; they waited 44 % of their time for it; it "
        "never kept up: a slower machine; batch_shares: auto would give it fewer samples"
    )
    assert said[7] == "rank 3 (10.0.0.2:6171) keeps up with the others again"


@pytest.mark.parametrize(
    ("before", "deals", "cause"),
    [
        ([EVEN], False, "it never kept up: a slower machine; batch_shares: auto would give it fewer samples"),
        ([], True, "it never kept up: a slower machine; its share falls with the next epoch"),
        ([EVEN] * 3, False, "it kept up with them before: look there for load, heat or a fault"),
        (
            [EVEN] * 3,
            True,
            "it kept up with them before: look there for load, heat or a fault, if it lasts its share falls with the "
            "next epoch",
        ),
    ],
)
def test_a_slower_machine_and_one_that_has_become_slow_are_told_apart(before: Any, deals: bool, cause: str) -> None:
    watching = watch(deals=deals)
    said = [watching.check(step, WAITS) for step in [*before, *[SLOW] * 3]]
    assert str(said[-1]).endswith(f"for it; {cause}")


def test_another_straggler_is_named_in_turn_and_of_two_the_slower() -> None:
    watching = watch(intervals=1)
    assert "rank 3" in str(watching.check(SLOW, WAITS))
    assert "rank 0 (10.0.0.1:6170) takes 3.0x" in str(watching.check([300.0, 100.0, 100.0, 100.0], [0.0, 9, 9, 9]))
    assert "takes 2.0x" in str(watch(intervals=1).check([50.0, 100.0], [50.0, 0.0]))


@pytest.mark.parametrize(
    ("factor", "steps", "waits"),
    [(2.0, SLOW, WAITS), (0.0, SLOW, WAITS), (1.5, [100.0], [0.0]), (1.5, [100.0, 0.0], [0.0, 0.0])],
)
def test_below_the_factor_and_of_ranks_that_told_nothing_nothing_is_said(
    factor: float, steps: list[float], waits: list[float]
) -> None:
    assert watch(factor, intervals=1).check(steps, waits) is None


def batch(labels: list[int]) -> dict[str, np.ndarray]:
    images = np.arange(len(labels), dtype=np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 1, 4, 4), np.float32)
    return {"features": images, "labels": np.array(labels, np.int64)}


def test_only_wrong_images_are_kept_the_most_confident_first_and_24_at_most() -> None:
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]], np.float32)
    first = worst([], batch([0, 1, 1, 1]), probabilities)
    assert [(m.true_class, m.predicted_class, round(m.confidence, 2), m.image[0, 0, 0]) for m in first] == [
        (1, 0, 0.7, 3.0),
        (1, 0, 0.6, 1.0),
    ]
    both = worst(first, batch([1]), np.array([[0.65, 0.35]], np.float32))
    assert [round(mistake.confidence, 2) for mistake in both] == [0.7, 0.65, 0.6]
    wrong = np.tile(np.array([[1.0, 0.0]], np.float32), (100, 1))
    assert len(worst([], batch([1] * 100), wrong)) == MOST == 24
    no_image = {"features": np.zeros((1, 8), np.float32), "labels": np.array([1])}
    assert worst([], no_image, wrong[:1]) == []


def test_picture_has_a_tile_for_each_mistake() -> None:
    gray = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    colour = np.stack([np.ones((8, 8)), np.zeros((8, 8)), np.zeros((8, 8))]).astype(np.float32)
    picture = mistakes_picture([Mistake(gray, 3, 8, 0.9)] * 6 + [Mistake(colour, 1, 2, 0.5)])
    assert picture.shape == (2 * 150, 6 * 128, 3)
    # Opposite corners of the first tile, the second row, no tile.
    pixels = [picture[place].tolist() for place in ((10, 10), (118, 118), (160, 20), (200, 300))]
    assert pixels == [[0] * 3, [255] * 3, [255, 0, 0], [255] * 3]


def test_long_epoch_has_a_line_per_interval_with_the_last_fetched_loss(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = LineProgress(interval_seconds=10.0, clock=lambda: now)
    progress.begin(1, 4, steps=40, done=10)
    for loss in (0.75, None, None, None):
        now += 4.0
        progress.step(loss, samples=64)
    # 27 of this epoch's steps and 80 of the next two are left, 4 s each; 64 samples in 4 s.
    expected = "epoch 2/4  step 13/40  loss 0.7500  16 samples/s, 0:07:08 left\n"
    assert capsys.readouterr().out == expected


def test_a_bar_leaves_the_epochs_line_and_what_is_said_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = BarProgress()
    bar.begin(0, 1, steps=2, done=0)
    bar.step(1.0, 8)
    bar.say("curve \x1b]0;bar\x07")
    bar.step(None, 8)
    bar.end("train loss 1.0")
    LineProgress().say("resumed from \x1b[2Jrun\u202e")
    assert capsys.readouterr().out.splitlines() == [
        "curve \\x1b]0;bar\\x07",
        "epoch 1/1  train loss 1.0",
        "resumed from \\x1b[2Jrun\\u202e",
    ]
