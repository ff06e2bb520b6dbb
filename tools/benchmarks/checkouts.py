"""What compares checkouts of the project: how long a job takes to start, beside torchrun, and the bits it trains to."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from tools.benchmarks.jobs import JobFailed, checkout_of, results_of, revision_of, run_commands, run_here
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, table, told_circumstances
from tools.benchmarks.start_rank import now

OURS, BEFORE, TORCH = "fleet_train", "fleet_train before", "torchrun + DDP"
# The processes of each start, from the command to the rank: each starts the next one.
CHAIN = ("launcher", "rank")
_START_SCRIPT = str(ROOT / "tools" / "benchmarks" / "start_rank.py")
_PROCESSES, _PORT, _TIMEOUT_SECONDS = 2, 29640, 300.0
Turn = Mapping[str, Mapping[str, float]]


def measure_start(contestant: str, checkout: Path, port: int) -> dict[str, float]:
    """Seconds of each phase, ``total`` (to the end of the slowest rank's first step), ``end`` (of the command), and
    ``processor`` (seconds of all processes together to the end of the first step). Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="fleet_train-start-") as name:
        folder, began = Path(name), now()
        if contestant == TORCH:
            flags = ["-m", "torch.distributed.run", f"--nproc_per_node={_PROCESSES}", f"--master_port={port}"]
            command = [sys.executable, *flags, _START_SCRIPT, "torch", name]
            run_commands(contestant, [(command, {})], folder, _TIMEOUT_SECONDS)
        else:
            script = [_START_SCRIPT, "fleet_train", name]
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


def start_page(record: Mapping[str, Any]) -> list[str]:
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
def start(before: str | None, rounds: int, keep: Keep) -> None:
    """How long a job takes from the command to the end of its first step: our launcher beside torchrun, interleaved.

        python tools/bench.py start --before main --record docs/benchmarks

    Two processes on this machine train one step of the benchmarks' network; what each framework does by default. All
    start once per round, in another order in each. Without PyTorch (requirements-bench.txt) there is no torchrun
    beside it.
    """
    with contextlib.ExitStack() as stack:
        checkouts = {OURS: ROOT}
        if before:
            checkouts[BEFORE] = stack.enter_context(checkout_of(before))
        if importlib.util.find_spec("torch"):
            checkouts[TORCH] = ROOT
        asked = {"before": revision_of(checkouts[BEFORE]) if before else None}
        record = keep.begun({"circumstances": circumstances(), **asked, "loads": [], "rounds": []})
        measure(rounds, checkouts, record, keep)
    click.echo("\n".join(start_page(record)))


def measure(rounds: int, checkouts: Mapping[str, Path], record: dict[str, Any], keep: Keep) -> None:
    """All contestants, in a different order in every round; the record is written after each."""
    names = list(checkouts)
    for who in names:  # compiles Python files and fills the page cache
        measure_start(who, checkouts[who], _PORT)
    for turn in range(len(record["rounds"]), rounds):
        record["loads"].append(round(os.getloadavg()[0], 2))
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found = {who: measure_start(who, checkouts[who], _PORT + 10 * (turn % 5 + 1)) for who in order}
        record["rounds"].append({who: {name: round(value, 4) for name, value in found[who].items()} for who in names})
        record |= summary(record["rounds"])
        told = ", ".join(f"{who} {found[who]['total']:.2f} s" for who in names)
        click.echo(f"round {turn + 1} of {rounds}: {told}", err=True)
        keep(record, start_page(record))


_BITS_SCRIPT = str(ROOT / "tools" / "benchmarks" / "bits_rank.py")
_PORTS = itertools.cycle(range(29700, 30500, 16))
_LAUNCH_SECONDS = 600


def launch(checkout: Path, ranks: int, arguments: Sequence[str], folder: Path) -> str:
    """Train on ``ranks`` ranks with the checkout's launcher; the end of the output if that fails, else nothing."""
    port, nodes = next(_PORTS), ["127.0.0.2", "127.0.0.3"] if ranks > 2 else ["127.0.0.2"]
    commands = []
    for node in nodes:
        flags = [f"--node_ip={node}", f"--nproc_per_node={ranks // len(nodes)}", f"--started_port={port}"]
        flags += [f"--cluster_node_ips={','.join(nodes)}", f"--log_dir={folder / f'log{node}'}"]
        command = [sys.executable, "-m", "fleet_train", "launch", *flags, _BITS_SCRIPT, *arguments]
        commands.append((command, {"PYTHONPATH": str(checkout)}))
    try:
        run_commands("training", commands, folder, _LAUNCH_SECONDS)
    except JobFailed as failure:
        said = str(failure).replace(str(folder), "FOLDER").replace(str(checkout), "CHECKOUT").replace("\n", " / ")
        return said[-600:]
    return ""


def run_all(checkout: Path, ranks: int, profiles: Sequence[str], folder: Path, other: Path | None) -> dict[str, str]:
    """Train all profiles in as few launches as possible; for each that failed, why. A failure costs another launch."""
    failed, left = dict[str, str](), list(profiles)
    folder.mkdir()
    while left:
        failure = launch(checkout, ranks, [",".join(left), str(folder), *([str(other)] if other else [])], folder)
        done = [name for name in left if _arrays(folder, name, "resumed", 1, ranks)]
        left = [name for name in left if name not in done]
        if left:
            failed[left.pop(0)] = failure or "no result"
        if done and not left:
            break
    return failed


