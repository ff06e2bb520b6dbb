"""How long a job needs after ``kill -9`` of a rank until its next new step, beside torchrun and Ray Train.

    python tools/bench.py restart --rounds 2 --record docs/benchmarks
    python tools/bench.py restart --rival_python /tmp/rivals/bin/python

Each job trains a small model on this machine, saves after every step, and resumes. A while after its last new step a
rank is killed; the time is until rank 0 has made a step that it had not made before.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.record import Keep, circumstances, recorded, spread, table, told_circumstances
from tools.demo import free_port
from tools.processes import ROOT, Process, leaving_on_signals, start, stop

_STEPS_SECONDS, _STOP_SECONDS, _LOOK_SECONDS = 60.0, 30.0, 0.01
_HOSTS = ("127.0.0.2", "127.0.0.3")
# Without its own store for each attempt, PyTorch's Gloo connects to the addresses of the processes that were killed.
_ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_TRAIN_V2_ENABLED": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True)
class Contestant:
    name: str
    ranks: int
    launchers: int = 1
    flags: tuple[str, ...] = ()
    kind: str = "fleet"

    def commands(self, folder: Path, rival: str) -> list[list[str]]:
        """One for each machine."""
        here = Path(__file__).parent
        program = [str(here / "restart_rivals.py"), self.kind, str(folder)]
        if self.kind == "torch":
            run = [rival, "-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", "--max-restarts=1000"]
            return [[*run, "--standalone", *program]]
        if self.kind == "ray":
            return [[rival, *program, str(self.ranks)]]
        first = free_port((*_HOSTS, "127.0.0.1"), self.ranks + 1)
        each = f"--nproc_per_node={self.ranks // self.launchers}"
        launch = [sys.executable, "-m", "fleet_train", "launch", each, "--max_restarts=1000", f"--started_port={first}"]
        hosts = [(f"--cluster_node_ips={','.join(_HOSTS)}", f"--node_ip={host}") for host in _HOSTS]
        ours = [str(here / "restart_rank.py"), str(folder)]
        of_nodes = hosts if self.launchers == 2 else [()]
        return [
            [*launch, *where, f"--log_dir={folder / f'log{node}'}", *self.flags, *ours]
            for node, where in enumerate(of_nodes)
        ]


CONTESTANTS = (
    Contestant("launch, 2 ranks", 2),
    Contestant("launch --spares 0, 2 ranks", 2, flags=("--spares=0",)),
    Contestant("torchrun, 2 ranks", 2, kind="torch"),
    Contestant("Ray Train, 2 ranks", 2, kind="ray"),
    Contestant("two launches, 1 rank each", 2, launchers=2),
    Contestant("launch, 4 ranks", 4),
    Contestant("torchrun, 4 ranks", 4, kind="torch"),
)


class Running:
    """A contestant's job. ``notes`` are what its ranks have noted, oldest first."""

    def __init__(self, contestant: Contestant, folder: Path, rival: str) -> None:
        self._folder = folder
        environ = os.environ | _ENVIRON
        self._processes: list[Process] = [
            start(command, folder / f"output{node}", environ, folder)
            for node, command in enumerate(contestant.commands(folder, rival))
        ]

    def notes(self, rank: int) -> list[tuple[Any, float, int]]:
        path = self._folder / f"notes.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            if line.endswith("]"):
                what, at, pid = json.loads(line)
                found.append((what, at, pid))
        return found

    def steps(self, rank: int) -> list[tuple[int, float, int]]:
        return [note for note in self.notes(rank) if isinstance(note[0], int)]

    def until_step(self, least: int) -> float:
        """When rank 0 had made this step. Raises ClickException if it does not come."""
        deadline = time.monotonic() + _STEPS_SECONDS
        while time.monotonic() < deadline and all(each.poll() is None for each in self._processes):
            made = [at for step, at, _ in self.steps(0) if step >= least]
            if made:
                return made[0]
            time.sleep(_LOOK_SECONDS)
        told = "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("output*")))
        raise click.ClickException(f"step {least} did not come:\n{told}")

    def kill(self) -> dict[str, float]:
        """Kill the last rank; seconds until rank 0 had imported, joined, converted, and made a new step."""
        rank = sum(1 for _ in self._folder.glob("notes.*")) - 1
        pid, at = self.steps(rank)[-1][2], time.monotonic()
        os.kill(pid, signal.SIGKILL)
        last = self.steps(0)[-1]
        ended = self.until_step(last[0] + 1)
        events = {str(what): when for what, when, of in self.notes(0) if of != last[2] and when > at}
        if not events:  # rank 0 had made it before it noticed
            ended = self.until_step(last[0] + 2)
            events = {str(what): when for what, when, of in self.notes(0) if of != last[2] and when > at}
        took = {name: round(events[name] - at, 3) for name in ("imported", "joined", "converted") if name in events}
        return took | {"new step": round(ended - at, 3)}

    def stop(self) -> None:
        stop(self._processes, _STOP_SECONDS)


