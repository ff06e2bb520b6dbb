"""Where the milliseconds of a float32 step are: the recorder's timeline of ours, and the link, also of PyTorch's. Root.

    sudo .venv/bin/python tools/bench.py step --record docs/benchmarks
    sudo .venv/bin/python tools/bench.py step --before COMMIT --rounds 3
    sudo .venv/bin/python tools/bench.py step --task bytes --rate 100mbit

A task of the benchmark of strategies, on two emulated machines. Each contestant trains once per round in turn. The
link's counter is read every 4 ms: the link is busy where it carries more than a third of its rate, and idle in the rest
of a step. Of ours the recorder also says when a step's passes end, and when its first large bucket is on the wire.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleet_train.cluster.flight.ring import read_ring
from fleet_train.cluster.flight.timeline import TimelineStep, timelines
from tools.benchmarks.contestants import NOTHING, OURS, TORCH, parse, with_baselines
from tools.benchmarks.jobs import Place, checkout_of, commands_of, results_of, revision_of, run_commands
from tools.benchmarks.ranks import Assignment, interface_bytes
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, spread, table, told_circumstances
from tools.benchmarks.tasks import RESNET18, TASKS
from tools.lab import Lab

RATES = {"1gbit": 125e6, "100mbit": 12.5e6}
"""The links, and their bytes per second."""
BEFORE = "ours before"
CONTESTANTS = ("ours:multi_node", "ours:next_step", "torch:ddp", "torch:ddp_4mb", "torch:ddp_8mb")
_STEPS, _TRACED = 60, (30, 49)
_BETWEEN_READINGS, _BUSY, _LARGE = 0.004, 1 / 3, 400_000
_TIMEOUT, _FIRST_PORT = 300.0, 6800
# Figures of a turn, in milliseconds, with their words.
FIGURES = {
    "forward": "forward pass ends",
    "launched": "first large bucket launched",
    "backward": "backward pass ends",
    "busy": "link busy",
    "idle": "link idle",
    "step": "step",
}


def busy_share(readings: Sequence[tuple[float, int]], rate: float) -> float:
    """Of the second half of the readings (seconds, bytes sent so far): the share of time in which the link was busy.
    ``rate``: its bytes per second."""
    last = next(place for place, (_, sent) in enumerate(readings) if sent == readings[-1][1])
    if not last:
        return 0.0  # nothing was sent
    half = readings[last // 2 : last + 1]
    spans = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(half)]
    busy = sum(seconds for seconds, sent in spans if sent > _BUSY * rate * seconds)
    return busy / (half[-1][0] - half[0][0])


def of_step(step: TimelineStep) -> dict[str, float]:
    """Milliseconds from its beginning."""
    ends = {piece.kind: 1e3 * (piece.ended - step.began) for piece in step.pieces if piece.kind in FIGURES}
    large = [1e3 * (each.began - step.began) for each in step.events if each.kind == "wire" and each.nbytes > _LARGE]
    return ends | ({"launched": min(large)} if large else {})


def measure(name: str, checkout: Path, place: Place, folder: Path, task_name: str, rate: str) -> dict[str, float]:
    """Figures of one turn. Raises JobFailed."""
    contestant = parse(name)
    task = dataclasses.replace(TASKS[task_name], steps=_STEPS)
    assignment = Assignment(task, contestant, str(folder), 2, 1, _TIMEOUT)
    folder.mkdir()
    assignment.write(folder / "assignment.json")
    added = {"FLEET_TRAIN_TRACE": "{}-{}".format(*_TRACED), "PYTHONPATH": str(checkout)}
    commands = [(command, own | added) for command, own in commands_of(contestant, folder, place)]
    node = place.lab.nodes[0]
    reader = [*node.prefix, sys.executable, str(ROOT / "tools" / "benchmarks" / "step.py"), str(folder)]
    run_commands(name, [*commands, (reader, {})], folder, _TIMEOUT, place.lab)
    step_ms = float(median(rank["step_ms"] for rank in results_of(folder, 2)))
    readings = [line.split() for line in (folder / "readings").read_text().splitlines()]
    share = busy_share([(float(seconds), int(sent)) for seconds, sent in readings], RATES[rate])
    found = {"step": step_ms, "busy": share * step_ms, "idle": (1 - share) * step_ms}
    if contestant.kind == OURS:
        rings = [read_ring(path.read_bytes()) for path in sorted(folder.glob("log*/trace.*.bin"))]
        (first, *_) = timelines([ring for ring in rings if ring is not None])
        steps = [of_step(step) for number, step in first.steps.items() if _TRACED[0] <= number <= _TRACED[1]]
        found |= {key: median(each[key] for each in steps) for key in steps[0] if all(key in each for each in steps)}
    return {key: round(value, 2) for key, value in found.items()}


def page(record: Mapping[str, Any]) -> list[str]:
    rounds = record["rounds"]
    names = [name for name in record["contestants"] if all(name in each for each in rounds)]
    rows = []
    for name in names:
        figures = {key: [each[name][key] for each in rounds if key in each[name]] for key in FIGURES}
        rows.append([name, *(spread(each, median(each), 0) if each else "" for each in figures.values())])
    best = best_of_torch(record)
    ours = [name for name in names if name.startswith("ours")]
    ratios = [
        f"- {name}: {spread(over, median(over))} of {best}, the best of PyTorch's, within a round."
        for name in ours
        if best
        for over in [over_torch(record, name)]
    ]
    if NOTHING in names:
        ratios += [
            f"- {name}: {spread(over, median(over))} of the larger of computing alone and the time of the busy link."
            for name in ours
            for over in [over_limit(record, name)]
        ]
    what, rate = record.get("task", RESNET18), record.get("rate", "1gbit")
    return [
        f"# A float32 step of {'ResNet-18' if what == RESNET18 else f'*{what}*'} on two nodes at {rate}, "
        f"{record['circumstances']['date'][:10]}",
        "",
        *told_circumstances(record["circumstances"], "an emulated network"),
        *([f"- *{BEFORE}*: commit {record['before']}."] if record["before"] else []),
        f"- Milliseconds from a step's beginning, or of a step; medians of {len(rounds)} rounds with the smallest and "
        "largest. The link is busy where it carries more than a third of its rate.",
        *ratios,
        "",
        *table(("contestant", *FIGURES.values()), rows),
    ]


def best_of_torch(record: Mapping[str, Any]) -> str:
    """The fastest of PyTorch's contestants that are in every round; empty without one."""
    rounds = record["rounds"]
    names = [
        name for name in record["contestants"] if name.startswith(f"{TORCH}:") and all(name in each for each in rounds)
    ]
    return min(names, key=lambda name: median(each[name]["step"] for each in rounds), default="")


