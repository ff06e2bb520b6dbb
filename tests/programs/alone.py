"""Run as one process, without fleet_train: every program with the joint batch. Its results are what ranks must reach.

Arguments: programs and seeds as JSON, and the folder for all files: one .npz and one line of JSON per program and seed,
and what the programs save.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.programs.cases import Records, attempt, compared, run_program
from tests.programs.catalogue import programs
from tests.programs.catalogue.entry import Program
from tests.programs.script import Script, is_linear
from tests.support.worker import digest


def run_alone(program: Program, seed: int, folder: Path) -> dict[str, Any]:
    script = Script(program, seed)
    run_program(program, script)
    sections = {"start": script.start_state, "state": script.end_state, "parameters": script.end_parameters}
    arrays = {f"{section}/{name}": value for section, values in sections.items() for name, value in values.items()}
    np.savez(folder / f"{program.name}-{seed}.npz", allow_pickle=False, **arrays)
    parameters = {name: value for name, value in script.start_state.items() if name in script.end_parameters}
    return {
        "start": digest(script.start_state),
        "end": digest(script.end_state),
        "fetched": script.fetched,
        "moved": compared(script.end_parameters, parameters)["difference"],
        "linear": bool(script.optimizers) and all(map(is_linear, script.optimizers)),
    }


def main() -> None:
    paddle.enable_static()
    chosen, folder = json.loads(sys.argv[1]), Path(sys.argv[2]).resolve()
    os.chdir(folder)  # programs save where they run
    records = Records(folder / "alone.jsonl")
    known = programs()
    for name, seed in chosen:
        attempt(records, f"{name}-{seed}", lambda name=name, seed=seed: run_alone(known[name], seed, folder))
    assert not any(module.partition(".")[0] == "fleet_train" for module in sys.modules), "not plain Paddle"


if __name__ == "__main__":
    main()
