"""Run as one or two ranks: the entry points of old and new Fleet scripts, each training as its profile does.

Every rank feeds its part of one joint batch, so that one process (all of it) is the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.incubate.optimizer import GradientMergeOptimizer

import fleet_train.fleet as fleet
from fleet_train import DistributedStrategy
from fleet_train.errors import FleetTrainError
from fleet_train.fleet import CollectiveOptimizer
from tests.support.worker import digest, report

STEPS, BATCH = 6, 8
WRITTEN = ("rank0of2/state", "rank0of1/state", "norm, rank0of2/norm", "norm, rank0of1/norm")


def sgd() -> Any:
    return paddle.optimizer.SGD(0.1)


def adam() -> Any:
    return paddle.optimizer.Adam(0.05)


def amp() -> Any:
    return paddle.static.amp.decorate(adam(), level="O1", dtype="bfloat16")


def looking_ahead() -> Any:
    return paddle.incubate.LookAhead(sgd(), alpha=0.5, k=2)


def several() -> Any:
    return GradientMergeOptimizer(amp(), k_steps=2)


def build(with_norm: bool = False) -> Any:
    x, y = paddle.static.data("x", [None, 6]), paddle.static.data("y", [None, 1])
    hidden = paddle.nn.functional.relu(paddle.nn.Linear(6, 16)(x))
    hidden = paddle.nn.BatchNorm1D(16)(hidden) if with_norm else hidden
    out = paddle.nn.Linear(16, 1)(paddle.nn.functional.tanh(paddle.nn.Linear(16, 16)(hidden)))
    return x, out, paddle.nn.functional.mse_loss(out, y)


class Program:
    """A small network with a program, a startup program and a scope of its own; every rank starts from other values."""

    def __init__(self, minimize: Callable[[Any, Any], Any], with_norm: bool = False) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        paddle.seed(7)
        with paddle.static.scope_guard(self.scope), paddle.utils.unique_name.guard():
            with paddle.static.program_guard(self.main, self.startup):
                self.x, self.out, self.loss = build(with_norm)
            minimize(self.loss, self.startup)
            self.exe = paddle.static.Executor(fleet.place())
            self.exe.run(self.startup)

    def train(self, steps: int = STEPS) -> Program:
        rank, ranks = fleet.rank(), fleet.nranks()
        draws = np.random.RandomState(3)
        with paddle.static.scope_guard(self.scope):
            for _ in range(steps):
                x, y = draws.randn(BATCH, 6).astype("float32"), draws.randn(BATCH, 1).astype("float32")
                feed = {"x": x[rank::ranks], "y": y[rank::ranks]}
                self.exe.run(self.main, feed=feed, fetch_list=[] if self.loss is None else [self.loss])
        return self

    def parameters(self) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.main.state_dict("param", self.scope).items()}

    def flat(self) -> Any:
        weights = self.parameters()
        return np.concatenate([weights[name].reshape(-1) for name in sorted(weights) if name.startswith("linear")])


def by(optimizer: Any, strategy: Any = None) -> Callable[[Any, Any], Any]:
    return lambda loss, startup: fleet.distributed_optimizer(optimizer, strategy).minimize(loss, startup)


def by_paddle_alone(make: Callable[[], Any]) -> Callable[[Any, Any], None]:
    def minimize(loss: Any, startup: Any) -> None:
        with paddle.static.program_guard(loss.block.program, startup):
            make().minimize(loss)

    return minimize


def keyword_minimize(loss: Any, startup: Any) -> None:
    CollectiveOptimizer(sgd(), None)
    fleet.minimize(loss, startup_program=startup, parameter_list=None, no_grad_set=None)


def outside_of_its_guard(loss: Any, startup: Any) -> None:
    fleet.distributed_optimizer(sgd()).minimize(loss, startup_program=startup)


def clip() -> Any:
    return paddle.nn.ClipGradByGlobalNorm(0.05)


def clip_set_afterwards(loss: Any, startup: Any) -> None:
    optimizer = fleet.distributed_optimizer(sgd())
    optimizer._grad_clip = clip()
    optimizer.minimize(loss, startup)


def of_the_sum(times: Callable[[], int]) -> Callable[[Any, Any], None]:
    """``times`` the sum over the batch of what ``loss`` is the mean of."""

    def minimize(loss: Any, startup: Any) -> None:
        with paddle.static.program_guard(loss.block.program, startup):
            total = times() * paddle.sum(loss.get_defining_op().operand_source(0))
            fleet.distributed_optimizer(paddle.optimizer.SGD(0.01)).minimize(total)

    return minimize


def trainings() -> None:
    cases = {
        "adam": (adam(), None),
        "several": (several(), None),
        "several by profile": (adam(), DistributedStrategy(amp_level="O1", amp_dtype="bfloat16", accumulate_steps=2)),
        "plain": (sgd(), None),
        "clip": (paddle.optimizer.SGD(0.1, grad_clip=clip()), None),
        "looking ahead": (looking_ahead(), None),
        "looking ahead in small buckets": (looking_ahead(), DistributedStrategy(fuse_parameter_groups_size=1)),
    }
    ways: dict[str, Callable[[Any, Any], Any]] = {name: by(*case) for name, case in cases.items()}
    if fleet.nranks() == 1:
        ways["looking ahead by Paddle alone"] = by_paddle_alone(looking_ahead)
    ways |= {"by fleet.minimize": keyword_minimize, "outside": outside_of_its_guard}
    ways |= {"clip set afterwards": clip_set_afterwards, "sum": of_the_sum(lambda: 1)}
    ways |= {"sum times ranks": of_the_sum(fleet.nranks)}
    digests = {}
    for name, minimize in ways.items():
        program = Program(minimize).train()
        report(fleet.rank(), **{f"weights {name}": program.flat()})
        digests[name] = digest(program.parameters())
    report(fleet.rank(), digests=digests)


def saving(folder: Path) -> None:
    """Paddle's own ways to save, called on a converted program, by this rank alone."""
    program = Program(by(adam())).train(2)
    before = program.flat()
    with paddle.static.scope_guard(program.scope):
        paddle.static.save(program.main, str(folder / "state"))
        paddle.static.save_inference_model(
            str(folder / "deploy"), [program.x], [program.out], program.exe, program=program.main
        )
        kept = paddle.static.normalize_program(program.main, [program.x], [program.out])
        names = [operator.name() for operator in kept.global_block().ops]
    program.train(1)
    with paddle.static.scope_guard(program.scope):
        paddle.static.load(program.main, str(folder / "state"))
    report(
        fleet.rank(),
        loaded_equal=bool((program.flat() == before).all()),
        normalized_has_ours=any("fleet_train" in name for name in names),
    )
    report(fleet.rank(), **{"weights after load": program.train(2).flat()})


