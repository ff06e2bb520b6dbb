"""How long a job takes from the command to the end of its first step: our launcher beside torchrun, interleaved.

    python tools/bench_start.py --before CHECKOUT --record docs/benchmarks/2026-11-23-start

Two processes on this machine train one step of the benchmarks' network. Needs requirements-bench.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet_train.cluster.installed import git
from tools.benchmarks.jobs import shared_environment
from tools.benchmarks.record import circumstances
from tools.starting.page import page
from tools.starting.stamps import now

ROOT = Path(__file__).resolve().parents[1]
OURS, BEFORE, TORCH = "fleet_train", "fleet_train before", "torchrun + DDP"
# The processes of each start, from the command to the rank: each starts the next one. An earlier checkout may have
# Paddle's own launcher and a wrapper between them.
CHAINS = {
    OURS: ("launcher", "rank"),
    BEFORE: ("launcher", "stock launcher", "wrapper", "rank"),
    TORCH: ("launcher", "rank"),
}
_SCRIPTS = ROOT / "tools" / "starting"
_PROCESSES = 2
_PORT = 29640
_TIMEOUT_SECONDS = 120.0


def command_of(contestant: str, folder: Path, port: int) -> list[str]:
    """The command that a user would type."""
    if contestant == TORCH:
        flags = [f"--nproc_per_node={_PROCESSES}", f"--master_port={port}"]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *flags,
            str(_SCRIPTS / "ddp.py"),
            str(folder),
        ]
    flags = [f"--nproc_per_node={_PROCESSES}", f"--started_port={port}", f"--log_dir={folder / 'log'}"]
    return [
        sys.executable,
        "-m",
        "fleet_train",
        "launch",
        *flags,
        str(_SCRIPTS / "ours.py"),
        str(folder),
    ]


def environment_of(checkout: Path) -> dict[str, str]:
    """The environment without variables of an outer job, and with Python's compiled files in use, as for users."""
    environ = shared_environment(dict(os.environ), "AuthenticAMD" in Path("/proc/cpuinfo").read_text())
    return {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": str(checkout)
    }


def measure_start(contestant: str, checkout: Path, port: int) -> dict[str, float]:
    """Seconds of each phase, ``total`` (to the end of the slowest rank's first step), ``end`` (of the command), and
    ``processor`` (seconds of all processes together to the end of the first step)."""
    with tempfile.TemporaryDirectory(prefix="fleet_train-start-") as name:
        folder = Path(name)
        began = now()
        _run(command_of(contestant, folder, port), environment_of(checkout), folder)
        ended = now()
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(_PROCESSES)]
    slowest = max(ranks, key=lambda rank: float(rank["ends"]["first step"]))
    found = phases(CHAINS[contestant], began, slowest)
    return {**found, "end": ended - began, "processor": processor_seconds(CHAINS[contestant], ranks)}


def phases(chain: Sequence[str], began: float, rank: Mapping[str, Any]) -> dict[str, float]:
    """The phases between the command and the end of this rank's first step, in order."""
    made = [float(at) for _, at, _ in rank["processes"][: len(chain)]][::-1]
    edges = {
        f"{who}, until it starts the {next_one}": at
        for who, next_one, at in zip(chain, chain[1:], made[1:], strict=False)
    }
    edges |= rank["ends"]
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


def _run(command: list[str], environ: dict[str, str], folder: Path) -> None:
    """Raises SystemExit with the output of a command that fails or times out."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(_TIMEOUT_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -signal.SIGKILL
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{(folder / 'output').read_text(errors='replace')}")


def summary(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of each contestant's phases, and of the ratios to torchrun within each round."""
    medians = {
        who: {phase: round(statistics.median(turn[who][phase] for turn in rounds), 3) for phase in rounds[-1][who]}
        for who in rounds[-1]
    }
    ratios = {
        who: {
            what: [round(turn[who][what] / turn[TORCH][what], 3) for turn in rounds]
            for what in ("total", "end", "processor")
        }
        for who in rounds[-1]
        if who != TORCH
    }
    return {
        "medians": medians,
        "ratios_to_torchrun": ratios,
        "median_ratio": {who: statistics.median(each["total"]) for who, each in ratios.items()},
    }


def measure(
    rounds: int, checkouts: Mapping[str, Path], record: Path | None, arguments: Sequence[str]
) -> dict[str, Any]:
    """All contestants, in a different order in every round; the record is written after each."""
    result: dict[str, Any] = circumstances() | {"rounds": [], "loads": []}
    result["command"] = f"python tools/bench_start.py {' '.join(arguments)}"
    if BEFORE in checkouts:
        result["before"] = git(checkouts[BEFORE], "rev-parse", "HEAD")
    names = list(checkouts)
    for who in names:  # compiles Python files and fills the page cache
        measure_start(who, checkouts[who], _PORT)
    for turn in range(rounds):
        result["loads"].append(round(os.getloadavg()[0], 2))
        order = names[turn % len(names) :] + names[: turn % len(names)]
        measured = {who: measure_start(who, checkouts[who], _PORT + 10 * (turn % 5 + 1)) for who in order}
        result["rounds"].append(
            {who: {phase: round(value, 4) for phase, value in measured[who].items()} for who in names}
        )
        result |= summary(result["rounds"])
        told = ", ".join(f"{who} {measured[who]['total']:.2f} s" for who in names)
        print(f"round {turn + 1} of {rounds}: {told}", file=sys.stderr, flush=True)
        if record is not None:
            record.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            record.with_suffix(".md").write_text(page(result))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="Rounds; each starts every contestant once.")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="Also start this checkout of the project.")
    parser.add_argument("--record", type=Path, metavar="PATH", help="Write PATH.json and PATH.md, after each round.")
    options = parser.parse_args()
    checkouts = {OURS: ROOT, **({BEFORE: options.before.resolve()} if options.before else {}), TORCH: ROOT}
    arguments = ["CHECKOUT" if word == str(options.before) else word for word in sys.argv[1:]]
    result = measure(options.rounds, checkouts, options.record, arguments)
    print(json.dumps({name: result[name] for name in ("medians", "median_ratio")}, indent=1))


if __name__ == "__main__":
    main()
