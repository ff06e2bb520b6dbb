"""The loop with a user's program, on two ranks: stopped by a signal, it resumes as the same run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.processes import ROOT, Job, clean_environ, python
from tests.support.ranks import RanksResult, run_ranks, stock_environs

pytestmark = pytest.mark.long

SCRIPT = ROOT / "tools" / "examples" / "own_program.py"


def run(folder: Path, *flags: str) -> RanksResult:
    return run_ranks(SCRIPT, 2, folder=folder, nodes=2, args=flags)


def losses(output: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def test_stopped_by_a_signal_to_one_rank_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished = run(tmp_path / "a", "--output_dir", str(whole))
    last = finished.ranks[0].output.splitlines()[-1]
    assert last.startswith("640 steps on 2 rank(s): mean squared error 0.00"), finished.report()
    assert last.endswith("over 201 samples")

    command = python(str(SCRIPT), "--output_dir", str(parts))
    with Job(tmp_path / "b") as job:
        for rank, environ in enumerate(stock_environs([1, 1])):
            job.start(f"rank{rank}", command, clean_environ(environ))
        job.wait_until(lambda: "epoch  1/20" in job.started[0].output, 60, "the first epoch is done")
        job.started[1].process.send_signal(signal.SIGTERM)
        ended = job.wait(timeout_seconds=60)
    assert [one.exit_code for one in ended] == [12, 12], [one.output for one in ended]
    assert all("SIGTERM" in one.output and f"resume from {parts}" in one.output for one in ended)

    run(tmp_path / "c", "--output_dir", str(parts), "--resume")
    assert losses(parts) == losses(whole)
    name = "checkpoints/step-00000640/persistables.safetensors"
    assert (parts / name).exists()
    found, expected = load_file(parts / name), load_file(whole / name)
    assert sorted(found) == sorted(expected)
    assert [each for each in expected if found[each].tobytes() != expected[each].tobytes()] == []
