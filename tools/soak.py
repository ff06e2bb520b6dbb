"""Kill ranks of a training job at random moments, and compare its result with an undisturbed run, bit by bit.

    python tools/soak.py --kills 3 --network loopback --nodes 2 --ranks_per_node 1 --epochs 6
    sudo python tools/soak.py --kills 30 --output docs/benchmarks/2026-11-21-soak

The first form needs no root. The second one runs each node in a network namespace of its own (tools/lab.py) and writes
a record (JSON) and a page (markdown). Exit code 0: nothing was lost; 1: something was, in words.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmarks.record import circumstances
from tools.lab import Lab
from tools.soaking import verdict
from tools.soaking.job import Machine, SoakJob, started
from tools.soaking.kills import SoakFailed, carry_out, note_last_recovery, plan_kills
from tools.soaking.page import page


def say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


@contextmanager
def machines_of(network: str, nodes: int, rate: str) -> Iterator[list[Machine]]:
    if network == "loopback":
        yield [Machine(f"127.0.0.{2 + node}") for node in range(nodes)]
        return
    with Lab(nodes, rate) as lab:
        yield [Machine(node.address, tuple(node.prefix)) for node in lab.nodes]


def run_to_the_end(job: SoakJob, timeout_seconds: float) -> None:
    """The undisturbed run. Raises SoakFailed when it does not end well."""
    with started(job) as running:
        codes = running.wait(timeout_seconds)
    if any(codes):
        raise SoakFailed(f"the undisturbed run ended with {codes}; see the logs in {job.folder}")


def soak(job: SoakJob, total_steps: int, seed: int, timeout_seconds: float) -> dict[str, Any]:
    """Kill as often as the job may restart; what was done and how the job ended."""
    world_size = len(job.machines) * job.ranks_per_node
    plans = plan_kills(job.max_restarts, total_steps, world_size, seed)
    began = time.monotonic()
    with started(job) as running:
        kills = carry_out(running, plans, world_size, say)
        codes = running.wait(timeout_seconds)
        note_last_recovery(running, kills)
        orphans = running.orphans()
    return {
        "seconds": round(time.monotonic() - began, 1),
        "exit_codes": codes,
        "orphans": orphans,
        "checkpoints_used": verdict.checkpoints_used(job),
        "half_written_left": verdict.leftovers(job),
        "kills_while_a_checkpoint_was_written": sum(kill["checkpoint_under_way"] is not None for kill in kills),
        "recovery_seconds": verdict.recovery(kills),
        "kills": kills,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--kills", default=30, type=click.IntRange(min=1), help="How many ranks are killed, one per attempt.")
@click.option("--nodes", default=2, help="Machines.")
@click.option("--ranks_per_node", default=2, help="Ranks on each.")
@click.option("--epochs", default=120, help="Length of the run; a checkpoint is saved after each epoch.")
@click.option("--network", type=click.Choice(["namespaces", "loopback"]), default="namespaces", help="Emulation.")
@click.option("--rate", default="1gbit", help="What each namespace may send, as tc spells it; or none.")
@click.option("--strategy", default="multi_node", help="Profile of the job.")
@click.option("--seed", default=1, help="Start of the random moments and ranks.")
@click.option("--started_port", default=16400, help="First port of the job.")
@click.option("--timeout", default=900.0, help="Seconds that a run may take after its last kill.")
@click.option("--output", type=click.Path(path_type=Path), help="Write OUTPUT.json and OUTPUT.md.")
@click.option("--keep", type=click.Path(path_type=Path), help="Run in this folder and keep logs and checkpoints.")
def main(
    kills: int, nodes: int, ranks_per_node: int, epochs: int, network: str, rate: str, strategy: str, seed: int,
    started_port: int, timeout: float, output: Path | None, keep: Path | None,
) -> None:  # fmt: skip
    """Kill ranks of a training job at random moments; nothing may be lost."""
    folder = keep or Path(tempfile.mkdtemp(prefix="fleet_train-soak-"))
    train = f"--model=mlp --data=digits --augment=shift --batch_size=32 --epochs={epochs} --checkpoint_every=1"
    train += f" --evaluate_every={epochs} --log_every=1 --optimizer=adamw --strategy={strategy}"
    flags = tuple(train.split())  # attempts after the first resume by themselves
    record: dict[str, Any] = {
        "circumstances": circumstances() | {"command": " ".join(["python", "tools/soak.py", *sys.argv[1:]])},
        "network": {"kind": network, "rate": rate if network == "namespaces" else None},
        "nodes": nodes, "ranks_per_node": ranks_per_node, "train_flags": flags, "seed": seed,
    }  # fmt: skip
    try:
        with machines_of(network, nodes, rate) as machines:
            common = (machines, ranks_per_node, started_port)
            undisturbed = SoakJob(folder / "undisturbed", *common, max_restarts=0, train_flags=flags)
            killed = SoakJob(folder / "killed", *common, max_restarts=kills, train_flags=flags)
            say(f"the undisturbed run, {nodes} nodes x {ranks_per_node} ranks")
            run_to_the_end(undisturbed, timeout)
            steps = int(verdict.summary_of(undisturbed)["steps"])
            say(f"it made {steps} steps; now the same with {kills} kills")
            record |= soak(killed, steps, seed, timeout) | {"comparison": verdict.compare(undisturbed, killed)}
    except SoakFailed as error:
        raise click.ClickException(f"{error}") from error
    record["failures"] = verdict.failures_of(record)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        output.with_suffix(".md").write_text(page(record))
    click.echo(page(record))
    if record["failures"]:
        raise click.ClickException(f"{'; '.join(record['failures'])}; logs in {folder}")
    if keep is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
