"""ResNet-18 on a folder of JPEG files, two ranks, through the real launcher: it learns, and skips a bad file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from visualdl import LogReader

from tests.support.images import write_image_folder
from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import Job, clean_environ, python, write_script

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


# As `python -m fleet_train train`, but a worker counts as hanging sooner.
_IMPATIENT = """
import sys
from fleet_train.cli import main
from fleet_train.data import WorkerLoader

WorkerLoader.__init__.__kwdefaults__["task_seconds"] = 15.0
sys.argv.insert(1, "train")
main()
"""


def test_data_workers_that_are_killed_or_frozen_change_nothing(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", per_class=24)
    undisturbed, _, _ = _trained(tmp_path / "undisturbed", images, ())
    losses, lost, log = _trained(tmp_path / "disturbed", images, (signal.SIGKILL, signal.SIGSTOP))
    assert len(undisturbed) == 360
    assert losses == undisturbed
    assert log.count("a new worker reads them") == 2, log
    for pid, reason in zip(lost, ("was killed by SIGKILL", "has not responded for"), strict=True):
        assert f"(process {pid}) {reason}" in log


def _trained(folder: Path, images: Path, signals: Sequence[signal.Signals]) -> tuple[list[float], list[int], str]:
    """(losses, the data workers that got the signals, one of each rank, and the ranks' logs) of a job of two ranks."""
    metrics, lost = folder / "out" / "metrics.jsonl", list[int]()
    recipe = "--model=mlp --epochs=60 --batch_size=4 --workers=2 --log_every=1 --evaluate_every=1000 --image_size=16"
    launch = ("-m", "fleet_train", "launch", "--nproc_per_node=2", f"--started_port={free_ports(4)}", "--log_dir=log")
    with Job(folder) as job:
        script = write_script(_IMPATIENT, folder)
        flags = (*recipe.split(), f"--data_dir={images}", f"--output_dir={metrics.parent}")
        launcher = job.start("job", python(*launch, str(script), *flags), clean_environ())
        if signals:
            job.wait_until(lambda: metrics.exists() and b'"step": 9' in metrics.read_bytes(), 60.0, "steps")
            lost = _one_worker_of_each_rank(launcher.process.pid)
            for pid, number in zip(lost, signals, strict=True):
                os.kill(pid, number)
        assert launcher.process.wait(timeout=120) == 0, job.report()
        assert job.leftovers() == []
    lines = map(json.loads, metrics.read_text().splitlines())
    logs = [file.read_text() for file in sorted(folder.rglob("workerlog.?"))]
    return [line["train/loss"] for line in lines if "train/loss" in line], lost, "".join(logs)


def _one_worker_of_each_rank(launcher: int) -> list[int]:
    """Process ids of data workers, one per rank."""
    of_rank = {
        process.ppid(): process.pid
        for process in psutil.Process(launcher).children(recursive=True)
        if "fleet_train.data.decode_worker" in process.cmdline()
    }
    return list(of_rank.values())
