"""Loops with ``fleet.resumable``, under the launcher and alone: killed, stopped, started again, on other ranks."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench, send
from tests.support.processes import ROOT, clean_environ, python

SCRIPT = ROOT / "tools" / "soaking" / "own_loop.py"
LOCAL_SGD = ("use_local_sgd=true", "local_sgd_steps=4", "local_sgd_is_warm_steps=2")
CASES = {
    "plain": ("none", "steps", 40, ()),
    "sharding": ("ours", "steps", 40, ("sharding=true",)),
    "rows": ("ours", "epochs", 4, ("sparse_embeddings=true",)),
    "local_sgd": ("ours", "steps", 40, LOCAL_SGD),
    "gradient_merge": ("function", "steps", 40, ("accumulate_steps=3",)),
    "few_bits": ("ours", "epochs", 4, ("compression=int8",)),
    "next_step": ("ours", "epochs", 4, ("overlap_next_step=true",)),
    "next_step_sharding": ("none", "steps", 40, ("overlap_next_step=true", "sharding=true")),
    "workers": ("paddle", "epochs", 4, ()),
}


def train(bench: Bench, name: str, *arguments: str, ranks: int = 2, knobs: tuple[str, ...] = (), code: int = 0) -> str:
    """One launched job that trains in the folder ``name``; what the launcher has printed."""
    number = len(bench.job.started)
    flags = [
        f"--nproc_per_node={ranks}",
        "--max_restarts=2",
        f"--log_dir=log-{number}",
        *(f"--set={knob}" for knob in knobs),
    ]
    launcher = bench.start(SCRIPT, str(bench.folder / name), *arguments, flags=flags, job=f"-{number}")
    assert launcher.process.wait(timeout=120) == code, bench.job.report()
    return launcher.output


def logs(bench: Bench, number: int, rank: int) -> str:
    """All attempts of a rank of the job of that number, the first one first."""
    folder = bench.folder / "node0" / f"log-{number}"
    last = folder / f"workerlog.{rank}"
    return "".join(path.read_text() for path in [*sorted(folder.glob(f"workerlog.{rank}.attempt*")), last])


def steps_of(text: str) -> dict[str, str]:
    """The last line of each step, by its number."""
    return dict(re.findall(r"^step (\d+) (.*)$", text, re.MULTILINE))


def end_of(text: str) -> list[str]:
    return re.findall(r"^digest .*$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "case", ["plain", *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "plain")]
)
def test_a_rank_is_killed_and_the_run_has_the_bits_of_one_that_was_not(bench: Bench, case: str) -> None:
    loader, unit, total, knobs = CASES[case]
    arguments = [f"--loader={loader}", f"--unit={unit}", f"--total={total}"]
    arguments += ["--workers=2"] if case == "workers" else []
    for seed in (1, 2) if case == "plain" else (1,):
        first = len(bench.job.started)
        train(bench, f"whole{seed}", *arguments, f"--seed={seed}", knobs=knobs)
        told = train(bench, f"killed{seed}", *arguments, f"--seed={seed}", "--fault=kill:1:28", knobs=knobs)
        assert "restart 1 of 2" in told
        assert "fleet_train: resumed from" in logs(bench, first + 1, 0)
        for rank in range(2):
            whole, killed = logs(bench, first, rank), logs(bench, first + 1, rank)
            assert steps_of(killed) == steps_of(whole)
            assert len(steps_of(whole)) == total if unit == "steps" else total * 12
            assert end_of(killed) == end_of(whole) != []


def test_sigterm_saves_and_ends_with_12_and_the_same_command_goes_on_to_the_same_bits(bench: Bench) -> None:
    arguments = ["--loader=ours", "--unit=epochs", "--total=3"]
    train(bench, "whole", *arguments)
    told = train(bench, "stopped", *arguments, "--fault=term:1:17", code=12)
    assert re.search(r"stopped after step 1[78]: rank 1 \(.*\): SIGTERM; resume from", told + logs(bench, 1, 0))
    assert "restart 1" not in told
    train(bench, "stopped", *arguments)
    train(bench, "stopped", *arguments)
    for rank in range(2):
        whole, stopped = steps_of(logs(bench, 0, rank)), steps_of(logs(bench, 1, rank) + logs(bench, 2, rank))
        assert stopped == whole
        assert end_of(logs(bench, 2, rank)) == end_of(logs(bench, 0, rank))
        assert steps_of(logs(bench, 3, rank)) == {}, "a finished run trained again"
    assert "nothing left to train: 3 of 3 epochs are done" in logs(bench, 3, 0)
    assert end_of(logs(bench, 3, 0))[0].split()[1] == end_of(logs(bench, 0, 0))[0].split()[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_trains_each_sample_of_the_epoch_once(bench: Bench, ranks: int) -> None:
    arguments = ["--loader=ours", "--unit=epochs", "--total=2", "--batch=2"]
    train(bench, "moved", *arguments, "--fault=term:0:31", code=12)
    train(bench, "moved", *arguments, ranks=ranks)
    lines = [line for rank in range(2) for line in steps_of(logs(bench, 0, rank)).values()]
    lines += [line for rank in range(ranks) for line in steps_of(logs(bench, 1, rank)).values()]
    for epoch in range(2):
        told = [line for line in lines if line.startswith(f"epoch {epoch} ")]
        seen = sorted(int(number) for line in told for number in re.findall(r"\d+", line.partition("[")[2]))
        assert seen == list(range(96)), f"epoch {epoch}"
    assert "random states begin anew: the checkpoint has those of 2 ranks" in logs(bench, 1, 0)


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = python(str(SCRIPT), str(folder), *arguments)
    return subprocess.run(
        command, env=clean_environ(), cwd=folder.parent, capture_output=True, text=True, timeout=120, check=False
    )


def test_one_process_without_a_launcher_is_killed_stopped_and_finished(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole")
    for folder, fault, code in (("killed", "kill:0:13", -signal.SIGKILL), ("stopped", "term:0:13", 12)):
        broken = alone(tmp_path / folder, f"--fault={fault}")
        assert broken.returncode == code, broken.stderr
        again = alone(tmp_path / folder)
        assert steps_of(broken.stdout + again.stdout) == steps_of(whole.stdout)
        assert len(steps_of(whole.stdout)) == 20
        assert end_of(again.stdout) == end_of(whole.stdout) != []
        saved = sorted(path.name for path in (tmp_path / folder / "checkpoints").glob("step-*"))
        assert saved == ["step-00000015", "step-00000020"], "keep=2"
    finished = alone(tmp_path / "whole")
    assert finished.returncode == 0
    assert steps_of(finished.stdout) == {}
    assert "nothing left to train: 20 of 20 steps are done" in finished.stderr


def test_an_exception_saves_nothing_and_another_run_is_refused(tmp_path: Path) -> None:
    assert alone(tmp_path / "run", "--fault=raise:13").returncode == 1
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000005",
        "step-00000010",
    ]
    other = alone(tmp_path / "run", "--seed=2")
    assert other.returncode == 9
    assert "is of another run: its seed is 1, now 2; give another folder" in other.stderr
    other = alone(tmp_path / "run", "--hidden=20")
    assert other.returncode == 9
    assert "this program needs" in other.stderr


def test_ctrl_c_of_the_launcher_saves_on_all_ranks(bench: Bench) -> None:
    folder = bench.folder / "run"
    launcher = bench.start(SCRIPT, str(folder), "--total=4000", "--pause=0.02", flags=["--nproc_per_node=2"])
    bench.wait_for(lambda: (folder / "checkpoints" / "step-00000005").exists(), "a checkpoint", 60.0)
    send(launcher, signal.SIGINT)
    assert launcher.process.wait(timeout=60) == 12, launcher.output
    newest = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert f"resume from {folder}/checkpoints/{newest}" in launcher.output + bench.log("node0/log/workerlog.1")


@pytest.mark.long
@pytest.mark.parametrize("loader", ["none", "ours"])
def test_a_stop_within_local_sgds_steps_gives_the_run_that_saves_at_the_same_step(bench: Bench, loader: str) -> None:
    arguments = [f"--loader={loader}", "--total=30"]
    train(bench, "stopped", *arguments, "--fault=term:1:17", knobs=LOCAL_SGD, code=12)
    (done,) = re.findall(r"stopped after step (\d+)", logs(bench, 0, 0))
    train(bench, "stopped", *arguments, knobs=LOCAL_SGD)
    train(bench, "whole", *arguments, f"--save_at={done}", knobs=LOCAL_SGD)
    train(bench, "other", *arguments, knobs=LOCAL_SGD)
    for rank in range(2):
        whole = logs(bench, 2, rank)
        assert steps_of(logs(bench, 0, rank) + logs(bench, 1, rank)) == steps_of(whole)
        assert end_of(logs(bench, 1, rank)) == end_of(whole) != []
        assert end_of(logs(bench, 3, rank)) != end_of(whole), "one save more is another run"


def test_a_function_that_makes_batches_is_not_moved_to_other_ranks_within_an_epoch(bench: Bench) -> None:
    train(bench, "moved", "--loader=function", "--fault=term:0:5", code=12)
    train(bench, "moved", "--loader=function", ranks=1, code=9)
    assert "is in the middle of an epoch of 2 ranks, now there are 1" in logs(bench, 1, 0)
