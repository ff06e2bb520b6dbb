"""Embeddings whose touched rows are sent, beside whole tables, PyTorch and Horovod: steps, bytes, parameters. Root.

    sudo .venv/bin/python tools/bench.py embeddings --rounds 3 --record docs/benchmarks
    sudo .venv/bin/python tools/bench.py embeddings --model deepfm --ranks 2 --optimizer sgd --steps 6

DeepFM and Wide&Deep as PaddleRec has them, with tables of 1,000,000 rows, 26 categorical and 13 dense features,
generated clicks (Zipf ids). Each rank is an emulated machine on a link of --network. Every side trains once per round
in turn, on the same batches from the same start values; round 1 has seed 0, round 2 seed 1, ... Its parameters are
compared with one process of its own framework that averages the gradients of all ranks. Needs requirements-bench.txt
(CPU PyTorch); Horovod takes part where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from tools.benchmarks.contestants import ALONE, HOROVOD, OURS, TORCH
from tools.benchmarks.embeddings_rank import (
    ADAM,
    FIELDS,
    MODELS,
    ONE,
    OPTIMIZERS,
    ROWS,
    SGD,
    Assignment,
    ideal_bytes,
    start_values,
)
from tools.benchmarks.jobs import Command, JobFailed, Place, as_a_host, launcher, results_of, run_commands
from tools.benchmarks.ranks import INTERFACE
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, spread, table, told_circumstances
from tools.lab import Lab

DENSE_SIDE, ROWS_SIDE = f"{OURS}:dense", f"{OURS}:rows"
SIDES = {
    DENSE_SIDE: "fleet_train, whole tables (`sparse_embeddings: false`)",
    ROWS_SIDE: "fleet_train, touched rows (`sparse_embeddings: true`)",
    f"{OURS}:auto": "fleet_train as shipped (`sparse_embeddings: auto`)",
    f"{TORCH}:sparse": "PyTorch DDP over Gloo, `Embedding(sparse=True)`",
    f"{HOROVOD}:sparse": "Horovod over Gloo, PyTorch's `Embedding(sparse=True)`",
    f"{ALONE}:{OURS}": "Paddle, every rank for itself: nothing is sent",
    f"{ALONE}:{TORCH}": "PyTorch, every rank for itself: nothing is sent",
}
BY_DEFAULT = [side for side in SIDES if side != f"{OURS}:auto"]
_SETTINGS = {"dense": "false", "rows": "true", "auto": "auto"}
# The first steps build the program, open connections and, with auto, find out what is touched.
WARMUP_STEPS = 4
# What the issue asks for: a step as a share of that with whole tables, bytes as a share of ids and rows, parameters.
SHARE_OF_DENSE = {SGD: 0.10, ADAM: 0.25}
SHARE_OF_IDEAL, DIFFERENCE = 1.05, 1e-6
_FIRST_PORT, _PORTS_PER_JOB = 6600, 20
Result = dict[str, Any]


def commands_of(assignment: Assignment, place: Place) -> list[Command]:
    """Command and added environment of every process."""
    folder = Path(assignment.folder)
    script = [str(ROOT / "tools" / "benchmarks" / "embeddings_rank.py"), str(folder / "assignment.json")]
    nodes = list(enumerate(place.lab.nodes))
    if assignment.kind == OURS:
        choice = _SETTINGS[assignment.side.partition(":")[2]]
        profile = folder / "profile.yaml"
        profile.write_text(f"description: For the benchmark.\nextends: multi_node\nsparse_embeddings: {choice}\n")
        return [([*launcher(place, number, folder, str(profile)), *script], {}) for number, _ in nodes]
    # As a profile has it: one thread executes the program.
    shared = {"GLOO_SOCKET_IFNAME": INTERFACE, "FLAGS_new_executor_serial_run": "1"}
    shared |= {"MASTER_ADDR": place.addresses[0], "MASTER_PORT": str(place.port), "WORLD_SIZE": str(assignment.ranks)}
    commands = []
    for rank, node in nodes:
        prefix = list(node.prefix)
        if assignment.kind == HOROVOD:
            prefix = as_a_host(place, rank, folder)
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": "0"}
        commands.append(([*prefix, sys.executable, *script, str(rank)], own))
    return commands


def run_job(assignment: Assignment, place: Place) -> list[Result]:
    """The records of all ranks, by rank. Raises JobFailed."""
    folder = Path(assignment.folder)
    folder.mkdir(parents=True)
    assignment.write(folder / "assignment.json")
    name = f"{assignment.side}, {assignment.model}, {assignment.optimizer}, {assignment.ranks} ranks"
    run_commands(name, commands_of(assignment, place), folder, assignment.timeout_seconds, place.lab)
    return results_of(folder, len(place.lab.nodes))


def summarised(ranks: Sequence[Result], assignment: Assignment) -> Result:
    """One job's figures: the median of its timed steps (the mean over ranks), bytes per step and rank, ideal bytes."""
    steps = np.mean([rank["step_seconds"] for rank in ranks], axis=0)[WARMUP_STEPS:]
    timed = slice(WARMUP_STEPS, None)
    sent = [(rank["sent_after"][-1] - rank["sent_after"][WARMUP_STEPS - 1]) / len(steps) for rank in ranks]
    touched = float(np.mean([rank["touched_rows"][timed] for rank in ranks]))
    of_rows, of_others = ideal_bytes(assignment.model, touched, assignment.ranks)
    return {
        "step_ms": 1e3 * float(np.median(steps)),
        "steps_ms": [round(1e3 * float(each), 2) for each in steps],
        "sent_bytes": float(np.mean(sent)),
        "touched_rows": touched,
        "ideal_row_bytes": of_rows,
        "ideal_other_bytes": of_others,
        "replicas_equal": len({rank["digest"] for rank in ranks}) == 1,
        "peak_memory_mb": round(max(rank["peak_memory_mb"] for rank in ranks)),
    }


