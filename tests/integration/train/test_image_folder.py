"""ResNet-18 on a folder of JPEG files, two ranks, through the real launcher: it learns, and skips a bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from visualdl import LogReader

from tests.support.images import write_image_folder
from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import python

pytestmark = pytest.mark.long

RECIPE = (
    *("--model=ResNet18", "--image_size=32", "--epochs=5", "--batch_size=8", "--optimizer=sgd", "--lr=0.02"),
    *("--weight_decay=1e-4", "--no_decay_norm_bias", "--label_smoothing=0.1", "--scale_lr"),
    *("--workers=1", "--max_corrupt=1", "--augment=none"),
)


def test_two_ranks_learn_three_colours(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", per_class=24, classes=3, val_per_class=7)
    (images / "train" / "class1" / "5.jpg").write_bytes(b"not an image")
    launch = ("-m", "fleet_train", "launch", "--nproc_per_node=2", f"--started_port={free_ports(4)}", "--log_dir=log")
    flags = (*RECIPE, f"--data_dir={images}", f"--output_dir={tmp_path / 'run'}")
    ended = run_launchers([python(*launch, "-m", "fleet_train", "train", *flags)], folder=tmp_path / "job")
    said = ended.report()
    assert (
        "batch norm: each rank over its own batch; running statistics are averaged for evaluations and checkpoints"
        in said
    )

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"], summary["model"]) == (2, 25, "ResNet18"), said
    assert summary["learning_rate"] == 0.04
    assert summary["corrupt_images"] == 1
    assert "cannot read train/class1/5.jpg (UnidentifiedImageError: cannot identify image file it)" in said
    assert summary["test_accuracy"] >= 0.9, said
    curve = LogReader(file_path=str(tmp_path / "run" / "visualdl" / "vdlrecords.train.log"))
    assert [point.id for point in curve.get_data("scalar", "test/accuracy")] == [5, 10, 15, 20, 25]
