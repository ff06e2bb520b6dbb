"""The demo as `make demo` runs it: two real launchers, a result, no process left behind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from visualdl import LogReader

from tests.support.processes import ROOT, Ended, Job, clean_environ, python

DEMO = ROOT / "tools" / "demo.py"


def run_demo(folder: Path, *flags: str) -> tuple[Ended, list[str]]:
    """How the demo ended, and the command lines of processes that it left behind."""
    with Job(folder) as job:
        job.start("demo", python(str(DEMO), *flags), clean_environ())
        (ended,) = job.wait(timeout_seconds=150)
        return ended, [" ".join(process.cmdline()) for process in job.leftovers()]


def test_demo_learns_the_digits_and_says_where_everything_is(tmp_path: Path) -> None:
    ended, orphans = run_demo(tmp_path)
    assert ended.exit_code == 0, ended.output
    assert orphans == []

    output = tmp_path / "runs" / "demo"
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["world_size"], summary["num_nodes"], summary["steps"]) == (2, 2, 460)
    assert (summary["model"], summary["data"], summary["profile"]) == ("cnn", "digits", "multi_node")
    assert summary["test_accuracy"] >= 0.97
    assert summary["train_loss"] < 0.5
    assert summary["samples_per_second"] > 0

    for place in (summary["checkpoint"], "runs/demo/log", "runs/demo/metrics.jsonl"):
        assert place in ended.output
        assert (tmp_path / place).exists()
    assert_its_command_shows_the_curves(tmp_path, ended.output)
    for node in ("node0", "node1"):
        assert (output / "log" / node / "workerlog.0").stat().st_size > 0

    curve = LogReader(file_path=str(output / "visualdl" / "vdlrecords.train.log")).get_data("scalar", "test/accuracy")
    assert [point.id for point in curve] == [23 * epoch for epoch in range(1, 21)]
    assert round(curve[-1].value, 4) == round(summary["test_accuracy"], 4)


def assert_its_command_shows_the_curves(folder: Path, output: str) -> None:
    (command,) = re.findall(r"^See the curves:  (.*)$", output, re.MULTILINE)
    assert command.endswith("python -m fleet_train monitor --logdir runs/demo")
    with Job(folder / "monitor") as job:
        monitor = job.start("monitor", command.split(), clean_environ(), cwd=folder)
        job.wait_until(lambda: "/app/scalar" in monitor.output, 60, "the monitor's page answers")
        monitor.process.send_signal(signal.SIGINT)
        (ended,) = job.wait(timeout_seconds=30)
        assert ended.exit_code == 0
        assert job.orphans() == []


@pytest.mark.long
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        demo = job.start("demo", python(str(DEMO)), clean_environ())
        job.wait_until(lambda: "epoch  1/20" in demo.output, 60, "the first epoch is done")
        demo.process.send_signal(signal.SIGINT)
        (ended,) = job.wait(timeout_seconds=90)
        assert ended.exit_code == 130, ended.output
        assert [" ".join(process.cmdline()) for process in job.leftovers()] == []
    assert not (tmp_path / "runs" / "demo" / "summary.json").exists()