def difference(folder: Path, reference: Path, start: Sequence[Any]) -> Result:
    """The largest difference of a parameter, absolute and relative to the largest value of its tensor; and the least
    that training has moved a tensor, relative as well."""
    found: Result = {"absolute": 0.0, "relative": 0.0, "least_moved": 1.0}
    with np.load(folder / "weights.npz") as ours, np.load(reference / "weights.npz") as theirs:
        for name, began in zip(theirs.files, start, strict=True):
            expected = theirs[name]
            off, scale = float(np.abs(ours[name] - expected).max()), max(float(np.abs(expected).max()), 1e-12)
            found["absolute"], found["relative"] = max(found["absolute"], off), max(found["relative"], off / scale)
            found["least_moved"] = min(found["least_moved"], float(np.abs(expected - began).max()) / scale)
    return found


class Benchmark:
    """``results``: one of each turn, with its setting; grows while it runs."""

    def __init__(
        self, sides: Sequence[str], batch: int, steps: int, rate: str, timeout_seconds: float, notes: Sequence[str] = ()
    ) -> None:
        self.sides, self.batch, self.steps, self.rate = sides, batch, steps, rate
        self._timeout, self._notes = timeout_seconds, notes
        self.results: list[Result] = []
        self.failures: list[Result] = []
        self._turn = 0

    def round(self, number: int, settings: Sequence[tuple[str, str, int]]) -> Iterator[Result]:
        """Every side with every setting (model, optimizer, ranks) once."""
        for model, optimizer, ranks in settings:
            setting = {"round": number, "model": model, "optimizer": optimizer, "ranks": ranks}
            with tempfile.TemporaryDirectory(prefix="bench_embeddings_") as name:
                for framework in self._frameworks():
                    self._job(setting, f"{ONE}:{framework}", Path(name))
                for side in self.sides:
                    yield from self._take_turn(setting, side, Path(name))

    def _frameworks(self) -> list[str]:
        """Those whose ranks communicate, and are compared with one process."""
        ours = any(side.startswith(OURS) for side in self.sides)
        theirs = any(side.startswith((TORCH, HOROVOD)) for side in self.sides)
        return [OURS] * ours + [TORCH] * theirs

    def _job(self, setting: Mapping[str, Any], side: str, folder: Path) -> tuple[Assignment, list[Result]]:
        self._turn += 1
        own = folder / side.replace(":", "_")
        model, optimizer, ranks = setting["model"], setting["optimizer"], setting["ranks"]
        assignment = Assignment(
            model, optimizer, side, str(own), ranks, self.batch, self.steps, setting["round"] - 1, self._timeout
        )
        nodes = 1 if assignment.kind == ONE else ranks
        with Lab(nodes, self.rate) as lab:
            port = _FIRST_PORT + _PORTS_PER_JOB * (self._turn % 500)
            return assignment, run_job(assignment, Place(lab, 1, port))

    def _take_turn(self, setting: Mapping[str, Any], side: str, folder: Path) -> Iterator[Result]:
        load = round(os.getloadavg()[0], 2)
        turn = {**setting, "side": side, "load_average_before": load}
        try:
            assignment, ranks = self._job(setting, side, folder)
        except JobFailed as failure:
            click.echo(f"{side}: {failure}", err=True)
            self.failures.append(turn | {"reason": str(failure).splitlines()[0], "output": str(failure)[-2000:]})
            return
        found = turn | summarised(ranks, assignment)
        own = Path(assignment.folder)
        if assignment.kind != ALONE:
            framework = OURS if assignment.uses_paddle else TORCH
            start = start_values(assignment.model, assignment.seed)
            found["difference"] = difference(own, folder / f"{ONE}_{framework}", start)
            if not found["difference"]["least_moved"]:
                raise click.ClickException(f"{ONE}:{framework} did not train")
        (own / "weights.npz").unlink()
        self.results.append(found)
        yield found

    def record(self, at: Mapping[str, Any]) -> dict[str, Any]:
        data = {"batch_per_rank": self.batch, "steps": self.steps, "warmup_steps": WARMUP_STEPS, "rate": self.rate}
        found = {"failures": self.failures, "turns": self.results}
        return {"circumstances": at, **data, "sides": self.sides, "notes": self._notes, **found}


