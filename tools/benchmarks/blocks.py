"""Jobs that train blocks of steps of several kinds in turn, in one process per rank: kinds are compared in a round."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.jobs import results_of, run_here

Block = dict[str, Any]


def run_job(module: str, arguments: Sequence[object], ranks: int, timeout: float, port: int = 0) -> list[Any]:
    """What each rank of ``module`` has written with ``write``. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="bench_blocks_") as name:
        script = ["-m", f"tools.benchmarks.{module}", name, *map(str, arguments)]
        run_here(module, script, ranks, Path(name), timeout, port=port)
        return results_of(Path(name), ranks)


def arguments_of_a_rank() -> tuple[Path, list[str]]:
    """The folder of the results, and the other arguments of ``run_job``; for the rank's side."""
    return Path(sys.argv[1]), sys.argv[2:]


def measure_in_turn(
    kinds: Sequence[str], rounds: int, block: Callable[[str], Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """A block of each kind per round, in another order each time, so that no kind is always first or last."""
    orders = [[*kinds[shift:], *kinds[:shift]] for shift in range(len(kinds))]
    return [[{"kind": kind, **block(kind)} for kind in orders[number % len(kinds)]] for number in range(rounds)]


class Clock:
    """Seconds since it was made, and of the processor: all threads of this process, which depends less on who else is
    at work on the machine."""

    def __init__(self) -> None:
        self._began, self._worked = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def processor_seconds(self) -> float:
        return time.process_time() - self._worked


def write(folder: Path, rank: int, result: object) -> None:
    part = folder / f"rank{rank}.part"
    part.write_text(json.dumps(result), encoding="utf-8")
    os.replace(part, folder / f"rank{rank}.json")
