"""Run as ranks: programs with strategies, one case after another, each compared with the result of one process.

Arguments: the cases as JSON (program, strategy), and the folder with what ``alone.py`` wrote. Lossy strategies,
and programs that draw random numbers, are compared with the simulation of all ranks: the gradients are Paddle's,
everything else is numpy's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert.passes import pipeline
from fleet_train.errors import FleetTrainError
from fleet_train.plan import CommPlan
from fleet_train.plan.simulate import Adam, Local, Momentum, NumpyOptimizer, Sgd, SimulatedJob
from fleet_train.profile import Profile, load_profile
from tests.programs.alone import attempt, compared, run_program
from tests.programs.catalogue import EXACT, LOSSY, Program, Strategy, programs
from tests.programs.script import Array, Batch, Script, share_of
from tests.support.worker import digest

# A rank that fails in a case must not keep the other for minutes.
_BOUND_SECONDS = 40
_IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": True, "FLAGS_new_executor_sequential_run": True}


class OnRanks(Script):
    """One rank with its share of the joint batch, and the strategy's micro-batches."""

    def __init__(self, program: Program, profile: Profile) -> None:
        super().__init__(program)
        self.rank, self.ranks = fleet.worker_index(), fleet.worker_num()
        self.profile, self.micro_batches = profile, profile.accumulate_steps
        self.place = fleet.place()

    def wrap(self, optimizer: Any) -> Any:
        self.optimizers.append(optimizer)
        return fleet.distributed_optimizer(optimizer, self.profile)

    def start(self, startup: Any = None) -> None:
        # Random start values are drawn in the order of the program, as one process does it.
        chosen = paddle.get_flags(list(_IN_PROGRAM_ORDER))
        paddle.set_flags(_IN_PROGRAM_ORDER)
        super().start(startup)
        paddle.set_flags(chosen)

    def mean_over_ranks(self, value: float) -> float:
        return float(fleet.all_reduce(np.array([value])).item() / self.ranks)

    def save(self, schedule: Any = None) -> None:
        del schedule  # known by its program
        fleet.save_persistables(self.exe, self.name, paddle.static.default_main_program())

    def load(self, schedule: Any = None) -> None:
        del schedule
        fleet.load_persistables(self.exe, self.name, paddle.static.default_main_program())

    def finish(self) -> None:
        for main in self.programs:
            fleet.synchronize_parameters(main)
        super().finish()


def profile_of(strategy: Strategy) -> Profile:
    bound = {"collective_timeout_seconds": _BOUND_SECONDS}
    if not strategy.profile:
        return Profile(**strategy.settings | bound)
    return load_profile(strategy.profile).with_settings("the test", **bound)


def run_on_ranks(program: Program, name: str, folder: Path) -> dict[str, Any]:
    strategy, accused = EXACT[name], []
    pipeline.say = lambda found, *_: accused.extend(f"{each.name()}: {why}" for each, why in found.undecided)
    script = OnRanks(program, profile_of(strategy))
    try:
        run_program(program, script)
    except FleetTrainError as error:
        if script.runs or not program.refusal(name):
            raise
        return {"refused": str(error)}
    alike = None
    if otherwise := same_bits_with(name):
        other = OnRanks(program, profile_of(strategy).with_settings("the test", **otherwise))
        run_program(program, other)
        alike = digest(other.end_state) == digest(script.end_state) and other.fetched == script.fetched
    with np.load(folder / f"{program.name}.npz") as saved:
        expected = {name: saved[name] for name in saved}
    parameters = section(expected, "parameters")
    state = {name: value for name, value in section(expected, "state").items() if name not in parameters}
    ours = {name: value for name, value in script.end_state.items() if name not in parameters}
    replicated = script.end_parameters if strategy.own_state else script.end_state
    start = section(expected, "start")
    common = [name for name in start if name in (parameters if strategy.own_state else start)]
    return {
        "start": compared(script.start_state, {name: start[name] for name in common}),
        "replica": digest(replicated),
        "fetched": script.fetched,
        "accused": accused,
        "alike": alike,
        "parameters": compared(script.end_parameters, parameters, program.noise),
        "state": compared(ours, state, program.noise),
    }


def same_bits_with(strategy: str) -> dict[str, Any]:
    """The settings beside a strategy's with which ranks with equal counts get the same bits."""
    if strategy.startswith("next step"):
        return {"overlap_next_step": False}
    return {"average_over": "ranks"} if strategy == "multi_node" else {}


def section(expected: dict[str, Array], name: str) -> dict[str, Array]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in expected.items() if key.startswith(prefix)}


