"""A clock that jumps by hours, in launchers and ranks: no timeout, no lost record, no wrong order."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.launch.conftest import HOSTS, Bench, send
from tests.support.processes import ROOT

pytestmark = pytest.mark.long

# Every look at the clock is hours away from the one before it.
_JUMPING = """
import itertools, time
real, hours = time.time, itertools.cycle([0, 7, -5, 30, -12])
time.time = lambda: real() + 3600 * next(hours)
time.time_ns = lambda: int(time.time() * 1e9)
"""
_RECIPE = "--model=mlp --data=digits --log_every=1 --checkpoint_every_steps=5 --keep_checkpoints=1000"


def start(bench: Bench, *flags: str) -> Path:
    (bench.folder / "sitecustomize.py").write_text(_JUMPING)
    environ = {"PYTHONPATH": f"{bench.folder}{os.pathsep}{ROOT}"}
    output = bench.folder / "out"
    for node in range(len(HOSTS)):
        bench.start(
            ROOT / "tools" / "train.py",
            *_RECIPE.split(),
            f"--output_dir={output}",
            *flags,
            flags=["--max_restarts=1", "--lost_node_timeout=10"],
            environ=environ,
            node=node,
        )
    return output


def steps(output: Path) -> list[int]:
    """Of the lines with a loss, in their order."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def test_a_killed_rank_resumes_from_the_newest_checkpoint(bench: Bench) -> None:
    output = start(bench, "--epochs=20", "--evaluate_every=20")
    bench.wait_for(lambda: len(list(output.glob("checkpoints/step-*"))) > 3, "checkpoints", 60.0)
    os.kill(json.loads(bench.log("node1/log/workerend.0.json"))["pid"], signal.SIGKILL)
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    assert ended[0].output.count("restart 1 of 1") == 1
    assert not any(
        word in one.output for one in ended for word in ("did not connect", "did not arrive", "not heard")
    ), bench.job.report()
    assert steps(output) == sorted(set(steps(output)))
    assert steps(output)[-1] == 20 * 23
    times = [json.loads(line)["time"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert times != sorted(times), "the clock has jumped"


def test_a_graceful_stop_has_its_time(bench: Bench) -> None:
    output = start(bench, "--epochs=10000")
    bench.wait_for(lambda: len(list(output.glob("checkpoints/step-*"))) > 3, "checkpoints", 60.0)
    send(bench.job.started[1], signal.SIGTERM)
    assert [one.exit_code for one in bench.ended(120.0)] == [12, 12], bench.job.report()
    saved = max(int(path.name.removeprefix("step-")) for path in output.glob("checkpoints/step-*"))
    assert steps(output) == sorted(set(steps(output)))
    assert saved >= steps(output)[-1]
