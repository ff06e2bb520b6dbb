"""The cost of synchronised batch norm: its step over the plain one's, on ranks of this machine over loopback.

python tools/bench_sync_batch_norm.py --record docs/benchmarks/2026-11-23-sync-batch-norm
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
from tools.benchmarks.record import circumstances, told_circumstances

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tools" / "benchmarks" / "worker_sync_batch_norm.py"
# Also in the worker, which imports Paddle.
SIDE = 64
# Per rank and step.
IMAGES = {"ResNet-50": 8, "convnet": 32}
Round = Mapping[str, Any]


def measure(network: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run one job; returns the blocks of its ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch = ["-m", "fleet_train", "launch", f"--nproc_per_node={given.ranks}", f"--log_dir={folder / 'log'}"]
        launch += [f"--started_port={given.started_port}"] if given.started_port else []
        sizes = [str(each) for each in (IMAGES[network], given.blocks, given.steps)]
        load = os.getloadavg()[0]
        done = subprocess.run(
            [sys.executable, *launch, str(WORKER), str(folder), network, *sizes],
            env=shared_environment(dict(os.environ), "AuthenticAMD" in Path("/proc/cpuinfo").read_text()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=given.timeout,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{network} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(given.ranks)]
    found = {"network": network, "load_average": round(load, 2), "exchanges": ranks[0]["exchanges"]}
    return found | {"ranks": [rank["blocks"] for rank in ranks]}


def summarise(rounds: Sequence[Round], steps: int) -> dict[str, Any]:
    """Of one network's rounds: medians, and the ratios with their least and largest. A round's ratio is of the medians
    over its blocks, so both kinds have run beside the same load."""
    figures: dict[str, Any] = {"exchanges": rounds[0]["exchanges"]}
    for name, what in (("step_ms", "seconds"), ("processor_ms", "processor_seconds")):
        times = [
            {kind: 1000 / steps * _median(each, kind, what) for kind in ("plain", "synchronised")} for each in rounds
        ]
        ratios = [each["synchronised"] / each["plain"] for each in times]
        figures[name] = {
            **{kind: round(statistics.median(each[kind] for each in times), 1) for kind in times[0]},
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return figures


def _median(each: Round, kind: str, what: str) -> float:
    return statistics.median(
        float(block[what]) for blocks in each["ranks"] for block in blocks if block["kind"] == kind
    )


def page(record: Mapping[str, Any]) -> str:
    """The markdown page of a record."""
    at, asked = record["circumstances"], record["asked"]
    loads = [each["load_average"] for each in record["rounds"]]
    lines = [
        f"# What synchronised batch norm costs, {at['date'][:10]}",
        "",
        f"- {asked['ranks']} ranks over loopback by the launcher, one thread each; images of {SIDE} x {SIDE}, "
        f"Momentum, float32. Both programs are in one job and train in turn, "
        f"{asked['blocks']} blocks of {asked['steps']} steps of each kind per round.",
        *told_circumstances(at),
        f"- Load average before the rounds: {min(loads):.1f} to {max(loads):.1f}. Ranks that wait for each other in "
        "every layer lose more if other processes take their processors than ranks that do so once per step: the "
        "ratio of processor times (all threads of a rank, waiting not counted) says what the work itself costs.",
        f"- Ratio: synchronised over plain, median over {asked['rounds']} rounds (least to largest).",
        "",
        "| network | images per rank | exchanges per step | plain | synchronised | samples/s | ratio of steps | "
        "processor time, plain | synchronised | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for network, figures in record["summary"].items():
        step, worked = figures["step_ms"], figures["processor_ms"]
        samples = [1000 * IMAGES[network] * asked["ranks"] / step[kind] for kind in ("plain", "synchronised")]
        lines.append(
            f"| {network} | {IMAGES[network]} | {figures['exchanges']} | "
            f"{step['plain']:.0f} ms | {step['synchronised']:.0f} ms | "
            f"{samples[0]:.1f} -> {samples[1]:.1f} | {_ratio(step)} | {worked['plain']:.0f} ms | "
            f"{worked['synchronised']:.0f} ms | {_ratio(worked)} |"
        )
    return "\n".join([*lines, ""])


def _ratio(figures: Mapping[str, Any]) -> str:
    least, largest = figures["ratios"]
    return f"{figures['ratio']:.2f} ({least:.2f} to {largest:.2f})"


def write(path: Path, record: Mapping[str, Any]) -> None:
    """``path`` is without its ending: .json and .md are written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({key: value for key, value in record.items() if key != "rounds"}, indent=1)
    rounds = ",\n".join(json.dumps(each) for each in record["rounds"])
    path.with_suffix(".json").write_text(f'{content[:-2]},\n"rounds": [\n{rounds}\n]}}\n', encoding="utf-8")
    path.with_suffix(".md").write_text(page(record), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=IMAGES, default=list(IMAGES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each runs one job per network")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of each kind per round, interleaved")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--started_port", type=int, help="the launcher's port, if another job uses the default")
    parser.add_argument("--timeout", type=float, default=900.0, help="timeout of one job in seconds")
    parser.add_argument("--record", type=Path, help="write <path>.json and <path>.md, after each round")
    given = parser.parse_args(arguments)
    command = ["python", "tools/bench_sync_batch_norm.py", *(sys.argv[1:] if arguments is None else arguments)]
    record: dict[str, Any] = {"circumstances": circumstances() | {"command": " ".join(command)}, "rounds": []}
    for number in range(given.rounds):
        record["rounds"] += [{"round": number} | measure(network, given) for network in given.networks]
        done = {name: [each for each in record["rounds"] if each["network"] == name] for name in given.networks}
        record["summary"] = {name: summarise(rounds, given.steps) for name, rounds in done.items()}
        record["asked"] = {name: getattr(given, name) for name in ("ranks", "blocks", "steps")}
        record["asked"]["rounds"] = number + 1
        if given.record is not None:
            write(given.record, record)
    print(page(record))


if __name__ == "__main__":
    main()
