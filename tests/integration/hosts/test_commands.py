"""The other commands that take ``--hosts``."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.integration.hosts.conftest import Desk

pytestmark = [pytest.mark.sshd, pytest.mark.long]

_STEPS = """
import time
import numpy as np
import paddle
from fleet_train import fleet

paddle.enable_static()
fleet.init(is_collective=True)
x = paddle.static.data("x", [None, 1])
loss = (paddle.nn.Linear(1, 1)(x) - 1).square().mean()
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor()
exe.run(fleet.startup_program)
for step in range(10_000):
    exe.run(fleet.main_program, feed={"x": np.ones((4, 1), "float32")}, fetch_list=[loss])
    if step == 3:
        print("trains", flush=True)
    time.sleep(0.1)
"""


def test_stacks_and_top_show_the_ranks_of_all_hosts(desk: Desk) -> None:
    desk.write(_STEPS)
    started = desk.type("launch", "train.py", hosts="pc2,pc3")
    desk.wait_for(started, "pc2: trains", seconds=60)
    top = desk.type("top", "--once", hosts="pc2,pc3")
    stacks = desk.type("stacks", hosts="pc2,10.78.0.99,pc3")
    as_json = desk.type("top", "--json", hosts="pc3,pc2", name="json")
    desk.job.wait_until(lambda: all(each.process.poll() is not None for each in (top, stacks, as_json)), 60, "answers")
    assert ": 2 of 2 ranks\n" in top.output
    assert [row["rank"] for row in json.loads(as_json.output)] == [0, 1]
    assert "fleet_train: 10.78.0.99 is left out: ssh cannot connect: " in stacks.output
    assert re.findall(r"^rank (.) stands in train.py:1[47] .* \(process", stacks.output, re.M) == ["0", "1"], (
        stacks.output
    )
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(60) == 143, started.output
    desk.all_end_within(5)


def test_doctor_and_selftest_report_where_they_were_typed(desk: Desk) -> None:
    code, output = desk.run("doctor", "--only=software", "--json", hosts="pc3,pc1")
    assert code == 0, output
    assert json.JSONDecoder().raw_decode(output, output.index("{"))[0]["verdict"]
    code, output = desk.run("selftest", "--nproc=1", "--only=devices", "--record=mine", hosts="pc3,pc2,pc1")
    assert code == 0, output
    assert list((desk.machines.disks[0] / "mine").glob("*.json"))
    assert not list((desk.machines.disks[2] / "mine").glob("*.json"))