def _arrays(folder: Path, profile: str, part: str, case: int, ranks: int) -> list[Path]:
    """One file per rank, or an empty list if any is missing."""
    paths = [folder / f"{profile}-{case}-{part}-{rank}.npz" for rank in range(ranks)]
    return paths if all(path.is_file() for path in paths) else []


def differences(one: Path, other: Path, profile: str, ranks: int) -> Iterator[str]:
    """Each tensor of which the two folders hold other bits, in the order in which they arose."""
    for case, part in itertools.product((0, 1), ("trained", "saved", "resumed", "taken_over")):
        expected = "resumed" if part == "taken_over" and not _arrays(one, profile, part, case, ranks) else part
        pairs = zip(
            _arrays(one, profile, expected, case, ranks), _arrays(other, profile, part, case, ranks), strict=False
        )
        for rank, (left, right) in enumerate(pairs):
            with np.load(left) as first, np.load(right) as second:
                for name in sorted({*first.files, *second.files}):
                    where = f"{name} ({'Adam' if case else 'Momentum'}, {part}, rank {rank})"
                    if name not in first.files or name not in second.files:
                        yield f"{where}: only in one"
                    elif first[name].tobytes() != second[name].tobytes():
                        yield f"{where}: {_largest(first[name], second[name])}"


def _largest(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {one.shape}, {other.dtype} {other.shape}"
    return f"differs by up to {np.nanmax(np.abs(one.astype(np.float64) - other.astype(np.float64))):.3g}"


def compare(checkouts: Mapping[str, Path], all_ranks: Sequence[int], profiles: Sequence[str]) -> list[dict[str, Any]]:
    """One row per number of ranks and profile: ``result`` is equal, different, not repeatable or failed."""
    rows: list[dict[str, Any]] = []
    for ranks in all_ranks:
        with tempfile.TemporaryDirectory(prefix="compare-checkouts-") as name:
            before, again, after = (Path(name) / each for each in ("before", "again", "after"))
            failed = {each: run_all(checkouts["before"], ranks, profiles, each, None) for each in (before, again)}
            failed[after] = run_all(checkouts["after"], ranks, profiles, after, before)
            for profile in profiles:
                row: dict[str, Any] = {"profile": profile, "ranks": ranks}
                noise = list(differences(before, again, profile, ranks))
                found = list(differences(before, after, profile, ranks))
                reasons = [f"{where.name}: {failed[where][profile]}" for where in failed if profile in failed[where]]
                if reasons:
                    row |= {"result": "failed", "first": reasons[0]}
                elif noise:
                    row |= {"result": "not repeatable", "first": f"two runs of before: {noise[0]}"}
                else:
                    row |= {"result": "different" if found else "equal", "first": found[0] if found else ""}
                rows.append(row)
                print(f"{profile:20} {ranks} ranks  {row['result']:15} {row['first']}", flush=True)
    return rows


def bits_page(record: Mapping[str, Any]) -> list[str]:
    rows = [(row["profile"], row["ranks"], row["result"], row["first"]) for row in record["rows"]]
    return [
        f"# Bits of two checkouts, {record['circumstances']['date'][:10]}",
        "",
        f"- Before: commit {record['before']}; after: commit {record['after']}.",
        *told_circumstances(record["circumstances"]),
        "",
        *table(("profile", "ranks", "parameters and state", "first difference"), rows),
    ]


@click.command(context_settings={"show_default": True})
@click.option("--before", required=True, help="A checkout, or a commit, branch or tag.")
@click.option("--after", default=str(ROOT), help="The same.", show_default="this checkout")
@click.option("--ranks", multiple=True, default=(2, 4), help="Numbers of ranks; repeat.")
@click.option("--profiles", help="Names, separated by commas.  [default: all that both checkouts ship]")
@recorded(1, "each compares every profile")
def before_and_after(
    before: str, after: str, ranks: tuple[int, ...], profiles: str | None, rounds: int, keep: Keep
) -> None:
    """Do two checkouts train to the same bits? For changes that must not change any result.

        python tools/bench.py before-and-after --before main                         every profile, on 2 and on 4 ranks
        python tools/bench.py before-and-after --before main --profiles dgc,diloco --ranks 2

    Each checkout's own launcher starts bits_rank.py, which uses public names only. It trains a network of an
    embedding, a convolution, batch norm and dense layers for 14 steps under each profile (periods and warm-ups
    shortened, so that they happen), once with Momentum and once with Adam, a clip and smaller buckets (DGC: SGD, no
    clip). It saves, starts again from what was saved and trains 6 more steps; in the second checkout it also continues
    from what the first one saved. Every parameter, buffer and optimizer state of every rank is compared, bit by bit.
    On 4 ranks there are two "machines", 127.0.0.2 and 127.0.0.3. The first checkout runs twice: a profile whose two
    runs differ is shown as not repeatable, with the tensor. All profiles share a launch; one that fails costs another
    launch. Exit code: 0 equal, 1 different, 2 a run failed. Both checkouts must run on one machine: bits depend on the
    processor.
    """
    with checkout_of(before) as one, checkout_of(after) as other:
        checkouts = {"before": one, "after": other}
        shipped = [{path.stem for path in each.glob("strategies/*.yaml")} for each in checkouts.values()]
        names = profiles.split(",") if profiles else sorted(shipped[0] & shipped[1])
        rows = [row for _ in range(rounds) for row in compare(checkouts, ranks, names)]
        record = {"circumstances": circumstances(), "rows": rows}
        record |= {who: revision_of(each) for who, each in checkouts.items()}
        keep(record, bits_page(record))
    results = {row["result"] for row in rows}
    sys.exit(2 if "failed" in results else 1 if "different" in results else 0)
