"""One process, without fleet_train: programs with the joint batch. Its results are what ranks must reach.

Arguments: programs as JSON, and the folder for all files: one .npz and one line of JSON per program, and what the
programs save. What one case is, and its record, is the same on ranks (``on_ranks.py``).
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.programs.catalogue import Program, programs
from tests.programs.script import Array, Script, is_linear

# What gradient merge and recompute add to a program's state.
_OF_PASSES = ("@gradient_merge", "gradient_merge_count")


def record(path: Path, case: str, **found: Any) -> None:
    """Add a line of JSON at once: what was finished is known even when the process dies."""
    with path.open("a") as sink:
        sink.write(json.dumps({"case": case, **found}) + "\n")


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """What is known of each case, later lines over earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        found.setdefault(values.pop("case"), {}).update(values)
    return found


@contextmanager
def clean_state(rank: int) -> Iterator[None]:
    """Default programs, scope and unique names as a fresh process has them."""
    with (
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        # The names of static.nn's layers are counted per process; unique_name.guard does not reach them.
        paddle.base.framework.default_main_program()._name_generator.ids.clear()
        paddle.seed(17 * rank)
        yield


def attempt(records: Path, case: str, run: Callable[[], Mapping[str, Any]]) -> bool:
    """Run a case and record what it found, or how it failed; returns whether it came to its end."""
    record(records, case, began=True)
    try:
        found = run()
    except Exception as error:
        record(records, case, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return False
    record(records, case, ended=True, **found)
    return True


def run_program(program: Program, script: Script) -> None:
    with clean_state(script.rank):
        program.run(script)
        script.finish()


def compared(
    ours: Mapping[str, Array], expected: Mapping[str, Array], noise: str = "", smallest_scale: float = 1e-6
) -> dict[str, Any]:
    """The largest difference of a value, relative to its own scale, and which one it is; names that are not in both.

    Names that begin with a match of ``noise`` are compared absolutely.
    """
    scales = {name: 1.0 if noise and re.match(noise, name) else smallest_scale for name in expected if name in ours}
    differences = {name: difference(ours[name], expected[name], scale) for name, scale in scales.items()}
    worst = max(differences, key=lambda name: differences[name], default="")
    more = sorted(name for name in ours if name not in expected and not any(part in name for part in _OF_PASSES))
    return {
        "difference": differences.get(worst, 0.0),
        "worst": worst,
        "missing": sorted(set(expected) - set(ours)),
        "more": more,
    }


def difference(ours: Array, expected: Array, smallest_scale: float) -> float:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return float("inf")
    if ours.size == 0:
        return 0.0
    wide = [values.astype(np.float64) for values in (_numbers(ours), _numbers(expected))]
    found = float(np.abs(wide[0] - wide[1]).max() / max(np.abs(wide[1]).max(), smallest_scale))
    return found if np.isfinite(found) else float("inf")


def _numbers(values: Array) -> Array:
    """bfloat16 comes out of Paddle as its bits in uint16."""
    return values if values.dtype != np.uint16 else (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def run_alone(program: Program, folder: Path) -> dict[str, Any]:
    script = Script(program)
    run_program(program, script)
    sections = {"start": script.start_state, "state": script.end_state, "parameters": script.end_parameters}
    arrays = {f"{section}/{name}": value for section, values in sections.items() for name, value in values.items()}
    np.savez(folder / f"{program.name}.npz", allow_pickle=False, **arrays)
    # Of what starts at 0, as biases do, any change would be large; a batch norm's statistics change without an update.
    begun = {
        name: value
        for name, value in script.start_state.items()
        if name in script.end_parameters and np.any(value) and "batch_norm" not in name
    }
    return {
        "fetched": script.fetched,
        "moved": max((difference(script.end_parameters[n], begun[n], 1e-6) for n in begun), default=0.0),
        "linear": bool(script.optimizers) and all(map(is_linear, script.optimizers)),
    }


def main() -> None:
    paddle.enable_static()
    chosen, folder = json.loads(sys.argv[1]), Path(sys.argv[2]).resolve()
    os.chdir(folder)  # programs save where they run
    records = folder / "alone.jsonl"
    known = programs()
    for name in chosen:
        attempt(records, name, partial(run_alone, known[name], folder))
    assert not any(module.partition(".")[0] == "fleet_train" for module in sys.modules), "not plain Paddle"


if __name__ == "__main__":
    main()
