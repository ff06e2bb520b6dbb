"""Run as two ranks: a startup program unknown to minimize initialises a layer; LocalSGD from the first step."""

from __future__ import annotations

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.support.worker import report

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
paddle.seed(fleet.worker_index())
main, network, state = (paddle.static.Program() for _ in range(3))
with paddle.static.program_guard(main, network):
    hidden = paddle.nn.Linear(4, 4)(paddle.static.data("x", [None, 4]))
profile = Profile(use_local_sgd=True, local_sgd_is_warm_steps=0, local_sgd_steps=2)
with paddle.static.program_guard(main, state):
    loss = paddle.nn.Linear(4, 1)(hidden).mean()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), profile).minimize(loss, state)
exe = paddle.static.Executor(fleet.place())
for startup in (network, state):
    exe.run(startup)
for _ in range(2):  # on streams, what a step starts from is compared in the next one
    exe.run(main, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
report(fleet.worker_index(), trained=True)