def saving_by_profile(folder: Path) -> None:
    """What Paddle's own save says of the program of each profile."""
    profiles = {
        "local": DistributedStrategy(use_local_sgd=True, local_sgd_is_warm_steps=1, local_sgd_steps=4),
        "powersgd": DistributedStrategy(compression="powersgd"),
    }
    told = {}
    for name, strategy in profiles.items():
        program = Program(by(sgd(), strategy)).train(3)
        with paddle.static.scope_guard(program.scope):
            told[name] = message_of(partial(paddle.static.save, program.main, str(folder / name)))
            paddle.static.load(program.main, str(folder / name))
        program.train(1)
    told["startup"] = message_of(lambda: paddle.static.save(fleet.startup_program, str(folder / "startup")))
    report(fleet.rank(), told_when_saving=told)


def on_one_card(folder: Path) -> None:
    """The program that Paddle has written of a converted one, and Paddle's own, train a step each."""
    program = Program(by(sgd(), DistributedStrategy(sync_batch_norm=True)), with_norm=True).train(2)
    with paddle.static.scope_guard(program.scope):
        paddle.static.save(program.main, str(folder / "norm"))
        paddle.static.save_inference_model(
            str(folder / "norm_answers/model"), [program.x], [program.out], program.exe, program=program.main
        )
    written = operators_of(folder / "norm.json")
    ends = []
    for main in (written_program(folder / "norm.json"), None):
        plain = Program(by_paddle_alone(sgd), with_norm=True)
        for value_name, value in program.main.state_dict("all", program.scope).items():
            plain.main.state_dict("all", plain.scope)[value_name].set(np.array(value), fleet.place())
        plain.main = main or plain.main
        plain.loss = None
        plain.train(1)
        ends.append({each: np.array(value) for each, value in plain.main.state_dict("all", plain.scope).items()})
    report(fleet.rank(), written_norm=ends[0], plain_norm=ends[1], operators_norm=written)


class Numbers(paddle.io.Dataset):
    def __init__(self) -> None:
        draws = np.random.RandomState(5)
        self._x, self._y = draws.randn(4 * BATCH, 6).astype("float32"), draws.randint(0, 3, (4 * BATCH, 1))

    def __getitem__(self, index: int) -> Any:
        return self._x[index], self._y[index]

    def __len__(self) -> int:
        return len(self._x)


