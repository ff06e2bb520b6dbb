"""The reference trainer as real processes, on digits and on folders of images: files, resumed and replaced runs."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from visualdl import LogReader

from tests.support.images import write_image_folder
from tests.support.ports import free_ports
from tests.support.processes import ROOT, python, run_alone, write_script
from tests.support.ranks import RanksResult, run_launchers, run_ranks

SCRIPT = ROOT / "tools" / "train.py"
# Dropout, momentum and a decaying rate: everything that a resume could get wrong.
RECIPE = ("--model", "mlp", "--optimizer", "momentum", "--lr_schedule", "cosine", "--epochs", "4", "--seed", "3")


def train(folder: Path, world_size: int, output: Path, *flags: str, check: bool = True) -> RanksResult:
    """One job of that many ranks, on as many nodes; one rank runs without any launcher, as `python train.py` does."""
    folder.mkdir()
    nodes = 0 if world_size == 1 else world_size
    args = [*RECIPE, "--output_dir", str(output), *flags]
    return run_ranks(SCRIPT, world_size, folder=folder, nodes=nodes, args=args, check=check)


def summary(output: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return value


def tensors(output: Path) -> dict[str, np.ndarray]:
    return load_file(Path(summary(output)["checkpoint"]) / "persistables.safetensors")


def records(output: Path, tag: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[tag]) for line in lines if tag in line]


def assert_bit_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    different = [name for name in expected if found[name].tobytes() != expected[name].tobytes()]
    assert different == []


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[RanksResult, Path]:
    """One finished run of two ranks, which several tests look at. They must copy what they change."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return train(folder / "job", 2, folder / "run", "--checkpoint_every", "1"), folder / "run"


def assert_same_run(found: Path, expected: Path) -> None:
    assert summary(found)["steps"] == summary(expected)["steps"]
    assert_bit_equal(tensors(found), tensors(expected))
    assert records(found, "train/loss") == records(expected, "train/loss")
    assert records(found, "test/accuracy") == records(expected, "test/accuracy")


@pytest.mark.long
def test_going_on_in_the_middle_of_an_epoch_is_the_same_run_on_one_process(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    recipe = "--epochs 2 --ema_decay 0.95 --clip_norm 1 --label_smoothing 0.1 --on_nan skip --deterministic".split()
    train(tmp_path / "a", 1, whole, *recipe, "--checkpoint_every_steps", "30", "--keep_checkpoints", "9")
    kept = sorted(path.name for path in (whole / "checkpoints").glob("*step-*"))
    assert kept == ["step-00000030", "step-00000045", "step-00000060", "step-00000090"]  # and at each epoch's end
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / kept[-1])
    resumed = train(tmp_path / "b", 1, again, *recipe, "--resume")
    assert "deterministic kernels: " in resumed.ranks[0].output
    assert "(epoch 1, 480 samples into the next, step 60)" in resumed.ranks[0].output
    assert (summary(again)["world_size"], summary(again)["num_nodes"]) == (1, 1)
    assert_same_run(again, whole)
    assert records(again, "train/epoch_loss") == records(whole, "train/epoch_loss")
    assert "weight_average_updates" in tensors(whole)


def test_two_epochs_and_two_more_equal_four_in_one_go_on_two_nodes(
    tmp_path: Path, two_ranks: tuple[RanksResult, Path]
) -> None:
    parts = tmp_path / "parts"
    train(tmp_path / "b", 2, parts, "--stop_after_epochs", "2")
    train(tmp_path / "c", 2, parts, "--resume")
    assert_same_run(parts, two_ranks[1])


def test_two_ranks_write_one_run(two_ranks: tuple[RanksResult, Path]) -> None:
    job, output = two_ranks
    lines = [rank.output.count("test accuracy") for rank in job.ranks]
    assert "batch norm" not in job.report()
    assert lines == [5, 0], "rank 0 says one line per epoch and one at the end, the other rank none"
    expected = ["checkpoints", "images", "metrics.jsonl", "summary.json", "visualdl"]
    assert sorted(path.name for path in output.iterdir()) == expected
    assert [path.name for path in (output / "visualdl").iterdir()] == ["vdlrecords.train.log"]
    # ceil(1438 / 2) = 719 samples per rank; 23 steps of 32. The two newest checkpoints are kept.
    assert sorted(path.name for path in (output / "checkpoints").glob("*step-*")) == ["step-00000069", "step-00000092"]
    result = summary(output)
    assert (result["world_size"], result["num_nodes"], result["steps"], result["global_batch_size"]) == (2, 2, 92, 64)
    assert result["test_accuracy"] > 0.9
    assert (result["model"], result["data"], result["profile"]) == ("mlp", "digits", "multi_node")


