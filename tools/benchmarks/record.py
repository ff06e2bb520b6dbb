"""The record of a benchmark: what was measured, on what, with which command. JSON, a markdown page and a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fleet_train.selftest.record import git, processor
from tools.benchmarks.figures import BLOCK_STEPS, SETUP_STEPS, Summary
from tools.benchmarks.report import row_of, table

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("paddlepaddle", "torch", "numpy", "scikit-learn")


def circumstances() -> dict[str, Any]:
    """Commit, versions, processor: what somebody needs to measure the same again. No path of this machine."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git(ROOT, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(git(ROOT, "status", "--porcelain", "--", "fleet_train", "tools", "strategies")),
        "command": " ".join(["python", "tools/bench_strategies.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def told_circumstances(at: Mapping[str, Any], network: str = "CPU and Gloo") -> list[str]:
    """The lines of a page that say on what, and by which command, its record was made."""
    versions = ", ".join(f"{key} {value}" for key, value in at["versions"].items() if value)
    return [
        f"- Machine: {at['processor']}, {at['processors']} processors for all processes, Linux {at['kernel']}, "
        f"load average {at['load_average_before'][0]} before the start; {network}.",
        f"- Versions: {versions}; commit {at['commit'][:10]}"
        f"{' with uncommitted changes' if at['uncommitted_changes'] else ''}.",
        f"- Command: `{at['command']}`",
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(
    path: Path, record: Mapping[str, Any], summaries: Mapping[str, Summary], predictions: Mapping[str, float]
) -> None:
    """``path`` is without its ending: .json, .md and .png are written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rate = record["lab"]["rate"]
    figures = {
        name: asdict(each) | asdict(row_of(name, summaries, rate, predictions)) for name, each in summaries.items()
    }
    # Raw times last and in one line per contestant and round: the file stays readable.
    content = json.dumps({key: value for key, value in record.items() if key != "rounds"}, indent=1)
    summary = json.dumps(figures, indent=1)
    rounds = ",\n".join(json.dumps(each) for each in record["rounds"])
    text = f'{content[:-2]},\n"summary": {summary},\n"rounds": [\n{rounds}\n]}}\n'
    path.with_suffix(".json").write_text(text, encoding="utf-8")
    path.with_suffix(".md").write_text(page(path.name, record, summaries, predictions), encoding="utf-8")


def page(
    name: str, record: Mapping[str, Any], summaries: Mapping[str, Summary], predictions: Mapping[str, float]
) -> str:
    """The markdown page of a record."""
    lab, at, task = record["lab"], record["circumstances"], record["task"]
    lines = [
        f"# Strategies, {at['date'][:10]}: {lab['nodes']} nodes x {lab['ranks_per_node']} ranks, {lab['rate']}",
        "",
        f"- Network: {task['description']}; batch {task['global_batch_size']} over all ranks, SGD with momentum "
        f"{task['momentum']}, learning rate {task['learning_rate']}, scikit-learn's digits, float32, one thread "
        "per rank.",
        f"- Machine: {at['processor']}, {at['processors']} processors for all ranks together, Linux {at['kernel']}, "
        f"{at['congestion_control']}, load average "
        f"{at['load_average_before'][0]} before the start; an emulated network.",
        f"- Versions: {', '.join(f'{key} {value}' for key, value in at['versions'].items())}; "
        f"commit {at['commit'][:10]}{' with uncommitted changes' if at['uncommitted_changes'] else ''}.",
        f"- {record['repeats']} rounds, every contestant once per round in turn, {task['steps']} steps each, the first "
        f"{task['warmup_steps']} not timed. Step: median over means of {BLOCK_STEPS} steps. Ratios and differences: "
        "median over the rounds of what ran in the same round.",
        f"- Target: test accuracy {record['target']}; evaluations take no time; the first {SETUP_STEPS} steps "
        "are left out.",
        f"- Command: `{at['command']}`",
        "",
        table(summaries, lab["rate"], predictions),
        "",
        *_notes(record),
        f"![time to accuracy]({name}.png)",
        "",
    ]
    return "\n".join(lines)


def _notes(record: Mapping[str, Any]) -> list[str]:
    failures: Sequence[Mapping[str, Any]] = record["failures"]
    link = record["lab"].get("link")
    notes = [
        "*sent / predicted*: the interface's counter, with the headers of TCP, over the plan's bytes. *wire time*: "
        "what the limiter counted, with one header per packet of the link's size, at the link's rate. *scaling "
        "efficiency*: the compute-only step, which is one node's, over the step.",
        "",
    ]
    if link:
        notes += [
            f"*predicted step*: the plan's price with the compute-only step and a link that `plan --measure` found to "
            f"have {link['latency_us']:.0f} us of latency and {link['bandwidth_mbps']:.0f} Mb/s.",
            "",
        ]
    notes += []
    for failure in failures:
        notes.append(f"- **Failed**: {failure['contestant']} in round {failure['round']}: {failure['reason']}")
    return [*notes, ""] if failures else notes
