"""Jobs whose ranks reach barriers through relays: the same training, and the same names in errors."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.launch.conftest import HOSTS, Bench
from tests.support.processes import Job

pytestmark = pytest.mark.long

_TRAIN = """
import os
import numpy as np
import paddle
from fleet_train import fleet, role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
paddle.seed(7)
x = paddle.static.data("x", [8, 4], "float32")
loss = (paddle.static.nn.fc(x, 3) ** 2).mean()
fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), fleet.DistributedStrategy()).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
rank = fleet.worker_index()
data = np.random.default_rng(rank)
for step in range(6):
    exe.run(feed={"x": data.normal(size=(8, 4)).astype("float32")}, fetch_list=[loss])
told = fleet.communication()
scope = paddle.static.global_scope()
names = [value.name for value in paddle.static.default_main_program().global_block().all_parameters()]
print("steps", told.steps, "ranks timed", sum(ms > 0 for ms in told.rank_step_ms))
print("store", os.environ["FLEET_TRAIN_STORE"])
print("gathered", fleet.gather(rank))
print("parameters", [np.array(scope.find_var(name).get_tensor()).tobytes().hex() for name in names])
"""

_WAIT = """
import os, time
from fleet_train import fleet, role_maker
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
print("pid", os.getpid(), flush=True)
fleet.util.barrier()
time.sleep(1)
if fleet.worker_index() == 3:
    time.sleep(600)
fleet.util.barrier()
"""


def _line(log: str, word: str) -> str:
    found = re.search(rf"^{word} (.*)$", log, re.MULTILINE)
    assert found is not None, log
    return found.group(1)


def _train(folder: Path, direct_ranks: int) -> list[str]:
    """The logs of all four ranks."""
    with Job(folder) as job:
        bench = Bench(folder, job)
        bench.start_two(_TRAIN, flags=["--nproc_per_node=2", f"--direct_ranks={direct_ranks}"])
        ended = bench.ended(120)
        assert [one.exit_code for one in ended] == [0, 0], job.report()
    return [bench.log(f"node{node}/log/workerlog.{local}") for node in (0, 1) for local in (0, 1)]


def test_training_over_relays_is_training_without(tmp_path: Path) -> None:
    parameters = []
    for direct_ranks, hosts in ((32, {HOSTS[0]}), (0, set(HOSTS))):
        logs = _train(tmp_path / str(direct_ranks), direct_ranks)
        assert {_line(log, "store").partition(":")[0] for log in logs} == hosts
        assert {_line(log, "gathered") for log in logs} == {"[0, 1, 2, 3]"}
        assert {_line(log, "steps") for log in logs} == {"6 ranks timed 4"}
        parameters.append({_line(log, "parameters") for log in logs})
    assert len(parameters[0]) == 1
    assert parameters[0] == parameters[1]


def test_a_rank_that_dies_behind_a_relay_is_named_on_both_nodes(bench: Bench) -> None:
    bench_logs = ["node1/log/workerlog.1"]
    bench.start_two(_WAIT, flags=["--nproc_per_node=2", "--direct_ranks=0"])
    bench.wait_for_output("pid", *bench_logs)
    pid = int(_line(Path(bench.folder / bench_logs[0]).read_text(), "pid"))
    os.kill(pid, signal.SIGKILL)
    ended = bench.ended(60)
    assert [one.exit_code for one in ended] == [137, 137], bench.job.report()
    for one in ended:
        assert f"rank 3 ({HOSTS[1]}" in one.output
        assert "SIGKILL" in one.output
