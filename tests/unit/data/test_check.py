"""`python -m fleet_train check`: what it counts, measures and prints, and its exit codes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet_train.cli.check import command
from fleet_train.data import ImageFolder, ImageSettings, LoaderSettings, image_splits, load_splits, make_loader
from fleet_train.data.measure import Situation, advice, describe, loader_speed
from fleet_train.errors import DataError
from tests.support.images import write_image, write_image_folder


def check(*arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    result = CliRunner().invoke(command, [*arguments, "--seconds", "0.3"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_pipes_and_hostile_names_are_counted_and_named_and_too_many_are_an_error(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path)
    os.mkfifo(root / "train" / "class0" / "\x1b[2J.jpg")
    (root / "train" / "class1").rename(root / "train" / "\x9b31m")
    (root / "val" / "class1").rename(root / "val" / "\x9b31m")
    flags = ("--data", str(root), "--image_size", "16", "--workers", "0", "--all")
    code, shown = check(*flags, "--max_corrupt", "1")
    assert code == 0, shown
    assert "corrupt  1 of 13 images looked at: train/class0/\\x1b[2J.jpg\n" in shown
    assert "\\x9b31m" in shown
    assert not {"\x1b", "\x9b"} & set(shown)
    with pytest.raises(DataError, match=r"1 image\(s\) cannot be read, --max_corrupt 0.001 allows 0 of 13: .* Repair"):
        check(*flags)


def small(folder: Path) -> Sequence[str]:
    return ("--data", str(folder), "--image_size", "16", "--workers", "1", "--batch_size", "4")


def test_fast_enough_data_exits_with_zero_and_too_slow_data_with_one_and_what_to_change(tmp_path: Path) -> None:
    code, output = check(*small(write_image_folder(tmp_path)), "--samples_per_second", "1")
    assert code == 0
    assert f"data     {tmp_path}/train: 12 samples in 2 classes\n" in output
    assert f"         {tmp_path}/val: 4 samples, counted only\n" in output
    assert "classes  from 6 images (class0) to 6 (class0)\n" in output
    assert "12 files read" in output
    assert "corrupt  0 of 12 images looked at\n" in output
    assert "feeds    1 samples/s: yes, " in output
    code, output = check(*small(tmp_path), "--samples_per_second", "10000000")
    assert code == 1
    assert "feeds    1e+07 samples/s: no, 0%; training would wait 100% of its time\n" in output
    assert "  - reading the files alone reaches " in output
    assert "  - --loader dali decodes on the GPU" in output


def test_data_in_memory_is_measured_too() -> None:
    code, output = check("--data", "synthetic:3x8x8x10x64", "--samples_per_second", "1")
    assert code == 0
    assert "data     synthetic:3x8x8x10x64/train: 64 samples in 10 classes\n" in output
    assert "\nloader   " in output


def test_folder_is_described_by_counts_and_medians(tmp_path: Path) -> None:
    for name, size in (("a/1", 100), ("a/2", 120), ("b/1", 300)):
        write_image(tmp_path / "train" / f"{name}.png", size, 50)
    write_image(tmp_path / "val/a/1.png")
    (tmp_path / "train/a/3.jpg").write_bytes(b"broken")
    train, _ = image_splits(tmp_path, ImageSettings(image_size=8))
    assert isinstance(train, ImageFolder)
    there = describe(train)
    assert (there.num_images, there.num_classes, there.width, there.height) == (4, 2, 120, 50)
    assert (there.smallest_class, there.largest_class) == (("b", 1), ("a", 3))


def test_loader_is_measured_for_the_given_time_or_exactly_one_epoch() -> None:
    loader = make_loader(load_splits("synthetic:1x4x4x2x40").train, LoaderSettings(batch_size=8))
    assert loader_speed(loader, 0.2, lambda _: None).num_samples > 40  # several epochs
    assert loader_speed(loader, 0.0, lambda _: None, whole=True).num_samples == 40


SLOW = Situation(
    wanted=1000, measured=200, disk=5000, workers=2, cores=16, image_size=224, shorter_side=300, loader="workers"
)


def test_advice_names_the_workers_that_are_needed_if_any() -> None:
    assert advice(replace(SLOW, wanted=200)) == []
    assert advice(SLOW)[0] == "--workers 10: 2 did 200 images/s and this machine has 16 cores"
    assert advice(replace(SLOW, cores=8))[0].endswith(" 8 cores, which would make about 800: not enough by itself")
    assert "--workers" not in " ".join(advice(replace(SLOW, cores=2)))


def test_advice_tells_a_slow_disk_and_large_files() -> None:
    tips = advice(replace(SLOW, disk=400, shorter_side=1200))
    assert tips[0].startswith("reading the files alone reaches 400 images/s, so the disk or network is too slow")
    assert tips[2].startswith("resize the files once to a shorter side of 256 pixels (now 1200)")
    assert not any("disk" in tip or "resize" in tip for tip in advice(SLOW))
    assert not any("dali" in tip for tip in advice(replace(SLOW, loader="dali")))