def run_simulated(program: Program, strategy: Strategy) -> dict[str, Any]:
    profile = profile_of(strategy)
    script = Synchronised(program, profile)
    run_program(program, script)
    plan = fleet.plan()
    assert plan is not None
    reference = Simulation(program, profile, plan, script)
    run_program(program, reference)
    # The simulator computes in float32 throughout.
    values = {name: value.astype(script.own_parameters[name].dtype) for name, value in reference.values.items()}
    return {
        "simulated": compared(script.own_parameters, values, program.noise),
        "replica": digest(script.end_parameters),
    }


class Synchronised(OnRanks):
    """Keeps what this rank holds at the end, before LocalSGD is made equal."""

    own_parameters: dict[str, Array]

    def finish(self) -> None:
        self.own_parameters = self.state("param")
        super().finish()


class Simulation(Script):
    """All ranks of the plan in this process, for programs of one optimizer and one training program."""

    def __init__(self, program: Program, profile: Profile, plan: CommPlan, real: Script) -> None:
        super().__init__(program)
        self.real_rank, self.ranks = real.rank, plan.world_size
        self._plan, self._profile, self._real_start = plan, profile, real.start_state
        self._pairs: list[tuple[str, Any]] = []
        self._job: SimulatedJob | None = None

    def wrap(self, optimizer: Any) -> Any:
        self.optimizers.append(optimizer)
        return _Recorder(optimizer, self._pairs)

    def start(self, startup: Any = None) -> None:
        super().start(startup)
        held = paddle.static.default_main_program().state_dict("all", paddle.static.global_scope())
        start = {name: self._real_start[name] for name in held}
        (optimizer,) = self.optimizers
        self._job = SimulatedJob(self._plan, self._profile, start, lambda: numpy_reference(optimizer))

    def run(self, batch: Batch, fetch: Sequence[Any] = (), program: Any = None) -> list[Array]:
        assert self._job is not None
        assert program is None
        found: list[Array] = []
        merged = self._profile.accumulate_steps
        for micro in range(merged):
            parts = [share_of(batch, rank * merged + micro, self.ranks * merged) for rank in range(self.ranks)]

            def backward(rank: int, values: Mapping[str, Array], parts: list[Batch] = parts) -> Local:
                local, found[:] = self._backward(rank, values, parts[rank], fetch)
                return local

            self._job.rate = float(self.optimizers[0].get_lr())
            self._job.step(backward)
            self.runs += 1
        return found

    def _backward(
        self, rank: int, values: Mapping[str, Array], part: Batch, fetch: Sequence[Any]
    ) -> tuple[Local, list[Array]]:
        main, scope = paddle.static.default_main_program(), paddle.static.global_scope()
        for name, held in main.state_dict("all", scope).items():
            held.set(values[name].astype(self._real_start[name].dtype), self.place)
        if self.random:
            paddle.seed(self._random_seed(rank))
        wanted = [*fetch, *(value for _, value in self._pairs)]
        results = self.exe.run(main, feed=part, fetch_list=wanted)
        gradients: dict[str, Array] = {}
        for (name, _), value in zip(self._pairs, results[len(fetch) :], strict=True):
            gradients[name] = gradients[name] + value if name in gradients else value
        others = {n: np.array(v) for n, v in main.state_dict("all", scope).items() if n not in gradients}
        return Local(gradients, statistics=others), results[: len(fetch)]

    def finish(self) -> None:
        assert self._job is not None
        names = paddle.static.default_main_program().state_dict("param", paddle.static.global_scope())
        self.values = {name: self._job.ranks[self.real_rank][name] for name in names}


class _Recorder:
    """Stands for the wrapped optimizer: makes the backward pass and no update."""

    def __init__(self, inner: Any, pairs: list[tuple[str, Any]]) -> None:
        self._inner, self._pairs = inner, pairs

    def minimize(self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None) -> None:
        found = self._inner.backward(loss, startup_program, parameters, no_grad_set)
        self._pairs += [(parameter.name, value) for parameter, value in found if value is not None]


def numpy_reference(optimizer: Any) -> NumpyOptimizer:
    """The numpy optimizer that computes what this one of Paddle's does."""
    kind = type(optimizer).__name__
    if kind == "Momentum":
        decay = optimizer._default_dict["regularization_coeff"]
        return Momentum(optimizer._momentum, optimizer._use_nesterov, decay)
    if kind == "Adam":
        return Adam(optimizer._beta1, optimizer._beta2, optimizer._epsilon)
    assert kind == "SGD", f"no reference for {kind}"
    return Sgd()


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    chosen, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    records = Path(f"rank{fleet.worker_index()}.jsonl")
    known = programs()
    for name, strategy in chosen:
        program = known[name]
        if strategy in EXACT and not program.random:
            run = partial(run_on_ranks, program, strategy, folder)
        else:
            run = partial(run_simulated, program, (EXACT | LOSSY)[strategy])
        if not attempt(records, f"{name}, {strategy}", run):
            sys.exit(f"{name}, {strategy} failed")  # the ranks may stand at different places


if __name__ == "__main__":
    main()
