"""Cases one after another in one process, or as one of several ranks, recorded one line each.

Arguments: ``alone``, ``reordered`` or ``ranks``; a file with one case in JSON a line; the folder with what ``alone``
wrote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.programs.alone import attempt, compared, run_alone, run_program
from tests.programs.random_programs.draw import GOES_BACK_AT, SAMPLES, UPDATES, Case, program_of
from tests.programs.script import Batch, Script

_NOISE = 1e-3
"""Of values that are all smaller, the difference is compared with this: a parameter whose gradient is zero, such as a
bias before a norm, is moved by rounding alone."""


def main() -> None:
    paddle.enable_static()
    how, cases = sys.argv[1], [Case.from_json(line) for line in Path(sys.argv[2]).read_text().splitlines()]
    folder = Path(sys.argv[3]).resolve()
    if how == "reordered":
        for case in cases:
            attempt(Path("reordered.jsonl"), case.name, partial(_run_reordered, case, folder))
    elif how == "alone":
        os.chdir(folder)
        for case in cases:
            attempt(folder / "alone.jsonl", case.name, partial(run_alone, program_of(case), folder))
        assert not any(module.startswith("fleet_train.convert") for module in sys.modules), "not plain Paddle"
    else:
        _run_on_ranks(cases, folder)


class _Reordered(Script):
    """The samples of a joint batch in another order: the same numbers but for rounding. Where ranks compute in
    bfloat16, parameters begin as rounded to it."""

    def start(self, startup: Any = None) -> None:
        super().start(startup)
        for name, values in self.state("param").items() if self.is_low else ():
            bits = (values.view("uint32") + np.uint32(1 << 15)) & np.uint32(0xFFFF0000)
            paddle.static.global_scope().find_var(name).get_tensor().set(bits.view("float32"), self.place)

    is_low = False

    def batch(self, step: int, program: Any = None, samples: int = SAMPLES) -> Batch:
        return {
            name: np.roll(values, 1 + step, axis=0)[::-1]
            for name, values in super().batch(step, program, samples).items()
        }


def _run_reordered(case: Case, folder: Path) -> dict[str, Any]:
    program = program_of(case)
    script = _Reordered(program)
    script.is_low = case.in_low_precision
    run_program(program, script)
    with np.load(folder / f"{case.name}.npz") as saved:
        expected = {name.removeprefix("state/"): saved[name] for name in saved if name.startswith("state/")}
        if case.in_low_precision:
            start = {name: saved[f"start/{name}"] for name in script.end_parameters}
            return {"difference": _of_all(script.end_parameters, {name: expected[name] for name in start}, start)}
    return compared(script.end_state, expected, smallest_scale=_NOISE)


def _run_on_ranks(cases: list[Case], folder: Path) -> None:
    from fleet_train import fleet, role_maker

    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    records = Path(f"rank{fleet.worker_index()}.jsonl")
    for case in cases:
        if not attempt(records, case.name, partial(_run_case, case, folder)):
            sys.exit(f"{case} failed")  # the ranks may stand at different places


def _run_case(case: Case, folder: Path) -> dict[str, Any]:
    from fleet_train import fleet
    from fleet_train.errors import FleetTrainError
    from fleet_train.profile import Profile
    from tests.programs.on_ranks import OnRanks, section
    from tests.support.worker import digest

    class Kept(OnRanks):
        """Keeps the whole state, of which a sharded optimizer has a part on each rank."""

        whole: dict[str, Any]

        def batches(self, steps: int = UPDATES, program: Any = None, samples: int = SAMPLES) -> Iterator[Batch]:
            for step, batch in enumerate(super().batches(steps, program, samples)):
                if case.goes_back and step == GOES_BACK_AT:
                    fleet.save_persistables(self.exe, case.name)
                    yield self.batch(steps, program, samples)
                    self.fetched.pop()
                    fleet.load_persistables(self.exe, case.name)
                yield batch

        def finish(self) -> None:
            super().finish()
            self.whole = {name: np.array(one) for name, one in fleet.capture_persistables().state.arrays.items()}

    script = Kept(program_of(case), Profile(**{"collective_timeout_seconds": 60, **case.settings}))
    try:
        run_program(program_of(case), script)
    except FleetTrainError as error:
        if script.runs:
            raise
        return {"refused": f"{type(error).__name__}: {error}"}
    with np.load(folder / f"{case.name}.npz") as saved:
        expected = {name: saved[name] for name in saved}
    start, parameters = section(expected, "start"), section(expected, "parameters")
    state = {name: one for name, one in section(expected, "state").items() if name not in parameters}
    held = {name: one for name, one in script.whole.items() if name in state}
    begun = [name for name in start if name in parameters]
    return {
        "start": compared(script.start_state, {name: start[name] for name in begun}),
        "replica": digest(script.end_parameters),
        "fetched": script.fetched,
        "parameters": compared(script.end_parameters, parameters, smallest_scale=_NOISE),
        "state": compared(held, state, smallest_scale=_NOISE) if script.whole and not case.keeps_own_state else {},
        "moved": _of_all(script.end_parameters, parameters, start),
    }


def _of_all(ours: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]) -> float:
    """How far all parameters together are from where one process has moved them, in parts of that way."""
    apart = sum(float(np.square(ours[name].astype("float64") - expected[name]).sum()) for name in expected)
    way = sum(float(np.square(expected[name].astype("float64") - start[name]).sum()) for name in expected)
    return float(np.sqrt(apart / max(way, 1e-30)))


if __name__ == "__main__":
    main()
