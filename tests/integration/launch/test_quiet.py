"""Real commands: Paddle's own lines are hidden, --verbose shows them, and nothing else is hidden."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench
from tests.support.processes import clean_environ, python, write_script

pytestmark = pytest.mark.long

OF_PADDLE = (
    "ccache",
    "not support input out",
    "Tensor do not have",
    "Modified FLAGS",
    "FLAGS(",
    ".cc:",
    "warnings.warn(w",
)
SCRIPT = """
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
TRAIN = ["train", "--model=mlp", "--data=digits", "--epochs=1"]


def run(tmp_path: Path, *words: str, **variables: str) -> str:
    """What a command prints on its terminal."""
    done = subprocess.run(
        python("-m", "fleet_train", *words),
        env=clean_environ(variables),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def paddles(output: str) -> list[str]:
    return [line for line in output.splitlines() if any(word in line for word in OF_PADDLE)]


def test_train_is_quiet_unless_verbose(tmp_path: Path) -> None:
    quiet = run(tmp_path, *TRAIN, "--output_dir=a")
    assert paddles(quiet) == []
    assert len(quiet.splitlines()) == 4, quiet
    shown = "\n".join(paddles(run(tmp_path, *TRAIN, "--output_dir=b", "--verbose")))
    assert all(
        word in shown for word in ("ccache", "not support input out", "Tensor do not have", "pir_interpreter.cc")
    )


def test_the_users_settings_have_precedence(tmp_path: Path) -> None:
    shown = paddles(run(tmp_path, *TRAIN, "--output_dir=a", GLOG_minloglevel="0", PYTHONWARNINGS="default"))
    assert any("pir_interpreter.cc" in line for line in shown)
    assert any("ccache" in line for line in shown)


def test_plan_of_a_script_shows_the_scripts_lines_alone(tmp_path: Path) -> None:
    script = str(write_script(SCRIPT, tmp_path))
    quiet = run(tmp_path, "plan", "--nodes=2", f"--script={script}")
    assert paddles(quiet) == []
    assert [word in quiet for word in OF_SCRIPT] == [True, False, True]  # it runs up to minimize
    assert paddles(run(tmp_path, "plan", "--nodes=2", "--verbose", f"--script={script}")) != []


def test_launch_shows_only_the_scripts_lines_and_the_log_has_all(bench: Bench) -> None:
    launcher = bench.start(SCRIPT, flags=["--nproc_per_node=2"])
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    assert paddles(launcher.output) == []
    assert all(word in launcher.output for word in OF_SCRIPT)
    log = "\n".join(paddles(bench.log()))
    assert all(word in log for word in ("ccache", "not support input out", "Modified FLAGS", "tcp_store.cc"))


def test_launch_verbose_shows_what_the_log_has(bench: Bench) -> None:
    launcher = bench.start(SCRIPT, flags=["--nproc_per_node=2", "--verbose"])
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    assert paddles(launcher.output) == paddles(bench.log()) != []


def test_an_error_is_shown_in_full(bench: Bench) -> None:
    launcher = bench.start(SCRIPT, "fail", flags=["--nproc_per_node=2"])
    assert launcher.process.wait(timeout=90) == 1
    assert 'raise RuntimeError("it fails")' in launcher.output
    assert launcher.output.count("RuntimeError: it fails") >= 2  # of rank 0, and in the report
    assert paddles(launcher.output) == []


@pytest.mark.parametrize("command", ["train", "plan", "launch"])
def test_help_tells_of_verbose(tmp_path: Path, command: str) -> None:
    assert "--verbose" in run(tmp_path, command, "--help")
