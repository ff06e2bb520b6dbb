"""The flag ``--verify_joint_batch`` of the launcher: before a script, with and without a number, and with --strict."""

from __future__ import annotations

import re

import pytest

from fleet_train.cli.launch import command
from tests.integration.launch.conftest import Bench
from tests.support.processes import ROOT

# argv: "normed" for batch norm of each rank's own batch, or "plain".
SCRIPT = """
import sys

import numpy as np
import paddle

from fleet_train import fleet

paddle.enable_static()
fleet.init(is_collective=True)
x = paddle.static.data("x", [None, 4])
hidden = paddle.nn.Linear(4, 3)(x)
hidden = paddle.nn.BatchNorm1D(3)(hidden) if sys.argv[1] == "normed" else hidden
loss = (paddle.nn.Linear(3, 1)(hidden) - 1).square().mean()
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor()
exe.run(fleet.startup_program)
random = np.random.default_rng(fleet.worker_index())
for _ in range(3):
    exe.run(fleet.main_program, feed={"x": random.random((8, 4), "float32")}, fetch_list=[loss])
print("trained")
"""


@pytest.mark.parametrize(
    ("name", "flags", "exit_code", "said"),
    [
        (
            "plain",
            ["--verify_joint_batch", "--strict"],
            0,
            "verified: the gradient of 2 ranks is the joint batch's to ",
        ),
        ("normed", ["--verify-joint-batch=2"], 0, "not verified: the gradient of 2 ranks is not the joint batch's: "),
        ("normed", ["--strict", "--verify_joint_batch"], 7, "batch norm takes each rank's own batch"),
    ],
)
def test_a_difference_is_said_and_with_strict_an_error(
    bench: Bench, name: str, flags: list[str], exit_code: int, said: str
) -> None:
    launcher = bench.start(SCRIPT, name, flags=["--nproc_per_node=2", *flags])
    assert launcher.process.wait(timeout=120) == exit_code, launcher.output
    assert said in launcher.output
    assert ("trained" in bench.log("node0/log/workerlog.0")) == (exit_code == 0)


@pytest.mark.parametrize(("flags", "place"), [([], 0), (["--set", "average_over=ranks"], 1)])
def test_the_page_shows_what_is_said(bench: Bench, flags: list[str], place: int) -> None:
    page = (ROOT / "docs/launching.md").read_text().partition("## Is it the joint batch?")[2]
    (script,) = re.findall(r"```python\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    shown = " ".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)[place].split())
    launcher = bench.start(script, flags=["--nproc_per_node=2", "--verify_joint_batch", *flags])
    assert launcher.process.wait(timeout=120) == 0, launcher.output
    rounding = re.compile(r"[0-9.]+e-0[789]")  # depends on the processor
    assert rounding.sub("tiny", shown) in rounding.sub("tiny", launcher.output)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (["--verify_joint_batch", "train.py", "--verify_joint_batch"], 1),
        (["--verify_joint_batch", "3", "train.py"], 3),
        (["--verify-joint-batch=2", "--strict", "train.py"], 2),
        (["--strategy", "multi_node", "--verify_joint_batch", "--strict", "train.py"], 1),
        (["--strict", "train.py", "--verify_joint_batch"], 0),
    ],
)
def test_the_number_of_steps_may_be_left_out(given: list[str], steps: int) -> None:
    context = command.make_context("launch", list(given))
    assert context.params["verify_joint_batch"] == steps
    assert context.params["program"] == tuple(given[given.index("train.py") :])