def test_one_card_reads_a_checkpoint_of_two_ranks_and_evaluates_the_same(
    tmp_path: Path, two_ranks: tuple[RanksResult, Path]
) -> None:
    # 359 test samples are 180 and 179 on two ranks: the sums must be those of one process with all of them.
    one = tmp_path / "one_card"
    shutil.copytree(two_ranks[1], one)
    alone = train(tmp_path / "job", 1, one, "--resume")
    assert "nothing left to train" in alone.ranks[0].output
    assert summary(one)["test_accuracy"] == summary(two_ranks[1])["test_accuracy"]
    assert summary(one)["test_loss"] == pytest.approx(summary(two_ranks[1])["test_loss"], rel=1e-5)


def recorded(run: Path) -> tuple[list[int], list[int]]:
    """The steps with a loss in metrics.jsonl and in VisualDL's file."""
    from visualdl.proto.record_pb2 import Record

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    content, place, shown = (run / "visualdl" / "vdlrecords.train.log").read_bytes(), 0, []
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        value: Any = Record.FromString(content[place + 8 : place + 8 + length]).values[0]
        place += 8 + length
        if value.tag == "train/loss":
            shown.append(value.id)
    return [line["step"] for line in lines if "train/loss" in line], shown


@pytest.mark.long
def test_records_of_2_1_and_2_ranks_follow_one_another_and_rolled_back_ones_go(tmp_path: Path) -> None:
    """An epoch is 16 steps of two ranks, or 32 of one."""
    run = tmp_path / "run"
    recipe = "--model=mlp --data=synthetic --batch_size=64 --epochs=4 --log_every=1 --checkpoint_every_steps=10".split()
    flags = [*recipe, "--keep_checkpoints=9", f"--output_dir={run}"]

    def attempt(ranks: int, *more: str, lost: tuple[int, ...] = ()) -> list[int]:
        run_ranks(SCRIPT, ranks, folder=tmp_path, args=[*flags, *more])
        for step in lost:  # as if the job had been killed before them
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
        lines, shown = recorded(run)
        assert lines == shown
        return lines

    assert attempt(2, "--stop_after_epochs=1", lost=(16,)) == list(range(1, 17))
    # After 10 steps of two ranks, 12 of one end the epoch. Its own checkpoint is of step 30, 10 steps later.
    assert attempt(1, "--resume", "--stop_after_epochs=1", lost=(32,)) == list(range(1, 23))
    # 20 are kept, 2 were rolled back; one step of two ranks is left, and the next epoch has 16.
    assert attempt(2, "--resume", "--stop_after_epochs=2") == list(range(1, 20 + 1 + 16 + 1))


# The first attempt of a restarted job dies before it has looked at the folder.
_DIES_AT_FIRST = """
import os, sys
if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
    os._exit(1)
from fleet_train.cli import cli
cli(["train", *sys.argv[1:]])
"""


@pytest.mark.long
def test_an_earlier_run_is_not_resumed_by_a_job_that_was_to_overwrite_it(tmp_path: Path) -> None:
    launch = ["-m", "fleet_train", "launch", f"--started_port={free_ports(4)}", "--max_restarts=1"]
    script = str(write_script(_DIES_AT_FIRST, tmp_path))
    train = f"--model=mlp --epochs=1 --checkpoint_every=1 --evaluate_every=1 --output_dir={tmp_path / 'out'}".split()

    def restarted(name: str, *flags: str) -> tuple[int, str]:
        ended = run_alone(tmp_path / name, python(*launch, script, *train, *flags), timeout_seconds=180)
        assert "restart 1 of 1" in ended.output
        return ended.exit_code, ended.output + (tmp_path / name / "log" / "workerlog.0").read_text()

    code, said = restarted("earlier")
    assert code == 0, said
    # One that nobody has said anything of is refused, as it would have been at the first attempt.
    code, said = restarted("silent")
    assert code == 9, said
    assert "holds checkpoints of an earlier run" in said
    code, said = restarted("overwriting", "--overwrite")
    assert code == 0, said
    assert "resumed from" not in said


RESNET = (
    *("--model=ResNet18", "--image_size=32", "--epochs=5", "--batch_size=8", "--optimizer=sgd", "--lr=0.02"),
    *("--weight_decay=1e-4", "--no_decay_norm_bias", "--label_smoothing=0.1", "--scale_lr"),
    *("--workers=1", "--max_corrupt=1", "--augment=none"),
)


@pytest.mark.long
def test_two_ranks_learn_three_colours(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", per_class=24, classes=3, val_per_class=7)
    (images / "train" / "class1" / "5.jpg").write_bytes(b"not an image")
    launch = ("-m", "fleet_train", "launch", "--nproc_per_node=2", f"--started_port={free_ports(4)}", "--log_dir=log")
    flags = (*RESNET, f"--data_dir={images}", f"--output_dir={tmp_path / 'run'}")
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
