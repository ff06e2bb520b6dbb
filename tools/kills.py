"""Kill ranks of a loop with fleet.resumable at random moments: the bits must be those of a run without kills.

    python tools/kills.py --kills 10
    python tools/kills.py --kills 300 --record docs/benchmarks --name DATE-kills

The script is tools/soaking/own_loop.py, with dropout, random numbers in its feed, a schedule and checkpoints every five
steps, under `launch --max_restarts`. Each kind of job below trains once undisturbed and then again, while ranks are
killed (SIGKILL): at any moment from the start of their process on, while they join, train, save or end. Every loss and
batch of every rank that was printed, in whatever attempt, and the final parameters and random states are compared bit
by bit. Exit code 1: something differs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances
from tools.processes import ROOT, Process, leaving_on_signals, start, stop

KINDS: dict[str, tuple[str, Sequence[str]]] = {
    "steps": ("--loader=none --unit=steps --total=400", ()),
    "sharding": ("--loader=ours --unit=steps --total=400", ("sharding=true",)),
    "epochs of two workers": ("--loader=paddle --workers=2 --unit=epochs --total=34", ()),
    "LocalSGD": (
        "--loader=ours --unit=epochs --total=34",
        ("use_local_sgd=true", "local_sgd_steps=4", "local_sgd_is_warm_steps=2"),
    ),
    "gradient merge": ("--loader=function --unit=steps --total=400", ("accumulate_steps=3",)),
    "int8": ("--loader=ours --unit=steps --total=400", ("compression=int8",)),
}
_KILLS_OF_A_JOB = 25
_LONGEST_DELAY_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_JOB_SECONDS = 1800.0
_STEP = re.compile(r"^step (\d+) (.*)$", re.MULTILINE)
_DIGEST = re.compile(r"^digest .*$", re.MULTILINE)


class Job:
    """One launched training in a folder of its own."""

    def __init__(self, folder: Path, kind: str, ranks: int, port: int, kills: int) -> None:
        folder.mkdir(parents=True)
        arguments, knobs = KINDS[kind]
        self.folder, self._ranks, self._kills = folder, ranks, kills
        pause = f"--pause={_PAUSE_SECONDS if kills else 0.0}"
        flags = [f"--nproc_per_node={ranks}", f"--started_port={port}", f"--max_restarts={2 * kills}", "--log_dir=log"]
        flags += [f"--set={knob}" for knob in knobs]
        script = str(ROOT / "tools" / "soaking" / "own_loop.py")
        self._command = [sys.executable, "-m", "fleet_train", "launch", *flags, script, "ck", *arguments.split(), pause]

    def train(self, chance: random.Random) -> list[dict[str, Any]]:
        """Train to the end, with this job's number of kills; returns what was done. A click error if it fails."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_minloglevel": "2", "PYTHONUNBUFFERED": "1"}
        with leaving_on_signals():
            process = start(self._command, self.folder / "launcher.log", environ, self.folder)
            try:
                done = [self._kill(process, chance) for _ in range(self._kills)]
                (self.folder / "ck.hurry").touch()
                code = process.wait(_JOB_SECONDS)
            finally:
                stop([process], 10.0)
        if code:
            raise click.ClickException(f"the job in {self.folder} ended with {code}; see launcher.log and log/ there")
        return done

    def _kill(self, process: Process, chance: random.Random) -> dict[str, Any]:
        """Kill a rank at a moment after its process has begun."""
        rank, delay = chance.randrange(self._ranks), round(chance.uniform(0.0, _LONGEST_DELAY_SECONDS), 3)
        before = self._pid(process, rank)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while process.poll() is None and psutil.pid_exists(before) and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"rank": rank, "delay_seconds": delay, "steps_before": len(self.steps(rank))}

    def _pid(self, process: Process, rank: int) -> int:
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise click.ClickException(f"the job in {self.folder} ended with {process.poll()} before its last kill")
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                told = json.loads((self.folder / "log" / f"workerend.{rank}.json").read_text())
                if "ended_monotonic" not in told and psutil.Process(told["pid"]).status() != psutil.STATUS_ZOMBIE:
                    return int(told["pid"])
            time.sleep(0.02)
        raise click.ClickException(f"rank {rank} of the job in {self.folder} did not start again within 120 s")

    def _text(self, rank: int) -> str:
        """What a rank has printed in all attempts; a line that a kill has cut off does not count."""
        paths = self.folder.glob(f"log/workerlog.{rank}*")
        return "\n".join(path.read_text(errors="replace").rpartition("\n")[0] for path in sorted(paths))

    def steps(self, rank: int) -> dict[int, set[str]]:
        """What was printed of each step: loss, epoch and samples; of all attempts that made it."""
        found: dict[int, set[str]] = {}
        for number, told in _STEP.findall(self._text(rank)):
            found.setdefault(int(number), set()).add(told)
        return found

    def ends(self, rank: int) -> list[str]:
        return sorted(set(_DIGEST.findall(self._text(rank))))


