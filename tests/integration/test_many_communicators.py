"""Several process groups over the same ranks form reliably.

Paddle 3.3.1's Gloo groups publish their addresses in the job's TCP store under the rank alone, with no prefix per group
(process_group_gloo.cc: ``connectFullMesh(*_store, ...)``). A second ``new_group`` therefore reads the addresses of the
first whenever a peer is late: "connect [127.0.0.1]:...: Connection refused", or a hang. With five groups, plain Paddle
failed in 12 of 12 runs on 3 and 4 ranks; with a TCPStore of its own for every group, in none of 12.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long

SCRIPT = """
import numpy as np
import paddle
from fleet_train import DistributedStrategy, fleet, role_maker
from tests.support.worker import digest, report

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
x = paddle.static.data("x", [None, 4], "float32")
hidden = x
for _ in range(4):
    hidden = paddle.static.nn.fc(hidden, size=4, activation="tanh")
loss = paddle.mean(hidden)
strategy = DistributedStrategy(nccl_comm_num=4, fuse_all_reduce_ops=False)
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
feed = {"x": np.full((2, 4), fleet.worker_index() + 1, "float32")}
exe.run(fleet.main_program, feed=feed, fetch_list=[loss])
report(digest=digest(paddle.static.default_main_program().state_dict("param", paddle.static.global_scope())))
fleet.shutdown()
"""


def test_four_communicators_on_four_ranks(tmp_path: Path) -> None:
    result = run_ranks(SCRIPT, 4, nodes=2, folder=tmp_path)
    assert len(set(result.of_all("digest"))) == 1
