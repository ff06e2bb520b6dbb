"""Do two checkouts train to the same bits? For changes that must not change any result.

    python tools/bench.py before-and-after --before main                         every profile, on 2 and on 4 ranks
    python tools/bench.py before-and-after --before main --profiles dgc,diloco --ranks 2

Each checkout's own launcher starts bits_rank.py, which uses public names only. It trains a network of
an embedding, a convolution, batch norm and dense layers for 14 steps under each profile (periods and warm-ups
shortened, so that they happen), once with Momentum and once with Adam, a clip and smaller buckets (DGC: SGD, no clip).
It saves, starts again from what was saved and trains 6 more steps; in the second checkout it also continues from what
the first one saved. Every parameter, buffer and optimizer state of every rank is compared, bit by bit. On 4 ranks there
are two "machines", 127.0.0.2 and 127.0.0.3. The first checkout runs twice: a profile whose two runs differ is shown as
not repeatable, with the tensor. All profiles share a launch; one that fails costs another launch.
Exit code: 0 equal, 1 different, 2 a run failed. Both checkouts must run on one machine: bits depend on the processor.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from tools.benchmarks.jobs import JobFailed, checkout_of, revision_of, run_commands
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, table, told_circumstances

_SCRIPT = str(ROOT / "tools" / "benchmarks" / "bits_rank.py")
_PORTS = itertools.cycle(range(29700, 30500, 16))
_LAUNCH_SECONDS = 600


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Hold the lock of the file that $COMPARE_CHECKOUTS_LOCK names, if any: other runs on this machine wait."""
    path = os.environ.get("COMPARE_CHECKOUTS_LOCK", os.devnull)
    with open(path, "ab") as file:
        if path != os.devnull:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def launch(checkout: Path, ranks: int, arguments: Sequence[str], folder: Path) -> str:
    """Train on ``ranks`` ranks with the checkout's launcher; the end of the output if that fails, else nothing."""
    port, nodes = next(_PORTS), ["127.0.0.2", "127.0.0.3"] if ranks > 2 else ["127.0.0.2"]
    commands = []
    for node in nodes:
        flags = [f"--node_ip={node}", f"--nproc_per_node={ranks // len(nodes)}", f"--started_port={port}"]
        flags += [f"--cluster_node_ips={','.join(nodes)}", f"--log_dir={folder / f'log{node}'}"]
        command = [sys.executable, "-m", "fleet_train", "launch", *flags, _SCRIPT, *arguments]
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
        with _turn():
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


def page(record: Mapping[str, Any]) -> list[str]:
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
def main(before: str, after: str, ranks: tuple[int, ...], profiles: str | None, rounds: int, keep: Keep) -> None:
    with checkout_of(before) as one, checkout_of(after) as other:
        checkouts = {"before": one, "after": other}
        shipped = [{path.stem for path in each.glob("strategies/*.yaml")} for each in checkouts.values()]
        names = profiles.split(",") if profiles else sorted(shipped[0] & shipped[1])
        rows = [row for _ in range(rounds) for row in compare(checkouts, ranks, names)]
        record = {"circumstances": circumstances(), "rows": rows}
        record |= {who: revision_of(each) for who, each in checkouts.items()}
        keep(record, page(record))
    results = {row["result"] for row in rows}
    sys.exit(2 if "failed" in results else 1 if "different" in results else 0)
