"""A resume on other data, on other machines, or on other numbers of ranks, through the real launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.images import write_image_folder
from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python

pytestmark = pytest.mark.long

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def train(folder: Path, ranks: int, *flags: str) -> Ended:
    """One launcher in ``folder`` with that many ranks."""
    launch = ["-m", "fleet_train", "launch", f"--nproc_per_node={ranks}", f"--started_port={free_ports(ranks + 2)}"]
    names = len(list(folder.glob("job*")))
    with Job(folder / f"job{names}") as job:
        job.start("job", python(*launch, "-m", "fleet_train", "train", *flags), clean_environ(), cwd=folder)
        (ended,) = job.wait(90.0)
    return ended


def output_of(folder: Path, ended: Ended) -> str:
    logs = sorted(folder.rglob("workerlog.*"))
    return ended.output + "".join(path.read_text(errors="replace") for path in logs)


def test_a_renamed_class_is_refused_on_all_ranks_and_accepted_by_a_flag(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", per_class=12)
    recipe = "--model=cnn --data_dir=images --image_size=8 --batch_size=4 --workers=0 --epochs=2 --lr=0.01".split()
    recipe += ["--output_dir=run", "--stop_after_epochs=1"]
    first = train(tmp_path, 2, *recipe)
    assert first.exit_code == 0, output_of(tmp_path, first)
    for part in ("train", "val"):
        (images / part / "class0").rename(images / part / "swapped")

    refused = train(tmp_path, 2, *recipe, "--resume")
    said = output_of(tmp_path, refused)
    assert refused.exit_code == 10, said
    assert "class 0 was 'class0', is 'class1'; class 1 was 'class1', is 'swapped'; 24 samples as before" in said
    accepted = train(tmp_path, 2, *recipe, "--resume", "--accept_changed_data")
    said = output_of(tmp_path, accepted)
    assert accepted.exit_code == 0, said
    assert (
        "is 'swapped'; 24 samples as before, with other names, labels or contents; accepted: training goes on" in said
    )


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


def test_records_of_2_1_and_2_ranks_follow_one_another_and_rolled_back_ones_go(tmp_path: Path) -> None:
    """An epoch is 16 steps of two ranks, or 32 of one."""
    flags = "--model=mlp --data=synthetic --batch_size=64 --epochs=4 --log_every=1 --checkpoint_every_steps=10".split()
    flags += ["--keep_checkpoints=9", "--output_dir=run"]
    run = tmp_path / "run"

    def attempt(ranks: int, *more: str, lost: tuple[int, ...] = ()) -> list[int]:
        ended = train(tmp_path, ranks, *flags, *more)
        assert ended.exit_code == 0, output_of(tmp_path, ended)
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


def test_a_lost_machine_with_data_of_its_own_leaves_the_others_their_steps(tmp_path: Path) -> None:
    folders = [tmp_path / f"node{node}" for node in range(3)]
    for node, folder in enumerate(folders):
        write_image_folder(folder / "images", per_class=100, val_per_class=1)
        (folder / "images" / "train" / "class0" / "0.jpg").rename(folder / "images/train/class0" / f"of{node}.jpg")
    launch = [f"--cluster_node_ips={','.join(HOSTS)}", f"--started_port={free_ports(6, HOSTS)}", "--nproc_per_node=1"]
    launch += "--log_dir=log --max_restarts=2 --min_nodes=2 --lost_node_timeout=5 --rejoin_timeout=2".split()
    flags = "--model=cnn --data_dir=images --image_size=16 --shard_by=folder --batch_size=2 --workers=0".split()
    flags += "--epochs=1 --log_every=1 --checkpoint_every_steps=4 --lr=0.01 --output_dir=run".split()
    flags += ["--strategy=single_node"]  # it fetches each loss
    run = folders[0] / "run"
    with Job(tmp_path) as job:
        for folder, host in zip(folders, HOSTS, strict=True):
            command = python("-m", "fleet_train", "launch", *launch, f"--node_ip={host}", "-m", "fleet_train", "train")
            job.start(folder.name, [*command, *flags], clean_environ(), cwd=folder)
        job.wait_until(lambda: any((run / "checkpoints").glob("step-*")), 60.0, "a checkpoint in the epoch")
        os.kill(job.started[2].process.pid, signal.SIGKILL)
        ended = job.wait(90.0, 60.0)
    said = "".join(one.output for one in ended) + "".join(p.read_text() for p in folders[0].rglob("workerlog.*"))
    assert [one.exit_code for one in ended[:2]] == [0, 0], said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 101)), said
    rates = [line["train/learning_rate"] for line in lines if "train/loss" in line]
    assert max(before - after for before, after in pairwise(rates)) < 2e-4  # a cosine: no jump
    assert "lists of 200 samples, of the checkpoint's data, are not read now" in said, said
