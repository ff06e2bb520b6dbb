"""``python -m fleet_train recommend`` as a user runs it: output, files, and nothing left behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fleet_train.profile import load_profile
from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python

# Each trial starts Paddle anew, which a busy machine takes long for.
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
SCRIPT = """
import pathlib, sys
import numpy as np
import paddle
from fleet_train import fleet, role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
hidden = paddle.static.data("features", [None, 512], "float32")
for _ in range(3):
    hidden = paddle.nn.functional.relu(paddle.nn.Linear(512, 512)(hidden))
loss = paddle.mean(hidden)
fleet.distributed_optimizer(paddle.optimizer.SGD(0.01), "unfused").minimize(loss)
failed = pathlib.Path(__file__).with_name("failed")  # the profile of the first trial
is_trial = not fleet.profile().use_local_sgd  # the computing is measured without an exchange
if "fail" in sys.argv[1:] and is_trial and fleet.worker_index() == 0 and not failed.exists():
    failed.write_text(fleet.profile().name)
    raise SystemExit(7)
executor = paddle.static.Executor(fleet.place())
executor.run(fleet.startup_program)
features = np.ones((8, 512), "float32")
for _ in range(100000):
    executor.run(fleet.main_program, feed={"features": features}, fetch_list=[loss])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def recommend(script: Path, *flags: str, arguments: tuple[str, ...] = ()) -> list[str]:
    where = ["--nproc", "2", "--started_port", str(free_ports(3)), "--record", str(script.parent / "runs")]
    output = ["--output", str(script.parent / "mine.yaml")]
    return python("-m", "fleet_train", "recommend", *where, *output, *flags, "--script", str(script), *arguments)


def run(command: list[str], folder: Path) -> Ended:
    """One command to its end; nobody of it may be left."""
    with Job(folder) as job:
        job.start("recommend", command, clean_environ())
        (ended,) = job.wait(timeout_seconds=350)
        assert job.orphans() == []
    return ended


def test_two_ranks_get_a_profile_that_loads(script: Path, tmp_path: Path) -> None:
    ended = run(recommend(script, "--trials", "1"), tmp_path)
    assert ended.exit_code == 0, ended.output
    profile = load_profile(str(tmp_path / "mine.yaml"))
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith("# Recommended on ")
    assert "Risk to accuracy: none." in " ".join(text.replace("#", " ").split())
    assert (profile.compression, profile.use_local_sgd) == ("none", False)
    assert "ruled out:" in ended.output
    assert "amp_bf16: amp_level changes what a rank computes, not what it sends" in ended.output
    assert "by the link's rate (predicted):" in ended.output
    assert "with --allow local_steps: " in ended.output or "with --allow lossy: " in ended.output


def test_a_trial_that_fails_is_listed_and_the_others_count(script: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed.json"
    shell = tmp_path / "run.sh"
    shell.write_text(f'"$@" > {printed}\n')
    command = recommend(script, "--json", "--trials", "3", arguments=("fail",))
    ended = run(["sh", str(shell), *command], tmp_path)
    assert ended.exit_code == 0, ended.output
    made: dict[str, Any] = json.loads(printed.read_text())
    rows = {row["name"]: row for row in made["profiles"]}
    first = script.with_name("failed").read_text()
    assert "ended with exit code 7" in rows[first]["failure"], rows[first]
    assert made["recommended"] in rows.keys() - {first}
    assert rows[made["recommended"]]["measured_ms"] > 0
    costs = made["costs"]
    for kind in ("codec_seconds_per_byte", "taken_seconds_per_byte"):
        assert {"none", "bf16", "int8", "int4", "powersgd", "dgc"} <= set(costs[kind])
        assert min(costs[kind].values()) >= 0
    assert costs["codec_seconds_per_byte"]["dgc"] > 0  # sorting takes long on any machine


def test_a_script_that_ends_early_gets_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such data')\n")
    ended = run(recommend(script), tmp_path)
    assert ended.exit_code == 1
    assert "train.py did not run long enough to be measured: rank 0" in ended.output
    assert "no such data" in ended.output
    assert not (tmp_path / "mine.yaml").exists()


def test_ctrl_c_leaves_nothing(script: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Job(tmp_path) as job:
            started = job.start("recommend", recommend(script), clean_environ())
            log = tmp_path / "runs/log/computing.1.log"
            job.wait_until(lambda: log.exists() and log.stat().st_size > 0, 100, "a subject runs")
            started.process.send_signal(signal.SIGINT)
            (ended,) = job.wait(timeout_seconds=60)
            assert ended.exit_code == 130, ended.output
            assert job.orphans() == []
    finally:
        signal.signal(signal.SIGINT, before)
