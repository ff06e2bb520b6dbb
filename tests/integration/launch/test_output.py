"""What commands print: Paddle's own lines are hidden unless asked for, and no failure is lost where nobody reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench, send
from tests.support.processes import clean_environ, python

# Rank 0 says more than any pipe holds; rank 1 does what the argument says.
_SCRIPT = """
import os, pathlib, sys, time
if os.environ["PADDLE_TRAINER_ID"] == "0":
    for number in range(40_000):
        print("line", number, "x" * 100)
    pathlib.Path(sys.argv[2], "said").touch()
    time.sleep(0 if sys.argv[1] == "0" else 120)
else:
    while not pathlib.Path(sys.argv[2], "said").exists():
        time.sleep(0.01)
    time.sleep(1)
    if sys.argv[1] == "wait":
        time.sleep(120)
    sys.exit(int(sys.argv[1]))
"""
_TWO = ["--nproc_per_node=2"]


@pytest.fixture
def pipe(bench: Bench) -> Iterator[Path]:
    """A pipe that is open for reading, and never read."""
    path = bench.folder / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path
    os.close(reader)


def test_a_failure_is_noticed_while_no_one_reads_the_output(bench: Bench, pipe: Path) -> None:
    launcher = bench.start(_SCRIPT, "7", str(bench.folder), flags=_TWO, shell=f'"$@" >{pipe}')
    assert launcher.process.wait(timeout=120) == 7, launcher.output
    assert "rank 1" in next(line for line in launcher.output.splitlines() if "the job has failed" in line)
    assert "failed first  1" in launcher.output
    assert bench.job.leftovers() == []


def test_a_signal_is_handled_while_no_one_reads_the_output(bench: Bench, pipe: Path) -> None:
    launcher = bench.start(_SCRIPT, "wait", str(bench.folder), flags=_TWO, shell=f'exec "$@" >{pipe} 2>&1')
    bench.wait_for((bench.folder / "said").exists, "rank 0 has said all")
    send(launcher, signal.SIGTERM)
    assert launcher.process.wait(timeout=120) == 143
    assert bench.job.leftovers() == []


OF_PADDLE = (
    "ccache",
    "not support input out",
    "Tensor do not have",
    "Modified FLAGS",
    "FLAGS(",
    ".cc:",
    "warnings.warn(w",
)
_TRAIN = """
import sys, warnings
import numpy as np
import paddle
from fleet_train import fleet, role_maker
warnings.warn("mine, before")
paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
x = paddle.static.data("x", [8, 4], "float32")
loss = paddle.nn.Linear(4, 1)(x).mean()
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(learning_rate=0.1))
print("I1123 00:00:00.000000 1 mine.py:1] said by the script", file=sys.stderr)
optimizer.minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
exe.run(fleet.main_program, feed={"x": np.ones((8, 4), "float32")})
warnings.warn("mine, behind", FutureWarning)
if "fail" in sys.argv:
    raise RuntimeError("it fails")
"""

OF_SCRIPT = ("mine, before", "mine, behind", "said by the script")


def paddles(output: str) -> list[str]:
    return [line for line in output.splitlines() if any(word in line for word in OF_PADDLE)]


@pytest.mark.long
def test_train_is_quiet_unless_verbose_or_the_user_has_set_the_levels(bench: Bench) -> None:
    train = python("-m", "fleet_train", "train", "--model=mlp", "--data=digits", "--epochs=1", "--output_dir=out")
    levels = clean_environ({"GLOG_minloglevel": "0", "PYTHONWARNINGS": "default"})
    bench.job.start("quiet", train, clean_environ(), cwd=bench.folder / "a")
    bench.job.start("verbose", [*train, "--verbose"], clean_environ(), cwd=bench.folder / "b")
    bench.job.start("asked", train, levels, cwd=bench.folder / "c")
    ended = quiet, verbose, asked = bench.ended(120)
    assert [one.exit_code for one in ended] == [0, 0, 0], bench.job.report()
    assert paddles(quiet.output) == []
    assert len(quiet.output.splitlines()) == 5, quiet.output
    shown = "\n".join(paddles(verbose.output))
    assert all(word in shown for word in ("ccache", "not support input out", "Tensor do not have", "pir_interpreter"))
    shown = "\n".join(paddles(asked.output))
    assert all(word in shown for word in ("ccache", "pir_interpreter.cc"))


@pytest.mark.long
def test_launch_shows_the_scripts_lines_and_its_error_alone_and_the_log_has_all(bench: Bench) -> None:
    launcher = bench.start(_TRAIN, "fail", flags=_TWO)
    assert launcher.process.wait(timeout=180) == 1
    assert paddles(launcher.output) == []
    assert all(word in launcher.output for word in OF_SCRIPT)
    log = "\n".join(paddles(bench.log()))
    assert all(word in log for word in ("ccache", "not support input out", "Modified FLAGS", "tcp_store.cc"))
    assert 'raise RuntimeError("it fails")' in launcher.output
    assert launcher.output.count("RuntimeError: it fails") >= 2  # of rank 0, and in the report
