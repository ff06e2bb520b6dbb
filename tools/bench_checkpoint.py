"""The cost of a checkpoint as a share of the step time: written in the background, and with a wait.

python tools/bench_checkpoint.py --record docs/benchmarks/2026-11-21-checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmarks.jobs import shared_environment
from tools.benchmarks.networks import describe
from tools.benchmarks.record import circumstances
from tools.benchmarks.task import TASKS

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tools" / "benchmarks" / "worker_checkpoint.py"
Rounds = Sequence[Sequence[Mapping[str, Any]]]


def measure(ranks: int, rounds: int, steps: int, timeout_seconds: float) -> dict[str, Any]:
    """Run one job on this machine; returns its blocks by round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [str(WORKER), str(folder), str(rounds), str(steps)]
        launch = ["-m", "fleet_train", "launch", f"--nproc_per_node={ranks}", f"--log_dir={folder / 'log'}"]
        done = subprocess.run(
            [sys.executable, *(launch if ranks > 1 else []), *arguments],
            env=shared_environment(dict(os.environ), "AuthenticAMD" in Path("/proc/cpuinfo").read_text()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{ranks} rank(s) ended with {done.returncode}:\n{done.stdout[-3000:]}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result | {"ranks": ranks, "steps_per_block": steps, "summary": summarise(result["rounds"], steps)}


def summarise(rounds: Rounds, steps: int) -> dict[str, Any]:
    """Medians over the rounds; shares are of the block without a checkpoint in the same round."""
    by_kind = [{block["kind"]: block for block in blocks} for blocks in rounds]
    summary: dict[str, Any] = {"step_ms": _median([1000 * each["none"]["seconds"] / steps for each in by_kind])}
    for kind in ("background", "waiting"):
        shares = _shares(by_kind, kind, "seconds")
        quartiles = statistics.quantiles(shares, n=4)
        summary[kind] = {
            "share_percent": _median(shares),
            "share_percent_quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
            "processor_share_percent": _median(_shares(by_kind, kind, "processor_seconds")),
            "stood_ms": _median([each[kind]["stood_ms"] for each in by_kind]),
            "late_ms": _median([each[kind]["late_ms"] for each in by_kind]),
        }
    return summary


def _shares(by_kind: Sequence[Mapping[str, Mapping[str, float]]], kind: str, what: str) -> list[float]:
    return [100 * (each[kind][what] / each["none"][what] - 1) for each in by_kind]


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def page(record: Mapping[str, Any]) -> str:
    """The markdown page of a record."""
    at = record["circumstances"]
    lines = [
        f"# What a checkpoint costs, {at['date'][:10]}",
        "",
        f"- Network: {record['task']}; batch 128 over all ranks, Momentum, float32, one thread per rank; a checkpoint "
        f"is {record['jobs'][0]['checkpoint_bytes'] / 1e6:.1f} MB on a local disk.",
        f"- Machine: {at['processor']}, {at['processors']} processors for all ranks together, load average "
        f"{at['load_average_before'][0]} before the start. CPU and Gloo; no GPU.",
        f"- Versions: {', '.join(f'{key} {value}' for key, value in at['versions'].items())}; "
        f"commit {at['commit'][:10]}{' with uncommitted changes' if at['uncommitted_changes'] else ''}.",
        f"- Blocks of {record['jobs'][0]['steps_per_block']} steps with one checkpoint each, or none, in turn; share: "
        "time of a block over that of the one without in the same round, median over "
        f"{len(record['jobs'][0]['rounds'])} rounds (quartiles). Processor time: rank 0's own, its write included; it "
        "says what a checkpoint costs when no processor is idle, also on a machine where others work.",
        f"- Command: `{at['command']}`",
        "",
        "| ranks | step | written | share of the step time | of the processor time | training stands still |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for job in record["jobs"]:
        for kind, words in (("background", "in the background"), ("waiting", "waited for")):
            each = job["summary"][kind]
            low, high = each["share_percent_quartiles"]
            lines.append(
                f"| {job['ranks']} | {job['summary']['step_ms']:.1f} ms | {words} | {each['share_percent']:+.2f} % "
                f"({low:+.2f} to {high:+.2f}) | {each['processor_share_percent']:+.2f} % | {each['stood_ms']:.1f} ms |"
            )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks, with a job for each")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, each with one block of each kind")
    parser.add_argument("--steps", type=int, default=50, help="steps per block, so per checkpoint")
    parser.add_argument("--timeout", type=float, default=300.0, help="timeout of one job in seconds")
    parser.add_argument("--record", type=Path, help="write <path>.json and <path>.md")
    given = parser.parse_args(arguments)
    at = circumstances() | {"command": " ".join(["python", "tools/bench_checkpoint.py", *(arguments or sys.argv[1:])])}
    jobs = [measure(ranks, given.rounds, given.steps, given.timeout) for ranks in given.ranks]
    record = {"circumstances": at, "task": describe(TASKS["mlp"]), "jobs": jobs}
    print(page(record))
    if given.record is not None:
        given.record.parent.mkdir(parents=True, exist_ok=True)
        given.record.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        given.record.with_suffix(".md").write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main()
