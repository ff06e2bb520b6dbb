"""Run as ranks: trainings with ``overlap_next_step`` and without, by scripts that look at variables between steps.

The argument is a list of cases as JSON: (what the script does, the network, settings). Each training notes what it saw,
in order; the ranks report whether both saw the same bits, and how the overlapping one ran.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
from paddle import nn, static
from paddle.nn import functional as F

from fleet_train import compat, fleet, role_maker
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import kind_of
from fleet_train.convert.next_step.rotate import rotate
from fleet_train.convert.session import current
from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile
from tests.support.worker import digest, report

STEPS = 9


def norms(x: Any) -> Any:
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1D(24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 5)
    )(x)


def table(x: Any) -> Any:
    ids = (x[:, :3].abs() * 16).cast("int64").clip(0, 39)
    return nn.Linear(8, 5)(F.tanh(nn.Embedding(40, 8)(ids).mean(1)))


def tied(x: Any) -> Any:
    shared = nn.Linear(8, 8)
    return nn.Linear(8, 5)(F.dropout(F.tanh(shared(F.tanh(shared(x)))), 0.2))


NETWORKS: dict[str, Callable[[Any], Any]] = {each.__name__: each for each in (norms, table, tied)}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda rate: paddle.optimizer.Momentum(rate, 0.9),
    "adamw": lambda rate: paddle.optimizer.AdamW(rate, weight_decay=0.1),
    "sgd": lambda rate: paddle.optimizer.SGD(rate),
    "clipped": lambda rate: paddle.optimizer.Momentum(rate, 0.9, grad_clip=nn.ClipGradByGlobalNorm(0.5)),
}


class Training:
    """One training. ``seen``: digests of what the script saw, in order."""

    def __init__(self, network: str, settings: dict[str, Any], folder: Path) -> None:
        self.folder, self.seen = folder, list[str]()
        settings = dict(settings)
        make = OPTIMIZERS[settings.pop("optimizer", "momentum")]
        self.broken = settings.pop("broken", [])
        self.scope, self.main, self.startup = static.Scope(), static.Program(), static.Program()
        self.rate = paddle.optimizer.lr.ExponentialDecay(0.1, 0.9)
        self.exe = static.Executor(fleet.place())
        paddle.seed(3)
        with self.guards():
            self.x, self.y = static.data("x", [None, 8]), static.data("y", [None, 1], "int64")
            self.loss = F.cross_entropy(NETWORKS[network](self.x), self.y)
            self.judging = self.main.clone()
            self.optimizer = fleet.distributed_optimizer(make(self.rate), Profile(**settings))
            self.optimizer.minimize(self.loss)
            self.exe.run(self.startup)

    @contextlib.contextmanager
    def guards(self) -> Iterator[None]:
        with (
            static.program_guard(self.main, self.startup),
            static.scope_guard(self.scope),
            paddle.utils.unique_name.guard(),
        ):
            yield

    def batch(self, step: int) -> dict[str, Any]:
        random = np.random.default_rng([step, fleet.worker_index()])
        x = random.standard_normal((6, 8)).astype("float32")
        return {"x": np.full_like(x, np.nan) if step in self.broken else x, "y": random.integers(0, 5, (6, 1))}

    def step(self, step: int, *more: Any, program: Any = None) -> None:
        paddle.seed(100 + step)
        found = self.exe.run(program or self.main, feed=self.batch(step), fetch_list=[self.loss, *more])
        self.note(*found)
        self.rate.step()

    def note(self, *arrays: Any) -> None:
        self.seen.append(digest({str(place): np.asarray(each) for place, each in enumerate(arrays)}))

    def parameter(self) -> str:
        return str(sorted(each.name for each in self.main.global_block().all_parameters() if each.trainable)[0])

    def value(self) -> Any:
        """A parameter, as scripts read it."""
        return np.array(static.global_scope().find_var(self.parameter()).get_tensor())


def plain(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)


def reads(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        if step % 3 == 1 and (step > 4 or fleet.worker_index() == 0):  # also one rank alone
            training.note(training.value())


def writes(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        if step in (2, 6):
            tensor = static.global_scope().find_var(training.parameter()).get_tensor()
            tensor.set(np.array(tensor) * np.float32(0.5), fleet.place())


def fetches(training: Training) -> None:
    parameter = training.main.get_parameter_value_by_name(training.parameter())
    for step in range(STEPS):
        training.step(step, *([parameter] if step in (3, 4, 7) else []))


def evaluates(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        if step % 4 == 2:
            training.exe.run(training.judging, feed=training.batch(50), fetch_list=[])
            training.note(training.value())


def saves(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        if step == 3:
            fleet.save_persistables(training.exe, training.folder, training.main)
        if step == 5:
            fleet.load_persistables(training.exe, training.folder, training.main)
        if step == 6:
            held = training.main.state_dict("all", static.global_scope())
            training.note(*(np.array(held[name]) for name in sorted(held)))


def flushes(training: Training) -> None:
    tensor = None
    for step in range(STEPS):
        training.step(step)
        tensor = tensor or static.global_scope().find_var(training.parameter()).get_tensor()
        if step % 2:
            fleet.flush()
            training.note(np.array(tensor))


def begins_again(training: Training) -> None:
    for step in range(STEPS):
        if step == 4:
            paddle.seed(5)
            training.exe.run(training.startup)
        training.step(step)


def in_two_scopes(training: Training) -> None:
    other = static.Scope()
    with static.scope_guard(other):
        paddle.seed(5)
        training.exe.run(training.startup)
    for step in range(STEPS):
        training.step(step)
        if step % 3 == 0:
            with static.scope_guard(other):
                training.step(step)
    with static.scope_guard(other):
        training.note(training.value())


def copies(training: Training) -> None:
    copy = compat.clone(training.main)
    for step in range(STEPS):
        training.step(step, program=copy if step in (2, 3, 4, 7) else None)


def fails_between(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        if step in (2, 5):
            with contextlib.suppress(ValueError, RuntimeError, KeyError):
                training.exe.run(training.main, feed={"x": np.zeros((6, 7), "float32")}, fetch_list=[training.loss])


def closes(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
    training.exe.close()
    training.note(training.value())


def fails_inside(training: Training) -> None:
    """A label is out of range: the loss cannot be computed, on any rank."""
    for step in range(STEPS):
        training.step(step)
        if step == 4:
            batch = training.batch(step) | {"y": np.full((6, 1), 77)}
            with contextlib.suppress(IndexError):
                training.exe.run(training.main, feed=batch, fetch_list=[training.loss])


def sets_the_rate(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        training.rate.base_lr = 0.1 if step % 2 else 0.01


def fetches_always(training: Training) -> None:
    parameter = training.main.get_parameter_value_by_name(training.parameter())
    for step in range(STEPS):
        training.step(step, parameter)


def reads_always(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        training.note(training.value())


def evaluates_always(training: Training) -> None:
    for step in range(STEPS):
        training.step(step)
        training.exe.run(training.judging, feed=training.batch(50), fetch_list=[])


PREVENTED: dict[str, Callable[[Training], None]] = {
    each.__name__: each for each in (fetches_always, reads_always, evaluates_always)
}
OTHERS = {"fails_inside": fails_inside}
SCRIPTS: dict[str, Callable[[Training], None]] = {
    each.__name__: each
    for each in (
        *(plain, reads, writes, fetches, evaluates, saves, flushes),
        *(begins_again, in_two_scopes, copies, fails_between, sets_the_rate, closes),
    )
}


def order_of(training: Training) -> list[list[str]]:
    """The layers and communications of the program and of its steady part, in the order of the operators."""
    rotation = rotate(training.main, postponed=[1])
    found = []
    for program in (training.main, rotation.first.program, rotation.steady.program, rotation.flush.program):
        names = []
        for operator in program.global_block().ops:
            kind, name = kind_of(operator), operator.name()
            if kind in ("launch", "wait"):
                names.append(f"{kind} {name.split('_')[5]}")
            elif name in ("pd_op.matmul", "pd_op.momentum_", "pd_op.cross_entropy_with_softmax"):
                names.append({"matmul": "layer", "momentum_": "update"}.get(name[6:], "loss"))
        found.append(names)
    return found


class Counted:
    """Counts the waits of runs that come before their first launch: those of the run before."""

    def __init__(self) -> None:
        self.early, self._has_launched = 0, True
        launch, wait = GradientExchange.launch, GradientExchange.wait

        def launches(exchange: Any, index: int, *rest: Any) -> None:
            self._has_launched = True
            launch(exchange, index, *rest)

        def waits(exchange: Any, index: int) -> Any:
            self.early += exchange.launched == len(exchange.methods) and self.is_running and not self._has_launched
            return wait(exchange, index)

        self.is_running = False
        self._patches = [
            mock.patch.object(GradientExchange, "launch", launches),
            mock.patch.object(GradientExchange, "wait", waits),
        ]
        run = static.Executor.run

        def counted_run(executor: Any, *args: Any, **named: Any) -> Any:
            self._has_launched, self.is_running = False, True
            try:
                return run(executor, *args, **named)
            finally:
                self.is_running = False

        self._patches.append(mock.patch.object(static.Executor, "run", counted_run))

    def __enter__(self) -> Counted:
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for each in reversed(self._patches):
            each.stop()


def train(script: str, network: str, settings: dict[str, Any], folder: Path) -> tuple[list[str], int]:
    training = Training(network, settings, folder)
    with training.guards(), Counted() as counted:
        (SCRIPTS | PREVENTED | OTHERS)[script](training)
    with training.guards():
        held = training.main.state_dict("all", static.global_scope())
        training.note(*(np.array(held[name]) for name in sorted(held)))
    return training.seen, counted.early


def compare(script: str, network: str, settings: dict[str, Any]) -> dict[str, Any]:
    seen, early = [], []
    for overlaps in (False, True):
        try:
            found, waits = train(
                script, network, settings | {"overlap_next_step": overlaps}, Path(f"{script}-{overlaps}")
            )
        except FleetTrainError as error:
            return {"refused": str(error)}
        seen.append(found)
        early.append(waits)
    different = [place for place, (one, other) in enumerate(zip(*seen, strict=True)) if one != other]
    return {"different": different, "seen": len(seen[0]), "early": early}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    found: dict[str, Any] = {}
    for script, network, settings in json.loads(sys.argv[1]):
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        found[f"{script} {network} {words}".strip()] = compare(script, network, settings)
    if not found:
        found["order"] = order_of(Training("norms", {"fuse_parameter_groups_size": 2}, Path("order")))
    if not any("refused" in case for case in found.values()):  # then another rank may have ended
        assert current().job.failure is None
    report(fleet.worker_index(), cases=found)


if __name__ == "__main__":
    main()
