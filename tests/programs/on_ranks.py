"""Run as ranks: programs with strategies, one case after another, each compared with the result of one process.

Arguments: the cases as JSON (program, seed, strategy), and the folder with what ``alone.py`` wrote.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert.passes import batch_sums
from fleet_train.convert.passes.batch_sums import sum_over_batch
from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile, load_profile
from tests.programs.cases import Records, attempt, compared, run_program
from tests.programs.catalogue import programs
from tests.programs.catalogue.entry import Program
from tests.programs.feeds import Array
from tests.programs.script import Script
from tests.programs.simulation import Simulation
from tests.programs.strategies import EXACT, LOSSY, Strategy
from tests.support.worker import digest

# A rank that fails in a case must not keep the other for minutes.
_BOUND_SECONDS = 40
_IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": True, "FLAGS_new_executor_sequential_run": True}


class OnRanks(Script):
    """One rank with its share of the joint batch, and the strategy's micro-batches."""

    def __init__(self, program: Program, seed: int, profile: Profile) -> None:
        super().__init__(program, seed)
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

    def save(self) -> None:
        fleet.save_persistables(self.exe, self.name, paddle.static.default_main_program())

    def load(self) -> None:
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


def run_on_ranks(program: Program, seed: int, name: str, folder: Path) -> dict[str, Any]:
    strategy, accused = EXACT[name], []
    batch_sums.sum_over_batch = lambda *given: accused.append(sum_over_batch(*given)) or accused[-1]
    script = OnRanks(program, seed, profile_of(strategy))
    try:
        run_program(program, script)
    except FleetTrainError as error:
        if script.runs or not program.refusal(name):
            raise
        return {"refused": str(error)}
    with np.load(folder / f"{program.name}-{seed}.npz") as saved:
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
        "end": digest(script.end_state),
        "fetched": script.fetched,
        "accused": [place for place in accused if place],
        "parameters": compared(script.end_parameters, parameters, program.noise),
        "state": compared(ours, state, program.noise),
    }


def section(expected: dict[str, Array], name: str) -> dict[str, Array]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in expected.items() if key.startswith(prefix)}


def run_simulated(program: Program, seed: int, strategy: Strategy) -> dict[str, Any]:
    profile = profile_of(strategy)
    script = Synchronised(program, seed, profile)
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


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    chosen, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    records = Records(Path(f"rank{fleet.worker_index()}.jsonl"))
    known = programs()
    for name, seed, strategy in chosen:
        case, program = f"{name}-{seed}, {strategy}", known[name]
        if strategy in EXACT and not program.random:
            run = partial(run_on_ranks, program, seed, strategy, folder)
        else:
            run = partial(run_simulated, program, seed, (EXACT | LOSSY)[strategy])
        if not attempt(records, case, run):
            sys.exit(f"{case} failed")  # the ranks may stand at different places; another launch goes on


if __name__ == "__main__":
    main()
