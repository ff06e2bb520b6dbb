"""The record of a benchmark: what was measured, on what, with which command. JSON and a markdown page."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fleet_train.cluster.installed import git, processor
from tools.benchmarks.figures import SETUP_STEPS, Summary
from tools.benchmarks.report import row_of, table

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("paddlepaddle", "torch", "numpy", "scikit-learn")


def circumstances() -> dict[str, Any]:
    """Commit, versions, processor: what is needed to repeat the measurement. No path of this machine."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git(ROOT, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(git(ROOT, "status", "--porcelain", "--", "fleet_train", "tools", "strategies")),
        "command": " ".join(["python", "tools/bench_strategies.py", *map(shlex.quote, sys.argv[1:])]),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def told_circumstances(at: Mapping[str, Any], network: str = "CPU and Gloo") -> list[str]:
    """The lines of a page that give the machine and the command of its record."""
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
    """Write .json and .md, each atomically; ``path`` has no ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rate = record["lab"]["rate"]
    figures = {
        name: asdict(each) | asdict(row_of(name, summaries, rate, predictions)) for name, each in summaries.items()
    }
    # Raw times last, one line per contestant and round, so that the file stays readable.
    content = json.dumps({key: value for key, value in record.items() if key != "rounds"}, indent=1)
    summary = json.dumps(figures, indent=1)
    rounds = ",\n".join(json.dumps(each) for each in record["rounds"])
    text = f'{content[:-2]},\n"summary": {summary},\n"rounds": [\n{rounds}\n]}}\n'
    _replace(beside(path, ".json"), text)
    _replace(beside(path, ".md"), page(path.name, record, summaries, predictions))


def beside(path: Path, ending: str) -> Path:
    """Append an ending; ``Path.with_suffix`` would cut a name that contains dots."""
    return path.with_name(path.name + ending)


def _replace(path: Path, text: str) -> None:
    part = beside(path, ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def page(
    name: str, record: Mapping[str, Any], summaries: Mapping[str, Summary], predictions: Mapping[str, float]
) -> str:
    """The markdown page of a record."""
    lab, at = record["lab"], record["circumstances"]
    lines = [
        f"# Strategies, {at['date'][:10]}: {record['task']['name']}, {lab['nodes']} nodes x "
        f"{lab['ranks_per_node']} ranks, {told_rate(lab['rate'])}",
        "",
        *_settings(record),
        *_sittings(record["sittings"]),
        "",
        table(summaries, lab["rate"], predictions),
        "",
        *_notes(record, summaries),
        f"![time to accuracy]({name}.png)",
        "",
    ]
    return "\n".join(lines)


def told_rate(rate: str) -> str:
    return "no limit" if rate == "none" else rate


def _settings(record: Mapping[str, Any]) -> list[str]:
    task = record["task"]
    seeds = sorted({each["seed"] for each in record["rounds"]})
    before = record["before_commit"]
    return [
        *([f"- *before*: commit {before[:10]}."] if before else []),
        f"- **{record['whole_rounds']} of {record['repeats']} rounds**, every contestant once per round in turn, "
        f"{task['steps']} steps each; seeds of start weights and data order: {', '.join(map(str, seeds))}.",
        f"- Network: {task['description']}; batch {task['global_batch_size']} over all ranks, SGD with momentum "
        f"{task['momentum']}, constant learning rate {task['learning_rate']}, scikit-learn's digits, float32, one "
        "thread per rank.",
        f"- Step: the mean over the last whole periods of a strategy, behind its own start and the first "
        f"{task['warmup_steps']} steps; the median of these means over the rounds, with the smallest and largest. "
        "Ratios and differences: of what ran in the same round, and the median over the rounds.",
        f"- Target: the first evaluation from which the mean test accuracy over the rounds stays at or above "
        f"{record['target']} to the end; the mean of the seconds of training until there, without the first "
        f"{SETUP_STEPS} steps.",
        f"- Off the clock: every {task['evaluate_every']} steps each rank copies its weights while its clock stands "
        "still. After the training the mean of all ranks' weights (and running statistics) is evaluated: replicas "
        "of strategies with local steps differ, and are judged by their mean.",
    ]


def _sittings(sittings: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for at in sittings:
        loads = f"{at['load_average_before'][0]} before and {(at['load_average_after'] or ['?'])[0]} after"
        lines += [
            f"- Rounds {_told_rounds(at['rounds'])}, {at['date']}: {at['processor']}, {at['processors']} processors "
            f"for all ranks together, Linux {at['kernel']}, {at['congestion_control']}; load average {loads}; an "
            "emulated network.",
            f"  - Versions: {', '.join(f'{key} {value}' for key, value in at['versions'].items() if value)}; commit "
            f"{at['commit'][:10]}{' with uncommitted changes' if at['uncommitted_changes'] else ', clean'}.",
            f"  - Command: `{at['command']}`",
        ]
    return lines


def _told_rounds(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _notes(record: Mapping[str, Any], summaries: Mapping[str, Summary]) -> list[str]:
    link = record["lab"].get("link")
    turns = [each["seconds"] for each in record["rounds"]]
    paused = max((each.paused_share for each in summaries.values()), default=0.0)
    notes = [
        "*best DDP*: the fastest of PyTorch DDP's bucket sizes in this table. *PyTorch twin*: the hook of the same "
        "kind, rank or period, the fastest of its settings in this table. *(tuned)*: a file of "
        "tools/benchmarks/profiles with knobs chosen for this benchmark; without it, a profile of the catalogue as it "
        "is. *sent / predicted*: the interface's counter, with the headers of TCP, over the plan's bytes. *wire "
        "time*: what the limiter counted, with one header per packet of the link's size, at the link's rate. "
        "*scaling efficiency*: the compute-only step, which is one node's, over the step. *times fewer than "
        "float32*: bytes of the first synchronous strategy over its own. Copies of the weights took at most "
        f"{paused:.1%} of a contestant's training time.",
        "",
        f"The turns took {sum(turns) / 60:.0f} minutes.",
        "",
    ]
    if any(not each.whole_periods for each in summaries.values()):
        notes += ["[1] Shorter than its own start and one period: the mean over all steps but the first.", ""]
    if link:
        notes += [
            f"*predicted step*: the plan's price with the compute-only step and a link that `plan --measure` found to "
            f"have {link['latency_us']:.0f} us of latency and {link['bandwidth_mbps']:.0f} Mb/s.",
            "",
        ]
    failed = [f"- **Failed**: {each['contestant']} in round {each['round']}: {each['reason']}"
              for each in record["failures"]]  # fmt: skip
    return [*notes, *failed, ""] if failed else notes
