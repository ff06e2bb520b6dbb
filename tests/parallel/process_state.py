"""Run as one process or as several ranks: Paddle's process-wide state after each call of a script."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import paddle
from paddle.base import core, framework, unique_name

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.support.worker import report

# Paddle sets it whenever an operator in Python runs, and reads it in its own C++ operators only, which set it, too.
OF_PADDLES_OWN = ("FLAGS_tensor_operants_mode",)


def state() -> dict[str, Any]:
    """Comparable between processes: objects count by whether they are still the ones of the start."""
    in_new_thread: list[bool] = []
    thread = threading.Thread(target=lambda: in_new_thread.append(paddle.in_dynamic_mode()))
    thread.start()
    thread.join()
    now = objects()
    return {
        "names": dict(unique_name.generator.ids),
        "dynamic": paddle.in_dynamic_mode(),
        "dynamic in a new thread": in_new_thread[0],
        "device": paddle.get_device(),
        "default dtype": paddle.get_default_dtype(),
        "flags": {
            name: str(core.globals()[name])
            for name in core.globals().keys()  # noqa: SIM118 (it is no dict)
            if name not in OF_PADDLES_OWN
        },
        **{name: now[name] is START[name] for name in START},
    }


def objects() -> dict[str, Any]:
    return {
        "name generator": unique_name.generator,
        "main program": paddle.static.default_main_program(),
        "startup program": paddle.static.default_startup_program(),
        "main program of the old IR": framework._main_program_,
        "startup program of the old IR": framework._startup_program_,
        "scope": paddle.static.global_scope(),
    }


paddle.enable_static()
START = objects()
seen = {"start": state()}
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
seen["init"] = state()

x = paddle.static.data("x", [None, 8], "float32")
loss = paddle.static.nn.fc(paddle.static.nn.fc(x, 8, activation="tanh"), 1).mean()
profile = Profile(nccl_comm_num=2, fuse_parameter_groups_size=1)
fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), profile).minimize(loss)
seen["minimize"] = state()

exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
seen["startup program"] = state()
for _ in range(20):
    exe.run(feed={"x": np.ones([4, 8], "float32")})
seen["steps"] = state()
fleet.all_reduce(np.ones(3, "float32"))
fleet.synchronize_parameters()
fleet.barrier_worker()
seen["facade"] = state()

again = paddle.static.nn.fc(paddle.static.nn.fc(x, 8), 1).mean()
names = [value.name for value in paddle.static.default_main_program().global_block().all_parameters()]
with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
    with paddle.utils.unique_name.guard("gen_"):
        other = paddle.static.nn.fc(paddle.static.data("x", [None, 8], "float32"), 1).mean()
        fleet.distributed_optimizer(paddle.optimizer.Adam(0.001), profile).minimize(other)
    exe.run(paddle.static.default_startup_program())
    exe.run(feed={"x": np.ones([4, 8], "float32")})
    guarded = sorted(paddle.static.default_main_program().state_dict("all", paddle.static.global_scope()))
seen["a second program"] = state()
report(rank=fleet.worker_index(), seen=seen, names=names, guarded=guarded)
