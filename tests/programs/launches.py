"""Start the processes that run the programs: one launch for many cases, and another one after a case that crashes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs.cases import read_records
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

FOLDER = ROOT / "tests/programs"
# One process draws start values in the order of the program, as a profile with one executor thread has it.
IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
# Cases that die, or stop their launch, before the rest is given up.
MOST_LAUNCHES = 6

Case = tuple[str, int, str]
Record = dict[str, Any]


def label(case: Case) -> str:
    program, seed, strategy = case
    return f"{program}-{seed}, {strategy}"


@dataclass
class Found:
    """What the ranks have recorded of each case, by label; the output of launches that failed."""

    ranks: list[dict[str, Record]]
    outputs: list[str]

    def of(self, case: Case) -> list[Record]:
        return [rank.get(label(case), {}) for rank in self.ranks]

    def complaint(self, case: Case) -> str:
        """Why there is no result, or nothing."""
        for rank, record in enumerate(self.of(case)):
            if "error" in record:
                return f"{label(case)}: rank {rank}: {record['error']}\n{record['traceback']}"
        if not all(record.get("ended") for record in self.of(case)):
            began = any(self.of(case))
            return f"{label(case)}: {'did not end' if began else 'was not reached'}\n" + "\n".join(self.outputs)
        return ""


def run_alone(cases: Sequence[tuple[str, int]], folder: Path) -> Found:
    """Programs and seeds in one process of plain Paddle; its numbers go to ``folder``."""
    run_ranks(
        FOLDER / "alone.py",
        1,
        nodes=0,
        folder=folder,
        args=[json.dumps(cases), str(folder)],
        env=IN_PROGRAM_ORDER,
        timeout_seconds=150,
    )
    return Found([read_records(folder / "alone.jsonl")], [])


def run_cases(cases: Sequence[Case], folder: Path, alone: Path, world_size: int, late_streams: bool = False) -> Found:
    """Cases on ranks, a node each (or in one process without a launcher): each launch goes on behind the last case
    that the one before has begun."""
    found, left = Found([{} for _ in range(world_size)], []), list(cases)
    for number in range(MOST_LAUNCHES):
        own = folder / f"launch{number}"
        own.mkdir()
        result = _launch(left, own, alone, world_size, late_streams)
        records = [read_records(own / f"rank{rank}.jsonl") for rank in range(world_size)]
        for kept, new in zip(found.ranks, records, strict=True):
            kept.update(new)
        if any(result.exit_codes):
            found.outputs.append(result.report())
        left = [case for case in left if not any(label(case) in rank for rank in records)]
        if not left or not any(records):
            break
    return found


def _launch(cases: Sequence[Case], folder: Path, alone: Path, world_size: int, late_streams: bool) -> RanksResult:
    return run_ranks(
        FOLDER / "on_ranks.py",
        world_size,
        nodes=world_size if world_size > 1 else 0,
        folder=folder,
        args=[json.dumps(cases), str(alone)],
        env={"FLEET_TRAIN_JOIN_TIMEOUT": "60"},
        timeout_seconds=240,
        check=False,
        late_streams=late_streams,
    )