def over_torch(record: Mapping[str, Any], name: str) -> list[float]:
    """A contestant's step over that of PyTorch's best, in each round."""
    best = best_of_torch(record)
    return [each[name]["step"] / each[best]["step"] for each in record["rounds"]]


def over_limit(record: Mapping[str, Any], name: str) -> list[float]:
    """A contestant's step over the larger of computing alone and the time in which its link is busy, in each round."""
    return [each[name]["step"] / max(each[NOTHING]["step"], each[name]["busy"]) for each in record["rounds"]]


@click.command(context_settings={"show_default": True})
@click.option("--task", "task_name", type=click.Choice(list(TASKS)), default=RESNET18, help="What is trained.")
@click.option("--rate", type=click.Choice(list(RATES)), default="1gbit", help="The link of each node.")
@click.option("--before", help="Ours also runs with the package of this checkout or commit.")
@recorded(5, "each runs every contestant once")
def main(task_name: str, rate: str, before: str | None, rounds: int, keep: Keep) -> None:
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(checkout_of(before)) if before else None
        alone = [each.name for each in with_baselines(CONTESTANTS) if each.kind == "alone" and each.variant != "paddle"]
        sides = {name: (name, ROOT) for name in (*alone, *CONTESTANTS)}
        if there is not None:
            sides[BEFORE] = (CONTESTANTS[0], there)
        asked = {"contestants": list(sides), "before": revision_of(there) if there else None}
        asked |= {"task": task_name, "rate": rate}
        record = keep.begun({"circumstances": circumstances(), **asked, "rounds": []})
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_step_")))
        for number in range(len(record["rounds"]) + 1, rounds + 1):
            made: dict[str, Any] = {}
            for turn, (side, (name, checkout)) in enumerate(sides.items()):
                with Lab(2, rate) as lab:
                    place = Place(lab, 1, _FIRST_PORT + 20 * (turn + len(sides) * number))
                    found = measure(name, checkout, place, folder / f"{number}-{turn}", task_name, rate)
                made[side] = found
                click.echo(f"round {number} of {rounds}  {side:<18} {found}", err=True)
            record["rounds"].append(made)
            keep(record, page(record))
    click.echo("\n".join(page(record)))


def read_link(folder: Path) -> None:
    """Write seconds and bytes sent so far, until the first rank has written its record."""
    end, lines = time.monotonic() + _TIMEOUT, list[str]()
    while time.monotonic() < end and not (folder / "rank0.json").exists():
        lines.append(f"{time.perf_counter()} {interface_bytes()}")
        time.sleep(_BETWEEN_READINGS)
    (folder / "readings").write_text("\n".join(lines))


if __name__ == "__main__":
    read_link(Path(sys.argv[1]))
