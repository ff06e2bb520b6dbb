"""Run as one process or as two ranks: two optimizers in one program, in each order in which a script can call them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.collectives.host_ops import is_link
from fleet_train.profile import Profile
from tests.support.worker import digest, report

STEPS, SAMPLES = 60, 8
ORDERS = {
    "minimize, minimize": lambda one, two: [optimizer.minimize(loss) for optimizer, loss in (one, two)],
    "backward, backward, apply, apply": lambda one, two: apply_in_order(one, two, (0, 1)),
    "applied the other way round": lambda one, two: apply_in_order(one, two, (1, 0)),
}


def apply_in_order(one: Any, two: Any, order: tuple[int, int]) -> None:
    pairs = [optimizer.backward(loss) for optimizer, loss in (one, two)]
    for index in order:
        (one, two)[index][0].apply_gradients(pairs[index])


def batch(step: int) -> dict[str, np.ndarray]:
    joint = np.random.default_rng(step).standard_normal((SAMPLES, 4)).astype("float32")
    return {"x": np.split(joint, fleet.worker_num())[fleet.worker_index()]}


def chain_is_one(program: Any) -> bool:
    """Whether each operator that talks takes the token of the one before it, in the order of the program."""
    links = [operator for operator in program.global_block().ops if is_link(operator)]
    before = [link.operand_source(0).get_defining_op().id() for link in links[1:]]
    return before == [link.id() for link in links[:-1]]


def run(order: Any, profile: Profile) -> dict[str, Any]:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with (
        paddle.static.program_guard(main, startup),
        paddle.utils.unique_name.guard(),
        paddle.static.scope_guard(paddle.static.Scope()),
    ):
        paddle.seed(3)
        first, second = paddle.nn.Linear(4, 6), paddle.nn.Linear(6, 1)
        output = second(paddle.tanh(first(paddle.static.data("x", [None, 4], "float32"))))
        made = [
            fleet.distributed_optimizer(
                paddle.optimizer.Adam(rate, epsilon=1e-3, parameters=layer.parameters()), profile
            )
            for rate, layer in ((0.1, first), (0.001, second))
        ]
        order((made[0], (output**2).mean()), (made[1], ((output - 1) ** 2).mean()))
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        for step in range(STEPS):
            exe.run(main, feed=batch(step))
        held = {name: np.array(value) for name, value in main.state_dict("all", paddle.static.global_scope()).items()}
    return {
        "chain": chain_is_one(main),
        "state": {name: value.ravel().tolist() for name, value in held.items()},
        "digest": digest(held),
    }


paddle.enable_static()
fleet.init()
settings = {
    "fused": Profile(),
    "unfused, two communicators": Profile(fuse_all_reduce_ops=False, nccl_comm_num=2),
    "waiting": Profile(sync_nccl_allreduce=True, fuse_parameter_groups_size=1),
}
report(
    rank=fleet.worker_index(),
    cases={
        f"{order}; {name}": run(call, profile) for order, call in ORDERS.items() for name, profile in settings.items()
    },
)
