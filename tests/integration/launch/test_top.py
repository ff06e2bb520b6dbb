"""``top`` beside two real ranks of a real launcher, one of which sleeps in each of its steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from tests.integration.launch.conftest import Bench
from tests.support.processes import clean_environ, output_of, python

SCRIPT = """
import time

import numpy as np
import paddle

from fleet_train import fleet

paddle.enable_static()
fleet.init()
x = paddle.static.data("x", [8, 4])
loss = paddle.mean(paddle.static.nn.fc(x, 1) ** 2)
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(fleet.startup_program)
while True:
    time.sleep(0.2 * fleet.worker_index())
    exe.run(fleet.main_program, feed={"x": np.ones((8, 4), "float32")}, fetch_list=[loss])
"""
TOP = python("-m", "fleet_train", "top")


def test_top_sees_steps_advance_names_the_slow_rank_and_ends_with_ctrl_c(bench: Bench) -> None:
    launcher = bench.start(SCRIPT, flags=["--nproc_per_node=2"])

    def rows() -> list[dict[str, Any]]:
        """Of this job: others may run on this machine."""
        done = subprocess.run([*TOP, "--json"], env=clean_environ(), capture_output=True, text=True, check=False)
        pids = {process.pid for process in bench.job.leftovers()}
        return [row for row in json.loads(done.stdout or "[]") if row["pid"] in pids]

    def has_times() -> bool:
        found = rows()
        return len(found) == 2 and all(row["step_ms"] for row in found) and any(row["is_slowest"] for row in found)

    bench.wait_for(has_times, "both ranks have times, and one is the slowest")
    before = rows()
    bench.wait_for(lambda: rows()[0]["step"] > before[0]["step"] + 2, "steps advance")
    fast, slow = rows()
    assert [(row["rank"], row["ranks"], row["job"]) for row in (fast, slow)] == [
        (rank, 2, fast["job"]) for rank in (0, 1)
    ]
    assert int(fast["job"], 16) > 0
    assert (fast["is_slowest"], slow["is_slowest"]) == (False, True)
    assert min(fast["step_ms"], slow["step_ms"]) >= 200
    assert fast["exposed_ms"] > 150 > slow["exposed_ms"]
    assert all(row["memory_bytes"] > 50_000_000 for row in (fast, slow))
    assert f"job {fast['job']}: 2 of 2 ranks" in output_of(TOP)

    screen, terminal = os.openpty()
    live = subprocess.Popen(
        [*TOP, "--interval=0.1"], env=clean_environ({"TERM": "vt100"}), stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    while shown.count(fast["job"].encode()) < 3:
        shown += os.read(screen, 4096)
    live.send_signal(signal.SIGINT)
    assert live.wait(timeout=60) == 0
    assert b"Traceback" not in shown
    os.close(screen)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.process.wait(timeout=90)