def paddle_model(folder: Path) -> None:
    """``paddle.Model`` with a wrapped optimizer: it shares the samples out by itself."""
    samples = BATCH // fleet.nranks()
    main, startup = paddle.static.Program(), paddle.static.Program()
    spec = paddle.static.InputSpec
    with (
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.static.program_guard(main, startup),
        paddle.utils.unique_name.guard(),
    ):
        paddle.seed(7)
        network = paddle.nn.Sequential(paddle.nn.Linear(6, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 3))
        model = paddle.Model(network, [spec([None, 6], "float32", "x")], [spec([None, 1], "int64", "y")])
        schedule = paddle.optimizer.lr.StepDecay(0.1, 3)
        optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(schedule, epsilon=1e-3))
        model.prepare(optimizer, paddle.nn.CrossEntropyLoss(), paddle.metric.Accuracy())
        model.fit(Numbers(), batch_size=samples, epochs=2, shuffle=False, verbose=0)
        found = model.evaluate(Numbers(), batch_size=samples, verbose=0)
        scope = paddle.static.global_scope()
        weights = [np.array(scope.find_var(one.name).get_tensor()).reshape(-1) for one in network.parameters()]
        model.save(str(folder / "model"))
        if fleet.rank() == 0:
            saved = paddle.load(str(folder / "model.pdparams"))
            report(0, model_saved=np.concatenate([np.asarray(saved[name]).reshape(-1) for name in sorted(saved)]))
        names = [name for name, _ in network.named_parameters()]
    ordered = [weights[place] for place in sorted(range(len(names)), key=names.__getitem__)]
    report(fleet.rank(), **{"weights by paddle.Model": np.concatenate(ordered)}, accuracy=float(found["acc"]))


def written_program(path: Path) -> Any:
    written = paddle.static.Program()
    paddle.base.core.deserialize_pir_program(str(path), written)
    return written


def operators_of(path: Path) -> list[str]:
    program = written_program(path)  # its operators do not outlive it
    return [operator.name() for operator in program.global_block().ops]


def two_optimizers(folder: Path) -> None:
    """Both backward passes before both updates: what is written must not mix up their gradients."""

    def minimize(loss: Any, startup: Any) -> None:
        with paddle.static.program_guard(loss.block.program, startup):
            first, second = fleet.distributed_optimizer(sgd()), fleet.distributed_optimizer(sgd())
            parameters = loss.block.program.global_block().all_parameters()
            halves = parameters[:2], parameters[2:]
            pairs = first.backward(loss, startup, halves[0]), second.backward(loss * 2, startup, halves[1])
            first.apply_gradients(pairs[0])
            second.apply_gradients(pairs[1])

    program = Program(minimize)
    with paddle.static.scope_guard(program.scope):
        paddle.static.save(program.main, str(folder / "two"))
    written = written_program(folder / "two.json")
    shapes = [
        [list(operator.operand_source(i).shape) for i in (0, 2)]
        for operator in written.global_block().ops
        if operator.name() == "pd_op.sgd_"
    ]
    report(fleet.rank(), updates=shapes)


def refusals() -> None:
    """Calls that are refused, on one process as on two ranks."""
    decorated = fleet.distributed_optimizer(amp())
    plain = fleet.distributed_optimizer(sgd())

    def lists(listed: Callable[[Any, Any], Any], argument: str = "parameters") -> str:
        """``minimize`` with what is listed of a program and its clone; a further parameter is not in the loss."""

        def minimize(loss: Any, startup: Any) -> None:
            copy = loss.block.program.clone()
            with paddle.static.program_guard(loss.block.program, startup):
                paddle.create_parameter([2], "float32", name="idle")
            own, others = (each.global_block().all_parameters() for each in (loss.block.program, copy))
            by_optimizer = listed(own, others) if argument == "optimizer" else None
            optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=by_optimizer))
            optimizer.minimize(loss, startup, **({} if by_optimizer else {argument: listed(own, others)}))

        return message_of(lambda: Program(minimize))

    def fetch_of_a_copy() -> None:
        program = Program(by(sgd()))
        program.main = program.main.clone()
        program.train(1)

    def outside_without_startup() -> None:
        with paddle.static.scope_guard(paddle.static.Scope()):
            Program(lambda loss, _: plain.minimize(loss))

    report(
        fleet.rank(),
        refused={
            "no startup program": message_of(outside_without_startup),
            "amp_init": message_of(lambda: decorated.amp_init(fleet.place())),
            "amp_init without amp": message_of(lambda: plain.amp_init(fleet.place())),
            "wrapped twice": message_of(lambda: fleet.distributed_optimizer(plain)),
            "two names": message_of(lambda: plain.minimize(None, parameters=[1], parameter_list=[1])),
            "of a copy": lists(lambda _, others: others[:1]),
            "optimizer of a copy": lists(lambda _, others: others, "optimizer"),
            "untrained of a copy": lists(lambda _, others: {others[0]}, "no_grad_set"),
            "no such name": lists(lambda own, _: [own[0].name, "fc_0.w_0"]),
            "twice": lists(lambda own, _: [own[0], own[1], own[0]]),
            "optimizer twice": lists(lambda own, _: [own[0], own[0]], "optimizer"),
            "none": lists(lambda own, _: [one for one in own if "fc" in one.name]),
            "not in the loss": lists(lambda own, _: [one for one in own if one.name == "idle"]),
            "no parameter": lists(lambda own, _: [own[0].block.ops[-1].result(0)]),
            "healthy": lists(lambda own, _: [one.name for one in own[:3]]),
            "healthy optimizer": lists(lambda own, _: own, "optimizer"),
            "fetch of a copy": message_of(fetch_of_a_copy),
        },
        wrapping_ours={name: message_of(partial(wrap, plain)) for name, wrap in WRAPPERS.items()},
    )


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "paddle.static.amp.decorate": lambda ours: paddle.static.amp.decorate(ours, dtype="bfloat16"),
    "GradientMergeOptimizer": lambda ours: GradientMergeOptimizer(ours, k_steps=2),
    "RecomputeOptimizer": lambda ours: paddle.incubate.optimizer.RecomputeOptimizer(optimizer=ours),
    "LookAhead": paddle.incubate.LookAhead,
    "PipelineOptimizer": paddle.incubate.optimizer.PipelineOptimizer,
}


