"""Runs that begin where an earlier one has been: resumed on other ranks, overwritten, or still under way."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports
from tests.support.processes import ROOT, Job, Started, clean_environ, python, write_script
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


_FLAGS = "--model=mlp --epochs=1 --checkpoint_every=1 --evaluate_every=1".split()
TRAINS = "fleet_train train"
_DIES_AT_FIRST = """
import os, sys
if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
    os._exit(1)
from fleet_train.cli import cli
cli(["train", *sys.argv[1:]])
"""
_CRASHES = """
import os, sys
from fleet_train.train import Trainer
Trainer._save = lambda _: os._exit(7)
from fleet_train.cli import cli
cli(["train", *sys.argv[1:]])
"""


def start(job: Job, folder: Path, script: Path | str, *flags: str, restarts: int = 1) -> Started:
    """The script, or a module with its arguments, under the launcher, which writes its logs to ``folder``."""
    asked = ["launch", f"--started_port={free_ports(4)}", f"--max_restarts={restarts}", "--nproc_per_node=1"]
    program = [str(script)] if isinstance(script, Path) else ["-m", *script.split()]
    command = python("-m", "fleet_train", *asked, *program, *_FLAGS, *flags)
    return job.start(folder.name, command, clean_environ(), cwd=folder)


def ended(folder: Path, script: Path | str, *flags: str, restarts: int = 1) -> tuple[int, str]:
    """Exit code and output of such a job, whose run is in ``out`` beside its logs."""
    with Job(folder) as job:
        start(job, folder, script, f"--output_dir={folder / 'out'}", *flags, restarts=restarts)
        (one,) = job.wait(180)
    return one.exit_code, one.output + (folder / "log" / "workerlog.0").read_text()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, which tests copy."""
    folder = tmp_path_factory.mktemp("earlier")
    code, said = ended(folder, TRAINS)
    assert code == 0, said
    return folder / "out"


def test_an_earlier_run_is_not_resumed_by_a_job_that_was_to_overwrite_it(tmp_path: Path, earlier: Path) -> None:
    shutil.copytree(earlier, tmp_path / "out")
    script = write_script(_DIES_AT_FIRST, tmp_path)
    # One that nobody has said anything of is refused, as it would have been at the first attempt.
    code, said = ended(tmp_path, script)
    assert code == 9, said
    assert "holds checkpoints of an earlier run" in said
    code, said = ended(tmp_path, script, "--overwrite")
    assert code == 0, said
    assert "restart 1 of 1" in said
    assert "resumed from" not in said


def contents(output: Path) -> dict[str, bytes]:
    files = [path for path in sorted(output.rglob("*")) if path.is_file()]
    return {str(path.relative_to(output)): path.read_bytes() for path in files if path.name != ".lock"}


def test_a_run_that_comes_to_nothing_has_not_cost_the_earlier_one(tmp_path: Path, earlier: Path) -> None:
    output, crashing = Path(shutil.copytree(earlier, tmp_path / "out")), write_script(_CRASHES, tmp_path)
    before = contents(output)
    for program, flags, expected in (
        (TRAINS, ("--overwrite", "--data_dir=/not/mounted"), 10),
        (crashing, ("--overwrite",), 7),
        (TRAINS, ("--resume",), 0),
    ):
        code, said = ended(tmp_path, program, *flags, restarts=0)
        assert code == expected, said
        if expected == 10:
            assert contents(output).items() >= before.items()
        elif expected == 7:
            assert any(".replaced-" in name for name in contents(output))
    after = contents(output)
    assert after.keys() == before.keys()
    assert {name for name in before if name.startswith("checkpoints") and after[name] != before[name]} == set()
    assert recorded(output)[0] == [10, 20, 30, 40], "those of the earlier run, once"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    flags = [f"--output_dir={tmp_path / 'out'}", "--epochs=100000", "--checkpoint_every_steps=10"]
    with Job(tmp_path) as job:
        first = start(job, tmp_path / "first", TRAINS, *flags)
        job.wait_until(lambda: (tmp_path / "out" / "checkpoints" / ".lock").exists(), 60, "the folder is in use")
        second = start(job, tmp_path / "second", TRAINS, *flags, "--resume")
        job.wait_until(lambda: second.process.poll() is not None, 90, "the second run has ended")
        first.process.send_signal(signal.SIGTERM)
        after = {each.name: each for each in job.wait(60)}
    held = (tmp_path / "out" / "checkpoints" / ".lock").read_text().strip()
    assert after["second"].exit_code == 9, after["second"].output
    assert f"CheckpointError: {tmp_path}/out/checkpoints is in use by {held}: two runs" in after["second"].output
    assert "Traceback" not in after["second"].output
    assert after["first"].exit_code == 12, after["first"].output
