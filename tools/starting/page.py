"""The page of the record of starts."""

from __future__ import annotations

from statistics import median
from typing import Any

from tools.benchmarks.record import told_circumstances


def page(record: dict[str, Any]) -> str:
    medians: dict[str, dict[str, float]] = record["medians"]
    return "\n".join(
        [
            f"# From the command to the end of the first step, {record['date'][:10]}",
            "",
            *told_circumstances(record, "loopback, two processes"),
            f"- {len(record['rounds'])} rounds, all in turn within a round, in another order in each; load average "
            f"before the rounds: {', '.join(f'{load:g}' for load in record['loads'])}.",
            "- 64 -> 8 ReLU layers of 640 -> 10, batch 64 per rank, Momentum; what each framework does by default. "
            "Python files are compiled and in the page cache: each was started once before.",
            *([f"- Before: commit {record['before'][:10]}."] if "before" in record else []),
            "- The end is that of the slower rank's first step. Ratios are taken within a round.",
            "- Processor seconds are those of all processes of the job together, to the end of the first step: they "
            "depend less on what else the machine does.",
            "",
            "| started | to the first step's end, median s | of torchrun's, median | lowest to highest | "
            "processor seconds, median | of torchrun's, median | until the command has ended, s |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(_row(who, each, record["ratios_to_torchrun"].get(who)) for who, each in medians.items()),
            "",
            "Where the time goes, medians in seconds of the slower rank:",
            "",
            *(line for who, each in medians.items() for line in _phases(who, each)),
        ]
    )


def _row(who: str, each: dict[str, float], ratios: dict[str, list[float]] | None) -> str:
    compared, of_processor = "1 | -", "1"
    if ratios is not None:
        totals = sorted(ratios["total"])
        compared = f"{median(totals):.2f} | {totals[0]:.2f} to {totals[-1]:.2f}"
        of_processor = f"{median(ratios['processor']):.2f}"
    return (
        f"| {who} | {each['total']:.2f} | {compared} | {each['processor']:.2f} | {of_processor} | {each['end']:.2f} |"
    )


def _phases(who: str, each: dict[str, float]) -> list[str]:
    rows = [
        f"| {phase} | {seconds:.2f} |" for phase, seconds in each.items() if phase not in ("total", "end", "processor")
    ]
    return [f"| {who} | s |", "| --- | --- |", *rows, ""]
