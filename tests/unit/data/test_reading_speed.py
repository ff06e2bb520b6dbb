"""What `doctor --data` finds of an image folder, and how it measures the speed of a loader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet_train import timeouts
from fleet_train.data import ImageFolder, ImageSettings, image_splits, measure
from fleet_train.data.images import CorruptImages
from fleet_train.data.measure import ReadingSpeed, Situation, advice, describe, disk_speed, examine, loader_speed
from tests.support.images import write_image, write_image_folder


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DATA_WINDOW_SECONDS", 0.05)
    monkeypatch.setattr(timeouts, "DATA_LOADER_SECONDS", 0.5)


@pytest.mark.usefixtures("brief")
def test_pipes_and_broken_images_are_counted_and_named(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path)
    os.mkfifo(root / "train" / "class0" / "pipe.jpg")
    data, unreadable, disk, speed = examine(str(root), 1.0, 16, 1)
    assert (data.level, data.threshold) == ("PASS", "can be read")
    assert data.measured.startswith(f"{root}: 13 images in 2 classes, from 6 (class1) to 7 (class0); ")
    assert (unreadable.level, unreadable.threshold) == ("FAIL", "0 of 13, as training allows")
    assert unreadable.measured == "1 of 13 images looked at: train/class0/pipe.jpg"
    assert (disk.level, speed.level) == ("PASS", "PASS")
    assert disk.measured.endswith("13 files read")


def test_what_is_no_image_folder_is_one_finding(tmp_path: Path) -> None:
    (found,) = examine(str(tmp_path / "nowhere"), 0.0, 16, 1)
    assert (found.id, found.level) == ("data", "FAIL")
    assert "does not exist on this machine" in found.measured


def test_folder_is_described_by_counts_and_medians(tmp_path: Path) -> None:
    for name, size in (("a/1", 100), ("a/2", 120), ("b/1", 300)):
        write_image(tmp_path / "train" / f"{name}.png", size, 50)
    write_image(tmp_path / "val/a/1.png")
    (tmp_path / "train/a/3.jpg").write_bytes(b"broken")
    train, _ = image_splits(tmp_path, ImageSettings(image_size=8))
    assert isinstance(train, ImageFolder)
    words, shorter_side = describe(train)
    assert words.startswith("4 images in 2 classes, from 1 (b) to 3 (a); 120 x 50 pixels, ")
    assert shorter_side == 50
    assert disk_speed(train, 2, 60.0).num_samples == 4


class Timed:
    """Batches of 10, which take these seconds each; the last ones go on without end."""

    def __init__(self, *seconds: float, per_epoch: int = 3) -> None:
        self.now, self._seconds, self._per_epoch = 0.0, list(seconds), per_epoch

    def perf_counter(self) -> float:
        return self.now

    @contextmanager
    def epoch(self, _: int) -> Iterator[Iterator[dict[str, Any]]]:
        yield (self._batch() for _ in range(self._per_epoch))

    def _batch(self) -> dict[str, Any]:
        self.now += self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        return {"labels": range(10)}


def test_a_loader_is_measured_once_it_is_steady_however_long_its_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_start = Timed(5.0, *[1.0] * 3, 0.1)
    monkeypatch.setattr(measure, "time", slow_start)
    assert loader_speed(slow_start, 2.0, 100.0).samples_per_second == pytest.approx(100.0)  # type: ignore[arg-type]
    # The first batch's 5 s and the next 3 s of slow ones, then a window of each speed and two that agree.
    assert slow_start.now < 5 + 3 + 3 * 2.2
    restless = Timed(*[1.0, 1.0, 0.1, 0.1] * 30)
    monkeypatch.setattr(measure, "time", restless)
    assert loader_speed(restless, 1.0, 10.0).num_samples > 10  # type: ignore[arg-type]
    assert restless.now < 13


SLOW = Situation(wanted=1000, measured=200, workers=2, cores=16, image_size=224, shorter_side=300)


@pytest.mark.parametrize(
    ("measured", "level", "words"),
    [
        (200.0, "FAIL", "200 images/s by 2 worker(s), 224 pixels wide; training would wait 80% of its time"),
        (950.0, "WARN", "950 images/s by 2 worker(s), 224 pixels wide; training would wait 5% of its time"),
        (1050.0, "WARN", "1050 images/s by 2 worker(s), 224 pixels wide, 1.1 times that"),
        (2000.0, "PASS", "2000 images/s by 2 worker(s), 224 pixels wide, 2.0 times that"),
    ],
)
def test_a_speed_is_judged_by_what_training_needs(measured: float, level: str, words: str) -> None:
    found = measure.of_speed(replace(SLOW, measured=measured))
    assert (found.level, found.measured, found.threshold) == (level, words, "training needs 1000/s")


def test_a_need_that_is_unknown_is_said_to_be() -> None:
    found = measure.of_speed(replace(SLOW, wanted=0.0))
    assert (found.level, found.threshold) == ("PASS", "")
    assert "; whether that is enough is unknown: give --needs, as the progress line of training" in found.measured


def test_a_disk_is_suspicious_if_it_is_slower_than_training() -> None:
    disk = ReadingSpeed(400.0, 40e6, 1200)
    assert measure.of_disk(disk, replace(SLOW, wanted=300.0)).level == "PASS"
    found = measure.of_disk(disk, SLOW)
    assert found.level == "WARN"
    assert found.measured == "400 files/s, 40 MB/s past the page cache, 1200 files read"


def test_as_many_unreadable_images_as_training_replaces_are_suspicious_only() -> None:
    corrupt = CorruptImages(5000, 1.0, "")
    corrupt.replacement(0, "a.jpg", "broken")
    assert [measure.of_unreadable(corrupt, number, 700).level for number in (5000, 500)] == ["WARN", "FAIL"]


def test_advice_names_the_workers_that_are_needed_if_any() -> None:
    assert advice(SLOW)[0] == "--workers 10: 2 did 200 images/s and this machine has 16 cores"
    assert advice(replace(SLOW, cores=8))[0].endswith(" 8 cores, which would make about 800: not enough by itself")
    assert "--workers" not in " ".join(advice(replace(SLOW, cores=2)))


def test_advice_tells_large_files() -> None:
    tips = advice(replace(SLOW, shorter_side=1200))
    assert tips[1].startswith("resize the files once to a shorter side of 256 pixels (now 1200)")
    assert not any("resize" in tip for tip in advice(SLOW))
