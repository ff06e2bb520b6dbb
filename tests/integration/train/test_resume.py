"""Runs that begin where an earlier one has been: resumed on other ranks, overwritten, or still under way."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, Started, clean_environ, python, write_script

pytestmark = pytest.mark.long


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


_DIES_AT_FIRST = """
import os, sys
if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
    os._exit(1)
from fleet_train.cli import cli
cli(["train", *sys.argv[1:]])
"""
_FLAGS = "--model=mlp --epochs=1 --checkpoint_every=1 --evaluate_every=1".split()


def start(job: Job, folder: Path, script: Path | str, *flags: str, ranks: int = 1) -> Started:
    """The script, or a module with its arguments, under the launcher, which writes its logs to ``folder``."""
    folder.mkdir(exist_ok=True)
    asked = ["launch", f"--started_port={free_ports(4)}", "--max_restarts=2", f"--nproc_per_node={ranks}"]
    program = [str(script)] if isinstance(script, Path) else ["-m", *script.split()]
    command = python("-m", "fleet_train", *asked, *program, *_FLAGS, *flags)
    return job.start(folder.name, command, clean_environ(), cwd=folder)


def test_an_earlier_run_is_not_resumed_by_a_job_that_was_to_overwrite_it(tmp_path: Path) -> None:
    script = write_script(_DIES_AT_FIRST, tmp_path)

    def launch(*flags: str) -> tuple[int, str]:
        with Job(tmp_path) as job:
            start(job, tmp_path, script, f"--output_dir={tmp_path / 'out'}", *flags)
            (ended,) = job.wait(180)
        return ended.exit_code, ended.output + (tmp_path / "log" / "workerlog.0").read_text()

    code, said = launch()
    assert code == 0, said
    code, said = launch("--overwrite")
    assert code == 0, said
    assert "resumed from" not in said
    # One that nobody has said anything of is refused, as it would have been at the first attempt.
    code, said = launch()
    assert code == 9, said
    assert "holds checkpoints of an earlier run" in said


_CRASHES = """
import os, sys
from fleet_train.train import Trainer
Trainer._save = lambda _: os._exit(7)
from fleet_train.cli import cli
cli(["train", *sys.argv[1:]])
"""


def contents(output: Path) -> dict[str, bytes]:
    files = [path for path in sorted(output.rglob("*")) if path.is_file()]
    return {str(path.relative_to(output)): path.read_bytes() for path in files if path.name != ".lock"}


def test_a_run_that_comes_to_nothing_has_not_cost_the_earlier_one(tmp_path: Path) -> None:
    output, crashing = tmp_path / "out", write_script(_CRASHES, tmp_path)
    trains = "fleet_train train"

    def run(name: str, program: Path | str, *flags: str) -> int | None:
        with Job(tmp_path) as job:
            start(job, tmp_path / name, program, f"--output_dir={output}", *flags, ranks=2)
            ended = job.wait(180)[0]
        print(ended.output)
        return ended.exit_code

    assert run("old", trains) == 0
    before = contents(output)
    assert run("data", trains, "--overwrite", "--data_dir=/not/mounted") == 10
    assert contents(output).items() >= before.items()
    assert run("crash", crashing, "--overwrite") == 7
    assert any(".replaced-" in name for name in contents(output))
    assert run("resumed", trains, "--resume") == 0
    assert contents(output).keys() == before.keys()
    for name in before:
        if name.startswith("checkpoints"):
            assert contents(output)[name] == before[name]
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records if "train/loss" in one] == [10, 20], "those of the earlier run, once"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    flags = [f"--output_dir={tmp_path / 'out'}", "--epochs=100000", "--checkpoint_every_steps=10"]
    with Job(tmp_path) as job:
        first = start(job, tmp_path / "first", "fleet_train train", *flags, ranks=2)
        job.wait_until(lambda: (tmp_path / "out" / "checkpoints" / ".lock").exists(), 60, "the folder is in use")
        second = start(job, tmp_path / "second", "fleet_train train", *flags, "--resume", ranks=2)
        job.wait_until(lambda: second.process.poll() is not None, 90, "the second run has ended")
        first.process.send_signal(signal.SIGTERM)
        ended = {each.name: each for each in job.wait(60)}
    held = (tmp_path / "out" / "checkpoints" / ".lock").read_text().strip()
    assert ended["second"].exit_code == 9, ended["second"].output
    assert f"CheckpointError: {tmp_path}/out/checkpoints is in use by {held}: two runs" in ended["second"].output
    assert "Traceback" not in ended["second"].output
    assert ended["first"].exit_code == 12, ended["first"].output


@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_one_error_and_no_restart(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=256k", "tmpfs", str(disk)], check=True)
    try:
        for output, said in (
            (disk, f"{disk}/checkpoints cannot be written"),
            (disk / "a", "rank 0 cannot use its disk"),
        ):
            with Job(tmp_path) as job:
                start(job, tmp_path / "job", "fleet_train train", f"--output_dir={output}")
                (ended,) = job.wait(90)
            assert ended.exit_code == 9, ended.output
            assert said in ended.output
            assert "Read-only file system" in ended.output
            assert "give another folder" in ended.output
            assert "Traceback" not in ended.output
            assert "restart 1 of 2" not in ended.output
    finally:
        subprocess.run(["umount", str(disk)], check=True)
