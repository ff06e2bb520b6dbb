"""One case: a program with a seed, run in its own programs, scope and names; and its record."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.programs.catalogue.entry import Program
from tests.programs.feeds import Array
from tests.programs.script import Script

# What gradient merge and recompute add to a program's state.
_OF_PASSES = ("@gradient_merge", "gradient_merge_count")


class Records:
    """Lines of JSON, each written at once: what was finished is known even when the process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, case: str, **found: Any) -> None:
        with self._path.open("a") as sink:
            sink.write(json.dumps({"case": case, **found}) + "\n")


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """What is known of each case, later lines over earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        found.setdefault(values.pop("case"), {}).update(values)
    return found


@contextmanager
def clean_state(seed: int) -> Iterator[None]:
    """Default programs, scope and unique names as a fresh process has them."""
    with (
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        # The names of static.nn's layers are counted per process; unique_name.guard does not reach them.
        paddle.base.framework.default_main_program()._name_generator.ids.clear()
        paddle.seed(seed)
        yield


def attempt(records: Records, case: str, run: Callable[[], Mapping[str, Any]]) -> bool:
    """Run a case and record what it found, or how it failed; returns whether it came to its end."""
    records.add(case, began=True)
    began = time.perf_counter()
    try:
        found = run()
    except Exception as error:
        records.add(case, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return False
    records.add(case, ended=True, seconds=round(time.perf_counter() - began, 3), **found)
    return True


def run_program(program: Program, script: Script) -> None:
    with clean_state(100 * script.seed + 17 * script.rank):
        program.run(script)
        script.finish()


def compared(ours: Mapping[str, Array], expected: Mapping[str, Array], noise: str = "") -> dict[str, Any]:
    """The largest difference of a value, relative to its own scale, and which one it is; names that are not in both.

    Names that begin with a match of ``noise`` are compared absolutely.
    """
    scales = {name: 1.0 if noise and re.match(noise, name) else 1e-6 for name in expected if name in ours}
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
    if values.dtype != np.uint16:
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
