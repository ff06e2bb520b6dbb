"""How long a job takes from the command to the end of its first step: our launcher beside torchrun, interleaved.

    python tools/bench.py start --before main --record docs/benchmarks

Two processes on this machine train one step of the benchmarks' network; what each framework does by default. All start
once per round, in another order in each. Without PyTorch (requirements-bench.txt) there is no torchrun beside it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from tools.benchmarks.jobs import checkout_of, results_of, revision_of, run_commands, run_here
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, table, told_circumstances
from tools.benchmarks.start_rank import now

OURS, BEFORE, TORCH = "fleet_train", "fleet_train before", "torchrun + DDP"
# The processes of each start, from the command to the rank: each starts the next one.
CHAIN = ("launcher", "rank")
_SCRIPT = str(ROOT / "tools" / "benchmarks" / "start_rank.py")
_PROCESSES, _PORT, _TIMEOUT_SECONDS = 2, 29640, 300.0
Turn = Mapping[str, Mapping[str, float]]


def measure_start(contestant: str, checkout: Path, port: int) -> dict[str, float]:
    """Seconds of each phase, ``total`` (to the end of the slowest rank's first step), ``end`` (of the command), and
    ``processor`` (seconds of all processes together to the end of the first step). Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="fleet_train-start-") as name:
        folder, began = Path(name), now()
        if contestant == TORCH:
            flags = ["-m", "torch.distributed.run", f"--nproc_per_node={_PROCESSES}", f"--master_port={port}"]
            command = [sys.executable, *flags, _SCRIPT, "torch", name]
            run_commands(contestant, [(command, {})], folder, _TIMEOUT_SECONDS)
        else:
            script = [_SCRIPT, "fleet_train", name]
            run_here(contestant, script, _PROCESSES, folder, _TIMEOUT_SECONDS, checkout, port)
        ended, ranks = now(), results_of(folder, _PROCESSES)
    slowest = max(ranks, key=lambda rank: float(rank["ends"]["first step"]))
    return {**phases(CHAIN, began, slowest), "end": ended - began, "processor": processor_seconds(CHAIN, ranks)}


def phases(chain: Sequence[str], began: float, rank: Mapping[str, Any]) -> dict[str, float]:
    """The phases between the command and the end of this rank's first step, in order."""
    made = [float(at) for _, at, _ in rank["processes"][: len(chain)]][::-1]
    started = zip(chain, chain[1:], made[1:], strict=False)
    edges = {f"{who}, until it starts the {next_one}": at for who, next_one, at in started} | rank["ends"]
    found, last = {}, began
    for phase, at in edges.items():
        found[phase], last = at - last, at
    return found | {"total": last - began}


def processor_seconds(chain: Sequence[str], ranks: Sequence[Mapping[str, Any]]) -> float:
    """CPU seconds of the ranks and their ancestors up to the command; a process that both ranks report counts once."""
    used: dict[int, float] = {}
    for rank in ranks:
        for pid, _, seconds in rank["processes"][: len(chain)]:
            used[pid] = max(seconds, used.get(pid, 0.0))
    return sum(used.values())


def summary(rounds: Sequence[Turn]) -> dict[str, Any]:
    """Medians of each contestant's phases, and the ratios to the last contestant's within each round."""
    reference = list(rounds[-1])[-1]
    return {
        "medians": {
            who: {phase: round(median(turn[who][phase] for turn in rounds), 3) for phase in rounds[-1][who]}
            for who in rounds[-1]
        },
        "ratios": {
            who: {
                what: [round(turn[who][what] / turn[reference][what], 3) for turn in rounds]
                for what in ("total", "end", "processor")
            }
            for who in rounds[-1]
            if who != reference
        },
        "reference": reference,
    }


def page(record: Mapping[str, Any]) -> list[str]:
    at, medians, reference = record["circumstances"], record["medians"], record["reference"]
    rows = []
    for who, each in medians.items():
        ratios = {what: sorted(values) for what, values in record["ratios"].get(who, {}).items()}
        over = [f"{median(ratios[what]):.2f}" if ratios else "1" for what in ("total", "processor")]
        span = f"{ratios['total'][0]:.2f} to {ratios['total'][-1]:.2f}" if ratios else "-"
        times = [f"{each[what]:.2f}" for what in ("total", "processor", "end")]
        rows.append((who, times[0], over[0], span, times[1], over[1], times[2]))
    told = "to the first step's end, median s", f"of {reference}'s, median", "lowest to highest"
    worked = "processor seconds, median", f"of {reference}'s, median", "until the command has ended, s"
    return [
        f"# From the command to the end of the first step, {at['date'][:10]}",
        "",
        *told_circumstances(at, "loopback, two processes"),
        f"- {len(record['rounds'])} rounds, all in turn within a round, in another order in each; load average before "
        f"the rounds: {', '.join(f'{load:g}' for load in record['loads'])}.",
        "- 64 -> 8 ReLU layers of 640 -> 10, batch 64 per rank, Momentum; what each framework does by default. Python "
        "files are compiled and in the page cache: each was started once before.",
        *([f"- Before: commit {record['before']}."] if record["before"] else []),
        "- The end is that of the slower rank's first step. Ratios are taken within a round. Processor seconds are "
        "those of all processes of the job together: they depend less on what else the machine does.",
        "",
        *table(("started", *told, *worked), rows),
        "",
        "Where the time goes, medians in seconds of the slower rank:",
        "",
        *(line for who, each in medians.items() for line in _phases(who, each)),
    ]


def _phases(who: str, each: Mapping[str, float]) -> list[str]:
    shown = [(name, f"{seconds:.2f}") for name, seconds in each.items() if name not in ("total", "end", "processor")]
    return [*table((who, "s"), shown), ""]


@click.command(context_settings={"show_default": True})
@click.option("--before", help="Also start this checkout of the project, or this commit.")
@recorded(9, "each starts every contestant once")
def main(before: str | None, rounds: int, keep: Keep) -> None:
    with contextlib.ExitStack() as stack:
        checkouts = {OURS: ROOT}
        if before:
            checkouts[BEFORE] = stack.enter_context(checkout_of(before))
        if importlib.util.find_spec("torch"):
            checkouts[TORCH] = ROOT
        record: dict[str, Any] = {"circumstances": circumstances(), "loads": [], "rounds": []}
        record["before"] = revision_of(checkouts[BEFORE]) if before else None
        measure(rounds, checkouts, record, keep)
    click.echo("\n".join(page(record)))


def measure(rounds: int, checkouts: Mapping[str, Path], record: dict[str, Any], keep: Keep) -> None:
    """All contestants, in a different order in every round; the record is written after each."""
    names = list(checkouts)
    for who in names:  # compiles Python files and fills the page cache
        measure_start(who, checkouts[who], _PORT)
    for turn in range(rounds):
        record["loads"].append(round(os.getloadavg()[0], 2))
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found = {who: measure_start(who, checkouts[who], _PORT + 10 * (turn % 5 + 1)) for who in order}
        record["rounds"].append({who: {name: round(value, 4) for name, value in found[who].items()} for who in names})
        record |= summary(record["rounds"])
        told = ", ".join(f"{who} {found[who]['total']:.2f} s" for who in names)
        click.echo(f"round {turn + 1} of {rounds}: {told}", err=True)
        keep(record, page(record))
