"""Runs that begin where an earlier one has been: resumed on other ranks, or overwritten."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports
from tests.support.processes import ROOT, python, run_alone, write_script
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long


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
    run = tmp_path / "run"
    recipe = "--model=mlp --data=synthetic --batch_size=64 --epochs=4 --log_every=1 --checkpoint_every_steps=10".split()
    flags = [*recipe, "--keep_checkpoints=9", f"--output_dir={run}"]

    def attempt(ranks: int, *more: str, lost: tuple[int, ...] = ()) -> list[int]:
        run_ranks(ROOT / "tools" / "train.py", ranks, folder=tmp_path, args=[*flags, *more])
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