def page(record: Mapping[str, Any]) -> list[str]:
    """What a record says, for people."""
    at, turns = record["circumstances"], record["turns"]
    rounds = len({turn["round"] for turn in turns})
    settings = list(dict.fromkeys((turn["model"], turn["ranks"], turn["optimizer"]) for turn in turns))
    lines = [
        f"# Embeddings: touched rows beside whole tables, {at['date'][:10]}",
        "",
        *told_circumstances(
            at, f"CPU and Gloo, one thread per process, every rank a node on a link of {record['rate']}"
        ),
        f"- {at['processors']} processors for all ranks: 4 ranks share them, and so do other programs, whose load was "
        f"{_loads(turns)} before the turns. Sides ran in turn; of each turn the median of "
        f"{record['steps'] - record['warmup_steps']} steps, of {rounds} rounds their median (smallest to largest).",
        f"- Tables of {ROWS:,} rows, 16 wide, and in DeepFM one of 1 wide beside it; {FIELDS} fields, "
        f"{record['batch_per_rank']} samples per rank and step; the layers of PaddleRec's configurations.",
        "- *ideal*: each rank's touched rows (float32) with their ids (int32), a pair for each table, once to every "
        "other rank, and the other parameters in an allreduce. *rows*: bytes less those of the other parameters, "
        "beside the rows' part of the ideal. Bytes are those of the interface's counter, with packet headers.",
        "- *difference*: the largest of a parameter, relative to its tensor's largest value (absolute), from one "
        "process that computes the gradients of all ranks in turn with the same framework and updates with their mean, "
        "after all steps; the largest of the rounds. Adam's epsilon is 1e-3 on all sides.",
        "- PyTorch's Adam is SparseAdam for tables: it moves touched rows only. Paddle's moves every row, as on one "
        "card: PIR does not carry `lazy_mode` out. Alone, Paddle's SGD goes over whole tables, too.",
        *(f"- {note}" for note in record["notes"]),
        "",
        *_in_short(turns, settings),
    ]
    for model, ranks, optimizer in settings:
        chosen = _of(turns, model, ranks, optimizer)
        lines += ["", f"## {model}, {ranks} ranks, {optimizer}", "", *_tables_of(chosen, record["sides"])]
        lines += ["", *_verdicts(chosen, optimizer)]
    failed = [f"- failed: {each['side']}, {each['model']}: {each['reason']}" for each in record["failures"]]
    return [*lines, *([""] * bool(failed)), *failed]