def averaged(name: str, strategy: DistributedStrategy | None) -> None:
    """Moving averages by Paddle's name: the averaged weights, and what is trained behind the block."""
    averages: list[Any] = []

    def minimize(loss: Any, startup: Any) -> None:
        by(sgd(), strategy)(loss, startup)
        with paddle.static.program_guard(loss.block.program, startup):
            averages.append(paddle.static.ExponentialMovingAverage(0.9))
            averages[0].update()

    program = Program(minimize)
    found = [program.train(1).flat() for _ in range(STEPS)]
    with paddle.static.scope_guard(program.scope), averages[0].apply(program.exe):
        within = program.flat()
    trained = {f"averaged {name}": within, f"trained {name}": np.stack(found)}
    report(fleet.rank(), restored=bool((program.flat() == found[-1]).all()), **trained)


AVERAGED = {"each step": None, "merged": DistributedStrategy(accumulate_steps=2)}
NOT_AVERAGED = {
    "use_local_sgd": DistributedStrategy(use_local_sgd=True),
    "sharding": DistributedStrategy(sharding=True),
}


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except FleetTrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def helpers() -> None:
    rank, output = fleet.rank(), np.zeros(2)
    fleet.all_reduce_worker(np.array([1.0, rank]), output)
    fleet.util.barrier()
    report(
        rank,
        roles=[fleet.is_worker(), fleet.is_server(), fleet.server_num(), fleet.server_endpoints(True)],
        same=[fleet.rank() == fleet.worker_index(), fleet.world_size() == fleet.nranks() == fleet.worker_num()],
        summed=fleet.util.all_reduce([1, rank + 1], "sum", "worker").tolist(),
        mean=fleet.all_reduce(input=np.array([1.0, rank]), mode="mean").tolist(),
        written=output.tolist(),
        gathered=fleet.util.all_gather(10 * rank, "all"),
        shard=[fleet.util.get_file_shard(list("abcde")), fleet.split_files(["a"])],
        endpoints=fleet.worker_endpoints(to_string=True) == ",".join(fleet.worker_endpoints()),
        origin=fleet._origin_program is fleet.main_program,
        groups=fleet.profile().fuse_parameter_groups_size,
    )
    fleet.util.print_on_rank("printed by the last rank", fleet.nranks() - 1)
    fleet.init_worker()
    fleet.stop_worker()


def main() -> None:
    folder = Path(sys.argv[1])
    paddle.enable_static()
    strategy = fleet.DistributedStrategy()
    strategy.fuse_parameter_groups_size = 2
    given = fleet.init(fleet.PaddleCloudRoleMaker(is_collective=True), True, strategy)
    report(fleet.rank(), returned=given is fleet)
    trainings()
    saving(folder / f"rank{fleet.rank()}of{fleet.nranks()}")
    saving_by_profile(folder / f"by profile, rank{fleet.rank()}of{fleet.nranks()}")
    on_one_card(folder / f"norm, rank{fleet.rank()}of{fleet.nranks()}")
    paddle_model(folder / f"model, rank{fleet.rank()}of{fleet.nranks()}")
    two_optimizers(folder / f"two, rank{fleet.rank()}of{fleet.nranks()}")
    for name, strategy in AVERAGED.items():
        averaged(name, strategy)
    report(
        fleet.rank(),
        not_averaged={name: message_of(partial(averaged, name, strategy)) for name, strategy in NOT_AVERAGED.items()},
    )
    refusals()
    helpers()
    if fleet.nranks() == 1:  # behind the two ranks
        report(0, operators=[operators_of(folder / f"{name}.json") for name in WRITTEN])


main()
