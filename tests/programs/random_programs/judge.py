"""Launches cases, in one process and on ranks, and says what is wrong with each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.programs.alone import read_records
from tests.programs.random_programs import optimizers
from tests.programs.random_programs.draw import Case
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

CHILD = ROOT / "tests/programs/random_programs/child.py"
IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
TOLERANCES = {"float32": 3e-5, "float64": 1e-9}
IN_LOW_PRECISION = 0.1
"""Of the way that parameters were moved, and of losses, where layers compute in bfloat16."""


@dataclass
class Verdict:
    """``wrong``: sentences; empty where all is equal. ``off``: by how much parameters and state differ.
    ``refused``: the error with which fleet_train refused it."""

    case: Case
    wrong: list[str] = field(default_factory=list)
    off: float = 0.0
    refused: str = ""
    no_reference: str = ""
    """Why plain Paddle did not train it in one process."""

    def __str__(self) -> str:
        text = self.no_reference or self.refused or "\n  ".join(self.wrong) or "equal"
        return f"{self.case}\n  {text}"


def judge(cases: Sequence[Case], folder: Path) -> list[Verdict]:
    """All cases, in one launch for each number of ranks and nodes, unless one fails and the rest begin anew."""
    alone = folder / "alone"
    alone.mkdir(parents=True)
    _launch("alone", cases, alone, alone, 1, 0)
    reference = read_records(alone / "alone.jsonl")
    verdicts = {
        case.seed: Verdict(case, no_reference=problem)
        for case in cases
        if (problem := _no_reference(reference.get(case.name, {})))
    }
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        if case.seed not in verdicts:
            groups.setdefault((case.ranks, case.nodes), []).append(case)
    for (ranks, nodes), left in groups.items():
        attempts = 0
        while left:
            attempts += 1
            own = folder / f"{ranks} on {nodes}, {attempts}"
            output = _launch("ranks", left, own, alone, ranks, nodes)
            records = [read_records(own / f"rank{rank}.jsonl") for rank in range(ranks)]
            reached = [case for case in left if any(case.name in found for found in records)] or left[:1]
            for case in reached:
                found = [one.get(case.name, {}) for one in records]
                verdicts[case.seed] = _verdict(case, found, reference[case.name], output)
            left = left[len(reached) :]
    return [verdicts[case.seed] for case in cases]


def _reordered(cases: Sequence[Case], folder: Path) -> dict[int, float]:
    """By seed, how far one process is from itself if a joint batch has its samples in another order: its rounding."""
    folder.mkdir()
    _launch("alone", cases, folder, folder, 1, 0)
    _launch("reordered", cases, folder / "again", folder, 1, 0)
    found = read_records(folder / "again" / "reordered.jsonl")
    return {case.seed: found.get(case.name, {}).get("difference", 0.0) for case in cases}


def without_rounding(verdicts: list[Verdict], folder: Path) -> list[Verdict]:
    """The same list, in which float32 programs that are equal in float64 are no longer wrong. Those that differ in
    float32 are trained again."""
    off = [one for one in verdicts if one.wrong and one.off and one.case.dtype == "float32"]
    _excuse_rounding([one for one in off if _has_no_float64(one.case)], folder)
    doubted: list[Case] = [one.case for one in off if not _has_no_float64(one.case)]
    again = (
        {one.case.seed: one for one in judge([replace(case, dtype="float64") for case in doubted], folder)}
        if doubted
        else {}
    )
    for verdict in verdicts:
        wide = again.get(verdict.case.seed)
        if wide is not None and _was_rounding(verdict, wide):
            print(f"rounding: {verdict}\n  and off by {wide.off:.1e} in float64", flush=True)
            verdict.wrong = []
        elif wide is not None:
            verdict.wrong.append(f"in float64: {wide.no_reference or wide.refused or wide.wrong}")
    _excuse_rounding([one for one in again.values() if one.wrong and one.off], folder.with_name(f"{folder.name}, wide"))
    for verdict in verdicts:
        if verdict.wrong and verdict.case.seed in again and not again[verdict.case.seed].wrong:
            verdict.wrong = []
    return verdicts


def _was_rounding(verdict: Verdict, wide: Verdict) -> bool:
    """A fault is as large in float64; what rounding comes to after some updates is smaller by many orders."""
    if wide.no_reference or wide.refused or not all("is off by" in sentence for sentence in wide.wrong):
        return False
    return not wide.wrong or (math.isfinite(verdict.off) and wide.off <= 1e-4 * verdict.off)


def _has_no_float64(case: Case) -> bool:
    return case.in_low_precision or case.clip in optimizers.FLOAT32_CLIPS


def _excuse_rounding(verdicts: list[Verdict], folder: Path) -> None:
    """Clips without a kernel for float64, bfloat16, and optimizers that take the sign of a gradient, even of one that
    is zero but for rounding: one process with its samples in another order, and parameters that begin as rounded,
    shows how far rounding goes."""
    own = _reordered([one.case for one in verdicts], folder.with_name(f"{folder.name}, reordered")) if verdicts else {}
    for verdict in verdicts:
        text = f"one process is {own[verdict.case.seed]:.1e} from itself if it rounds otherwise"
        if verdict.off <= (4 if verdict.case.in_low_precision else 10) * own[verdict.case.seed]:
            print(f"rounding: {verdict}\n  and {text}", flush=True)
            verdict.wrong = []
        else:
            verdict.wrong.append(text)


def _launch(how: str, cases: Sequence[Case], folder: Path, alone: Path, ranks: int, nodes: int) -> str:
    """The output, where a process failed."""
    folder.mkdir(exist_ok=True)
    listed = folder / "cases.jsonl"
    listed.write_text("\n".join(case.to_json() for case in cases))
    result = run_ranks(
        CHILD,
        ranks,
        nodes=nodes,
        folder=folder,
        args=[how, str(listed), str(alone)],
        env=IN_PROGRAM_ORDER if how == "alone" else {"FLEET_TRAIN_JOIN_TIMEOUT": "120"},
        timeout_seconds=120 + 20 * len(cases),
        check=False,
    )
    return result.report()[-6000:] if any(result.exit_codes) else ""


def _no_reference(record: dict[str, Any]) -> str:
    if not record.get("ended"):
        return f"plain Paddle: {record.get('error', 'its process ended').strip()[-700:]}"
    return "" if record["moved"] > 0 else "plain Paddle: no parameter was moved"


def _verdict(case: Case, records: list[dict[str, Any]], reference: dict[str, Any], output: str) -> Verdict:
    if all("refused" in record for record in records):
        return Verdict(case, refused=records[0]["refused"])
    for rank, record in enumerate(records):
        if not record.get("ended"):
            told = record.get("traceback", f"did not end\n{output}")
            return Verdict(case, [f"rank {rank}: {record.get('error', '')}\n{told}"])
    off = max(part.get("difference", 0.0) for part in (records[0]["parameters"], records[0]["state"]))
    return Verdict(case, _differences(case, records, reference), records[0]["moved"] if case.in_low_precision else off)


def _differences(case: Case, records: list[dict[str, Any]], reference: dict[str, Any]) -> list[str]:
    wrong = []
    if len({record["replica"] for record in records}) > 1:
        wrong.append("the replicas differ")
    wrong += [part for record in records for part in _unequal("start values", record["start"] | {"more": []}, 0.0)]
    tolerance = IN_LOW_PRECISION if case.in_low_precision else TOLERANCES[case.dtype]
    if case.in_low_precision:
        if not records[0]["moved"] <= tolerance:
            wrong.append(f"parameters are off by {records[0]['moved']:.1e} of their way")
    else:
        wrong += _unequal("parameters", records[0]["parameters"], tolerance)
        # A velocity may be the small rest of gradients that took each other away.
        wrong += _unequal("state", records[0]["state"], 10 * tolerance) if records[0]["state"] else []
    means = [sum(values) / len(values) for values in zip(*(one["fetched"] for one in records), strict=True)]
    off = [abs(mean - one) / max(abs(one), 1e-3) for mean, one in zip(means, reference["fetched"], strict=True)]
    return wrong + ([f"a fetched loss is off by {max(off):.1e}"] if not max(off) <= tolerance else [])


def _unequal(where: str, compared: dict[str, Any], tolerance: float) -> list[str]:
    wrong = []
    if not compared["difference"] <= tolerance:
        wrong.append(f"{where}: {compared['worst']} is off by {compared['difference']:.1e}")
    return wrong + [f"{where}: {kind} names {compared[kind]}" for kind in ("missing", "more") if compared[kind]]