def _of(turns: Sequence[Result], model: str, ranks: int, optimizer: str) -> list[Result]:
    return [turn for turn in turns if (turn["model"], turn["ranks"], turn["optimizer"]) == (model, ranks, optimizer)]


def _in_short(turns: Sequence[Result], settings: Sequence[tuple[str, int, str]]) -> list[str]:
    """Of each setting, the step that sends rows as a share of others' steps."""
    others = (DENSE_SIDE, f"{TORCH}:sparse", f"{HOROVOD}:sparse", f"{ALONE}:{OURS}")
    rows = []
    for setting in settings:
        shares = [shares_of(_of(turns, *setting), ROWS_SIDE, other) for other in others]
        rows.append((*setting, *(f"{statistics.median(each):.3f}" if each else "" for each in shares)))
    headings = (
        "model",
        "ranks",
        "optimizer",
        "of whole tables",
        "of PyTorch",
        "of Horovod",
        "of Paddle without sending",
    )
    return ["A step with touched rows, as a share of a step of the others:", "", *table(headings, rows)]


def _loads(turns: Sequence[Result]) -> str:
    loads = [turn["load_average_before"] for turn in turns]
    return f"{min(loads)} to {max(loads)} (median {statistics.median(loads)})" if loads else "not taken"


def shares_of(turns: Sequence[Result], side: str, other: str = DENSE_SIDE) -> list[float]:
    """A side's step as a share of another's, in each round that has both."""
    theirs = {turn["round"]: turn["step_ms"] for turn in turns if turn["side"] == other}
    mine = {turn["round"]: turn["step_ms"] for turn in turns if turn["side"] == side}
    return [mine[number] / theirs[number] for number in mine if number in theirs]


def shares_of_ideal(turns: Sequence[Result]) -> tuple[float, float]:
    """Of all bytes, and of those of the rows alone: the medians."""
    of_all = [turn["sent_bytes"] / (turn["ideal_row_bytes"] + turn["ideal_other_bytes"]) for turn in turns]
    of_rows = [(turn["sent_bytes"] - turn["ideal_other_bytes"]) / turn["ideal_row_bytes"] for turn in turns]
    return statistics.median(of_all), statistics.median(of_rows)


def _tables_of(turns: Sequence[Result], sides: Sequence[str]) -> list[str]:
    rows = []
    for side in sides:
        if not (mine := [turn for turn in turns if turn["side"] == side]):
            continue
        steps, shares = [turn["step_ms"] for turn in mine], shares_of(turns, side)
        share = f"{statistics.median(shares):.3f}" if shares else ""
        sent = f"{statistics.median(turn['sent_bytes'] for turn in mine) / 1e6:.3f}"
        peak = max(turn["peak_memory_mb"] for turn in mine)
        cells = ["", "", "", ""] if side.startswith(ALONE) else _compared(mine)
        rows.append((SIDES[side], spread(steps, statistics.median(steps), 1), share, sent, *cells, peak))
    touched, of_rows, of_others = (
        statistics.median(turn[name] for turn in turns)
        for name in ("touched_rows", "ideal_row_bytes", "ideal_other_bytes")
    )
    headings = ("side", "step ms", "of whole tables", "sent MB", "of ideal", "rows", "difference", "equal", "peak MB")
    told = (
        f"A rank touches {touched:,.0f} rows per step; ideal bytes {of_rows / 1e6:.3f} MB of ids and rows, "
        f"{of_others / 1e6:.3f} MB of other parameters."
    )
    return [told, "", *table(headings, rows)]


