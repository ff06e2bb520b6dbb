"""Replay what the engines enqueue on the streams of several GPUs, under random interleavings, without a GPU.

    nice -n 10 python tools/model_streams.py --out docs/benchmarks/DATE-model-of-streams

Exit code 0: the new engine never deadlocks, and each negative control does as expected; 1: otherwise, with reasons.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paddle
from tqdm import tqdm

from tests.streams.programs import CONTROLS, Control, outcome
from tests.streams.timing import Rates
from tests.streams.trace import wait_cycle
from tools.benchmarks.record import circumstances
from tools.modelling.cases import Case, cases, exposed, replay_case
from tools.modelling.page import page

CONTROL_INTERLEAVINGS = 500


def rows_of(case: Case, interleavings: int, steps: int, seed: int, bar: Any) -> list[dict[str, Any]]:
    """One row per cluster; the interleavings are divided among them."""
    interleavings = round(interleavings * case.share)
    share, rest = divmod(interleavings, len(case.shapes))
    rows = []
    for number, shape in enumerate(case.shapes):
        began = time.process_time()
        row = replay_case(case, shape, share + (number < rest), steps, seed + number, bar.update)
        rows.append(row | {"seconds": round(time.process_time() - began, 1)})
    return rows


def control_row(control: Control, seed: int) -> dict[str, Any]:
    """What was found in a negative control, beside what is expected."""
    came = outcome(control, CONTROL_INTERLEAVINGS, seed)
    example = wait_cycle(came.found.example) if came.found.example else came.mismatches[:1]
    return {
        "name": control.name,
        "profile": control.profile,
        "ranks": came.ranks,
        "one_resident": control.one_resident,
        "interleavings": came.found.interleavings,
        "deadlocks": came.found.deadlocks,
        "found": came.what,
        "expected": control.expected,
        "example": example,
    }


def failures_of(record: dict[str, Any]) -> list[str]:
    """What is wrong, one sentence each."""
    failures = []
    for row in record["replays"]:
        where = f"{row['profile']} on {row['nodes']} x {row['ranks_per_node']}"
        if row["mismatches"]:
            failures.append(f"{where}: {row['mismatches'][0]}")
        if row["deadlocks"]:
            failures.append(f"{where}: {row['deadlocks']} deadlocks; {'; '.join(row['example'])}")
    for row in record["controls"]:
        if row["found"] != row["expected"]:
            failures.append(f"control '{row['name']}': found {row['found']}, expected {row['expected']}")
    return failures


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--interleavings", default=100_000, type=click.IntRange(min=1), help="Per profile.")
@click.option("--steps", default=5, type=click.IntRange(min=5), help="Steps of each training.")
@click.option("--seed", default=1, help="Seed of the random interleavings.")
@click.option("--profile", "names", multiple=True, help="Only this profile; repeat for more.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
def main(interleavings: int, steps: int, seed: int, names: tuple[str, ...], out: Path | None) -> None:
    """Find deadlocks in what the engines enqueue; 100,000 interleavings take about 20 s of one core per profile."""
    warnings.simplefilter("ignore")
    paddle.enable_static()
    chosen, rates = cases(names), Rates()
    record: dict[str, Any] = {
        "circumstances": circumstances() | {"command": " ".join(["python", "tools/model_streams.py", *sys.argv[1:]])},
        "interleavings": interleavings, "steps": steps, "seed": seed, "rates": asdict(rates),
        "controls": [control_row(control, seed) for control in tqdm(CONTROLS, desc="controls", leave=False)],
    }  # fmt: skip
    record["exposed"] = [exposed(case, rates, steps) for case in tqdm(chosen, desc="exposed time", leave=False)]
    with tqdm(
        total=sum(round(interleavings * case.share) for case in chosen), unit="interleaving", unit_scale=True
    ) as bar:
        record["replays"] = [row for case in chosen for row in rows_of(case, interleavings, steps, seed, bar)]
    record["failures"] = failures_of(record)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(page(record), encoding="utf-8")
    click.echo(page(record))
    if record["failures"]:
        raise click.ClickException("; ".join(record["failures"]))


if __name__ == "__main__":
    main()
