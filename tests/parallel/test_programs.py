"""Programs of one process and of two ranks: what stays Paddle's own, and two optimizers in one program.

The program of one process is the one of Paddle's own optimizer, unless the profile asks for a pass; two optimizers talk
in one order on every rank, in each order in which a script can call them. The ranks run this file, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.collectives.host_ops import passes_a_token
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report

STEPS, SAMPLES = 20, 8


def apply_the_second_first(one: Any, two: Any) -> None:
    pairs = [optimizer.backward(loss) for optimizer, loss in (one, two)]
    two[0].apply_gradients(pairs[1])
    one[0].apply_gradients(pairs[0])


ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "minimize, minimize": lambda one, two: [optimizer.minimize(loss) for optimizer, loss in (one, two)],
    "applied the other way round": apply_the_second_first,
}


def batch(step: int) -> dict[str, np.ndarray]:
    joint = np.random.default_rng(step).standard_normal((SAMPLES, 4)).astype("float32")
    return {"x": np.split(joint, fleet.worker_num())[fleet.worker_index()]}


def chain_is_one(program: Any) -> bool:
    """Whether each operator that talks takes the token of the one before it, in the order of the program."""
    links = [operator for operator in program.global_block().ops if passes_a_token(operator)]
    before = [link.operand_source(0).get_defining_op().id() for link in links[1:]]
    return before == [link.id() for link in links[:-1]]


def train_two(order: Any, profile: Profile) -> dict[str, Any]:
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


PROFILES = {
    "unfused, two communicators": Profile(fuse_all_reduce_ops=False, nccl_comm_num=2),
    "waiting": Profile(sync_nccl_allreduce=True, fuse_parameter_groups_size=1),
}


def program(wrap: Callable[[Any], Any], make: Callable[[], Any]) -> tuple[str, str]:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [None, 4], "float32")
        hidden = paddle.tanh(paddle.nn.Linear(4, 8)(x))  # static.nn.fc numbers its names on, guard or not
        loss = paddle.mean(paddle.nn.Linear(8, 1)(hidden))
        wrap(make()).minimize(loss, startup)
    # struct_name counts layers over the whole process, guard or not
    return re.sub(r'struct_name:"[^"]*"', "", str(main)), str(startup)


OPTIMIZERS: list[Callable[[], Any]] = [
    lambda: paddle.optimizer.SGD(0.1),
    lambda: paddle.optimizer.Momentum(paddle.optimizer.lr.StepDecay(0.1, 3), 0.9, weight_decay=0.01),
    lambda: paddle.optimizer.AdamW(0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)),
]
# Of one process: whether its program is left as it is.
LEFT: dict[str, tuple[dict[str, Any], bool]] = {
    "accumulate_steps": ({"accumulate_steps": 2}, False),
    "amp_level": ({"amp_level": "O1"}, False),
    "recompute_segments": ({"recompute_segments": 2}, False),
    "use_local_sgd": ({"use_local_sgd": True}, True),
    "compression": ({"compression": "powersgd"}, True),
    "sync_batch_norm": ({"sync_batch_norm": True}, True),
    "nccl_comm_num": ({"nccl_comm_num": 4, "sync_nccl_allreduce": True, "divergence_check_steps": 1}, True),
}


def is_left(make: Callable[[], Any], strategy: Any) -> bool:
    return program(lambda inner: fleet.distributed_optimizer(inner, strategy), make) == program(lambda it: it, make)


def one_process() -> None:
    report(
        left={name: is_left(OPTIMIZERS[1], Profile(**settings)) for name, (settings, _) in LEFT.items()},
        same=[is_left(make, DistributedStrategy()) for make in OPTIMIZERS],
        alone=[fleet.worker_num(), fleet.all_reduce(np.array([2.5])).tolist(), fleet.plan()],
        stop=[fleet.stop_requested(), fleet.request_stop("enough"), fleet.stop_requested()],
    )
    fleet.barrier_worker()
    paddle.disable_static()
    layer = paddle.nn.Linear(2, 1)
    sgd = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    fleet.distributed_optimizer(sgd).minimize(layer(paddle.ones([1, 2])).mean())
    try:
        fleet.distributed_optimizer(sgd, Profile(accumulate_steps=2)).minimize(layer(paddle.ones([1, 2])).mean())
    except ConversionError as error:
        report(refused=str(error))


def unique_names() -> dict[str, int]:
    return dict(paddle.base.unique_name.generator.ids)


def under_a_name_guard() -> list[str]:
    """The names of what a program holds that is built and trained under a guard."""
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard("gen_"),
    ):
        loss = paddle.nn.Linear(8, 1)(paddle.static.data("x", [None, 8], "float32")).mean()
        fleet.distributed_optimizer(paddle.optimizer.Adam(0.001)).minimize(loss)
        exe = paddle.static.Executor(fleet.place())
        exe.run(paddle.static.default_startup_program())
        exe.run(feed={"x": np.ones([4, 8], "float32")})
        return sorted(paddle.static.default_main_program().state_dict("all", paddle.static.global_scope()))


def started_again() -> dict[str, list[bool]]:
    """By what compiles the startup program another time: whether the scope keeps its variables, which the program that
    trains was compiled with, and whether the training is the first one again."""
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.static.scope_guard(paddle.static.Scope()),
    ):
        layer = paddle.nn.Linear(4, 1, weight_attr=paddle.nn.initializer.Constant(0.5))
        loss = (layer(paddle.static.data("x", [None, 4], "float32")) ** 2).mean()
        fleet.distributed_optimizer(paddle.optimizer.Adam(0.1)).minimize(loss)
        main, startup = paddle.static.default_main_program(), paddle.static.default_startup_program()
        scope, exe, other = paddle.static.global_scope(), *(paddle.static.Executor(fleet.place()) for _ in range(2))

        def train() -> tuple[dict[str, Any], str]:
            variables = {name: scope.find_var(name) for name in names}
            for step in range(3):
                exe.run(main, feed=batch(step))
            return variables, digest({name: np.array(each.get_tensor()) for name, each in variables.items()})

        exe.run(startup)
        names = sorted(main.state_dict("all", scope))
        variables, first = train()
        found = {}
        for how in ("another executor", "a copy", "grown"):
            if how == "grown":
                paddle.nn.Linear(4, 2)
            (other if how == "another executor" else exe).run(startup.clone() if how == "a copy" else startup)
            keeps = [scope.find_var(name) is variables[name] for name in names]
            found[how] = [all(keeps), train()[1] == first]
    return found


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    before = unique_names()
    guarded = under_a_name_guard()
    report(fleet.worker_index(), guarded=guarded, names=[before, unique_names()])
    if fleet.worker_num() > 1:
        report(fleet.worker_index(), started_again=started_again())
    cases = {f"{o}; {p}": train_two(order, profile) for o, order in ORDERS.items() for p, profile in PROFILES.items()}
    report(fleet.worker_index(), cases=cases)
    if fleet.worker_num() == 1:
        one_process()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(Path(__file__), 1, nodes=0, folder=tmp_path_factory.mktemp("alone")).values[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return run_ranks(Path(__file__), 2, folder=tmp_path_factory.mktemp("two"))


def test_state_under_a_name_guard_has_the_names_of_one_process(alone: dict[str, Any], two: RanksResult) -> None:
    assert "gen_learning_rate_0" in alone["guarded"]
    assert two.of_all("guarded") == [alone["guarded"]] * 2
    for before, after in [alone["names"], *two.of_all("names")]:
        assert before == after


def test_startup_program_that_is_compiled_again_begins_the_training_anew(two: RanksResult) -> None:
    for found in two.of_all("started_again"):
        assert found == {"another executor": [True, True], "a copy": [True, True], "grown": [True, True]}


def test_program_of_one_process_is_left_unless_another_computation_is_asked_for(alone: dict[str, Any]) -> None:
    assert alone["same"] == [True] * 3
    assert alone["alone"] == [1, [2.5], None]
    assert alone["stop"][0] is None
    assert alone["stop"][2].endswith(": enough"), "a request is known at once"
    assert alone["left"] == {name: is_left for name, (_, is_left) in LEFT.items()}


def test_a_process_alone_in_dynamic_mode_trains_there_as_paddle_does_or_is_told_the_call_that_is_missing(
    alone: dict[str, Any],
) -> None:
    assert "Call paddle.enable_static() at the top of the script, before the network is built" in alone["refused"]


def test_two_optimizers_talk_in_one_chain_and_train_as_in_one_process(alone: dict[str, Any], two: RanksResult) -> None:
    first, second = two.of_all("cases")
    for case, found in first.items():
        assert found["chain"], case
        assert second[case]["chain"], case
        assert found["digest"] == second[case]["digest"], case
        for name, expected in alone["cases"][case]["state"].items():
            np.testing.assert_allclose(found["state"][name], expected, rtol=1e-4, atol=1e-5, err_msg=f"{case}: {name}")
        rates = [values for name, values in found["state"].items() if name.startswith("learning_rate")]
        assert sorted(value for values in rates for value in values) == pytest.approx([0.001, 0.1])


if __name__ == "__main__":
    main()