def _compared(turns: Sequence[Result]) -> list[str]:
    """Cells of a side whose ranks communicate: shares of ideal bytes, the difference, whether replicas are equal."""
    of_all, of_rows = shares_of_ideal(turns)
    worst = max((turn["difference"] for turn in turns), key=lambda one: float(one["relative"]))
    equal = "yes" if all(turn["replicas_equal"] for turn in turns) else "no"
    return [f"{of_all:.3f}", f"{of_rows:.2f}", f"{worst['relative']:.1e} ({worst['absolute']:.1e})", equal]


def _verdicts(turns: Sequence[Result], optimizer: str) -> list[str]:
    """Whether what was asked for holds: of the side that sends rows, beside whole tables."""
    mine = [turn for turn in turns if turn["side"] == ROWS_SIDE]
    if not mine or not (shares := shares_of(turns, ROWS_SIDE)):
        return []
    share, (of_all, of_rows) = statistics.median(shares), shares_of_ideal(mine)
    off = max(turn["difference"]["relative"] for turn in mine)
    asked = [
        (
            f"a step of {share:.3f} of that with whole tables",
            share <= SHARE_OF_DENSE[optimizer],
            SHARE_OF_DENSE[optimizer],
        ),
        (f"{of_all:.3f} of the ideal bytes ({of_rows:.2f} of ids and rows)", of_all <= SHARE_OF_IDEAL, SHARE_OF_IDEAL),
        (f"parameters to {off:.1e}", off <= DIFFERENCE, DIFFERENCE),
    ]
    return [
        f"- {'holds' if holds else 'does not hold'}: {words}; asked for: {bound:g}" for words, holds, bound in asked
    ]


@click.command(context_settings={"show_default": True})
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), default=MODELS, help="Repeat.")
@click.option("--optimizer", "optimizers", multiple=True, type=click.Choice(OPTIMIZERS), default=OPTIMIZERS)
@click.option("--ranks", "numbers", multiple=True, type=click.IntRange(2, 16), default=(2, 4), help="Repeat.")
@click.option("--side", "sides", multiple=True, type=click.Choice(list(SIDES)), default=BY_DEFAULT, help="Repeat.")
@click.option("--batch", default=512, help="Samples of a rank in a step; PaddleRec's for Criteo's data is 512.")
@click.option("--steps", default=16, type=click.IntRange(WARMUP_STEPS + 1), help="Training steps per turn.")
@click.option("--network", "rate", default="1gbit", help="Rate limit of a node.")
@click.option("--timeout", default=300.0, help="Timeout of a turn in seconds.")
@click.option("--note", "notes", multiple=True, help="A sentence for the page.")
@recorded(3, "each runs every side once")
def main(
    models: tuple[str, ...], optimizers: tuple[str, ...], numbers: tuple[int, ...], sides: tuple[str, ...], batch: int,
    steps: int, rate: str, timeout: float, notes: tuple[str, ...], rounds: int, keep: Keep,
) -> None:  # fmt: skip
    taking_part = [side for side in sides if not side.startswith(HOROVOD) or importlib.util.find_spec("horovod")]
    if any(TORCH in side or HOROVOD in side for side in taking_part) and importlib.util.find_spec("torch") is None:
        raise click.ClickException("torch is not installed: pip install -r requirements-bench.txt, or name other sides")
    if len(taking_part) < len(sides):
        notes = (*notes, "Horovod did not take part: it is not installed here.")
    benchmark, at = Benchmark(taking_part, batch, steps, rate, timeout, notes), circumstances()
    for number in range(1, rounds + 1):
        for found in benchmark.round(number, list(product(models, optimizers, numbers))):
            keep(benchmark.record(at), page(benchmark.record(at)))
            off = found.get("difference", {}).get("relative", 0.0)
            setting = f"{found['model']} {found['optimizer']} {found['ranks']} {found['side']}"
            figures = f"{found['step_ms']:8.1f} ms {found['sent_bytes'] / 1e6:9.3f} MB  off by {off:.1e}"
            click.echo(f"round {number} of {rounds}  {setting:<34}{figures}", err=True)
    click.echo("\n".join(page(benchmark.record(at))))
    if benchmark.failures:
        raise click.ClickException(f"{len(benchmark.failures)} turns failed, see above and the record")