def compared(whole: Job, killed: Job, ranks: int) -> dict[str, Any]:
    """How many steps of ranks there are, and which differ; whether the ends are the same."""
    pairs = [(whole.steps(rank), killed.steps(rank)) for rank in range(ranks)]
    differ = [(rank, n) for rank, (one, other) in enumerate(pairs) for n in one if one[n] != other.get(n)]
    same_ends = all(whole.ends(rank) == killed.ends(rank) != [] for rank in range(ranks))
    return {
        "steps": sum(len(one) for one, _ in pairs),
        "steps_that_differ": differ,
        "steps_too_many": sum(len(other.keys() - one.keys()) for one, other in pairs),
        "same_end": same_ends,
    }


def is_right(job: dict[str, Any]) -> bool:
    same = job["comparison"]
    return bool(same["steps"] and same["same_end"] and not same["steps_that_differ"] and not same["steps_too_many"])


def page(record: dict[str, Any]) -> list[str]:
    jobs = record["jobs"]
    kills, wrong = sum(len(job["kills"]) for job in jobs), sum(not is_right(job) for job in jobs)
    rows = [
        (
            job["kind"], len(job["kills"]), job["comparison"]["steps"], len(job["comparison"]["steps_that_differ"]),
            "the same bits" if job["comparison"]["same_end"] else "**other bits**", job["seconds"],
        )
        for job in jobs
    ]  # fmt: skip
    return [
        f"# Random kills of a loop of one's own, {record['circumstances']['date'][:10]}: {kills} on "
        f"{record['ranks']} ranks",
        "",
        *told_circumstances(record["circumstances"]),
        f"- Result: {f'**{wrong} of {len(jobs)} jobs differ**' if wrong else 'every step and every end is the same'}.",
        "",
        *table(("job", "kills", "steps of ranks", "steps that differ", "end", "seconds"), rows),
    ]


@click.command("kills", help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"))
@click.option("--kills", default=10, type=click.IntRange(1), show_default=True, help="Kills in all, over all jobs.")
@click.option("--ranks", default=2, type=click.IntRange(2), show_default=True, help="Ranks of a job.")
@click.option("--seed", default=1, show_default=True, help="Seed of the random times and victims.")
@click.option("--started_port", default=17200, show_default=True, help="First port of the jobs.")
@click.option("--keep_files", type=click.Path(path_type=Path), help="Folder for the jobs' files, which then stay.")
@recorded()
def main(kills: int, ranks: int, seed: int, started_port: int, keep_files: Path | None, keep: Keep) -> None:
    folder = (keep_files or Path(tempfile.mkdtemp(prefix="fleet_train-kills-"))).absolute()
    record: dict[str, Any] = {"circumstances": circumstances(), "ranks": ranks, "seed": seed, "jobs": []}
    chance, wholes, number = random.Random(seed), dict[str, Job](), 0
    each = min(_KILLS_OF_A_JOB, -(-kills // len(KINDS)))
    while (left := kills - sum(len(job["kills"]) for job in record["jobs"])) > 0:
        kind = [*KINDS][number % len(KINDS)]
        if kind not in wholes:
            wholes[kind] = Job(folder / f"whole {kind}", kind, ranks, started_port, kills=0)
            wholes[kind].train(chance)
        job, began = Job(folder / f"killed {number}", kind, ranks, started_port, min(each, left)), time.monotonic()
        done = job.train(chance)
        same = compared(wholes[kind], job, ranks)
        record["jobs"].append(
            {"kind": kind, "kills": done, "comparison": same, "seconds": round(time.monotonic() - began, 1)}
        )
        click.echo(f"{kind}: {len(done)} kills, {'the same' if is_right(record['jobs'][-1]) else f'differs: {same}'}")
        number += 1
    keep(record, page(record))
    click.echo("\n".join(page(record)))
    if not all(map(is_right, record["jobs"])):
        raise click.ClickException(f"a run differs; files in {folder}")
    if keep_files is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
