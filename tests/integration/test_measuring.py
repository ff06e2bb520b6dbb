"""``recommend`` as users run it: output, files, and nothing left behind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from fleet_train.profile import load_profile
from tests.support.ports import free_ports
from tests.support.processes import ROOT, Ended, Job, clean_environ, every_python_runs, python, run_alone

# Each trial starts Paddle anew, which a busy machine takes long for.
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
HOSTS = ("127.0.0.2", "127.0.0.3")
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


# Measurements that nobody relies on are short.
BRIEF = """
from fleet_train import timeouts
timeouts.RECOMMEND_MEASURE_SECONDS = timeouts.RECOMMEND_COMPUTE_SECONDS = timeouts.RECOMMEND_TRIAL_SECONDS = 1.0
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
    return run_alone(folder, command, every_python_runs(BRIEF, folder), timeout_seconds=350)


def test_a_trial_that_fails_is_listed_and_of_the_others_one_is_written(script: Path, tmp_path: Path) -> None:
    command = recommend(script, "--json", "--trials", "2", arguments=("fail",))
    ended = run(["sh", "-c", '"$@" > printed.json', "sh", *command], tmp_path)
    assert ended.exit_code == 0, ended.output
    made: dict[str, Any] = json.loads((tmp_path / "printed.json").read_text())
    rows = {row["name"]: row for row in made["profiles"]}
    first = script.with_name("failed").read_text()
    assert "ended with exit code 7" in rows[first]["failure"], rows[first]
    assert made["recommended"] in rows.keys() - {first}
    assert rows[made["recommended"]]["measured_ms"] > 0
    profile = load_profile(str(tmp_path / "mine.yaml"))
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith("# Recommended on ")
    assert "Risk to accuracy: none." in " ".join(text.replace("#", " ").split())
    assert (profile.compression, profile.use_local_sgd) == ("none", False)
    assert "ruled out:" in ended.output
    assert "amp_bf16: amp_level changes what a rank computes, not what it sends" in ended.output
    assert "with --allow local_steps: " in ended.output or "with --allow lossy: " in ended.output


def test_a_script_that_ends_early_gets_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such data')\n")
    ended = run(recommend(script), tmp_path)
    assert ended.exit_code == 1
    assert re.search(r"train\.py could not be measured: rank [01] ", ended.output)
    assert "no such data" in ended.output
    assert not (tmp_path / "mine.yaml").exists()


def test_a_script_that_is_not_converted_is_not_trained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((ROOT / "tools" / "examples" / "single_card.py").read_text())
    ended = run(recommend(script), tmp_path)
    assert ended.exit_code == 7
    assert "train.py, line 33 runs a program that trains, and train.py, line 22 (" in ended.output
    assert "optimizer = fleet.distributed_optimizer(optimizer)" in ended.output
    assert not (tmp_path / "output").exists()


def test_ctrl_c_leaves_nothing(script: Path, tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        started = job.start("recommend", recommend(script), clean_environ())
        log = tmp_path / "runs/log/computing.1.log"
        job.wait_until(lambda: log.exists() and log.stat().st_size > 0, 100, "a subject runs")
        started.process.send_signal(signal.SIGINT)
        (ended,) = job.wait(timeout_seconds=60)
        assert ended.exit_code == 130, ended.output
        assert job.orphans() == []


def test_the_costs_of_a_compression_are_measured_as_its_description_needs_them(tmp_path: Path) -> None:
    command = [str(ROOT / "tools/bench.py"), "coding", "--compression", "bf16", "--rounds", "1", "--megabytes", "1"]
    ended = run_alone(tmp_path, python(*command, "--started_port", str(free_ports(3))), timeout_seconds=300.0)
    assert ended.exit_code == 0, ended.output
    rows = [line.strip("| ").split(" | ") for line in ended.output.splitlines() if "e-9" in line]
    assert [row[0] for row in rows] == ["none", "bf16"]
    assert all(0 <= float(cell) < 1e-6 for row in rows for cell in row[1:])
    assert any(float(cell) > 0 for row in rows for cell in row[1:])