def measure(
    contestant: Contestant, kills: int, pause_seconds: float, rival: str, chance: random.Random
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        began, gave_up = time.monotonic(), False
        running = Running(contestant, Path(name), rival)
        try:
            started = running.until_step(0) - began
            taken = []
            for _ in range(kills):
                time.sleep(pause_seconds + chance.uniform(0, 1))
                taken.append(running.kill())
        except click.ClickException:
            if contestant.kind == "fleet":
                raise
            gave_up = True
        finally:
            running.stop()
    return {"name": contestant.name, "first step": round(started, 3), "kills": taken, "gave_up": gave_up}


@click.command()
@click.option("--kills", type=click.IntRange(1), default=4, help="Ranks killed in each job.")
@click.option("--pause", type=click.FloatRange(0), default=20.0, help="Seconds of training before each kill.")
@click.option("--rival_python", default="", help="A Python with PyTorch and Ray; without it the rivals are left out.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only contestants whose name has this; may be repeated.")
@recorded(rounds=2, of_rounds="in each, one job after the other")
def main(rounds: int, kills: int, pause: float, rival_python: str, only: Sequence[str], keep: Keep) -> None:
    """Measure it, and print the table."""
    chosen = [
        each
        for each in CONTESTANTS
        if (each.kind == "fleet" or rival_python) and (not only or any(text in each.name for text in only))
    ]
    record: dict[str, Any] = {
        "circumstances": circumstances(),
        "rivals": rivals_of(rival_python),
        "kills": kills,
        "pause": pause,
        "rounds": [],
    }
    chance = random.Random(0)
    with leaving_on_signals():
        for _ in range(rounds):
            record["rounds"].append([])
            for number, each in enumerate(chosen, 1):
                record["rounds"][-1].append(measure(each, kills, pause, rival_python, chance))
                seen = chosen if len(record["rounds"]) > 1 else chosen[:number]
                lines = page(record, seen)
                keep(record, lines)
    click.echo("\n".join(lines))


def rivals_of(python: str) -> str:
    """The rivals' versions, in words."""
    if not python:
        return "none"
    code = "from importlib.metadata import version; print('torch', version('torch') + ', ray', version('ray'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def page(record: Mapping[str, Any], chosen: Sequence[Contestant]) -> list[str]:
    rows = []
    for each in chosen:
        jobs = [job for jobs in record["rounds"] for job in jobs if job["name"] == each.name]
        kills = [kill for job in jobs for kill in job["kills"]]
        if not kills:
            rows.append([f"{each.name} (ended at its first kill)", 0, *["-"] * 4, "-"])
            continue
        parts = [
            f"{statistics.median(kill[name] for kill in kills if name in kill):.2f}"
            for name in ("imported", "joined", "converted")
        ]
        times = [kill["new step"] for kill in kills]
        first = statistics.median(job["first step"] for job in jobs)
        lost = sum(job["gave_up"] for job in jobs)
        rows.append(
            [
                each.name + (f" (ended at one kill more: {lost})" if lost else ""),
                len(kills),
                *parts,
                spread(times, statistics.median(times)),
                f"{first:.2f}",
            ]
        )
    heads = ["job", "kills", "imported", "joined", "converted", "next new step: median (range)", "job's first step"]
    return [
        "# After kill -9 of a rank: the next new step",
        "",
        f"Seconds from `kill -9` of the last rank on; medians. Each job trains {record['pause']:g} to "
        f"{record['pause'] + 1:g} s before a kill, in which the spare processes import; it saves after each step. "
        "Last column: from the command to the first step of the job.",
        "",
        *told_circumstances(record["circumstances"], "loopback, Gloo"),
        f"- Rivals: {record['rivals']}.",
        "",
        *table(heads, rows),
    ]
