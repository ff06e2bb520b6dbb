"""Kill and freeze ranks of a training job at random moments, or lose machines; its result is an undisturbed run's.

    python tools/soak.py --kills 3 --freezes 2 --network loopback --nodes 2 --ranks_per_node 1 --epochs 6
    sudo python tools/soak.py --kills 30 --freezes 30 --output docs/benchmarks/2026-11-21-soak
    sudo python tools/soak.py --faults machine:0,frozen:leader,cut --epochs 12
    sudo python tools/soak.py --faults machine,frozen,cut,relay --fault_count 30 --output docs/benchmarks/soak-machines

The first form needs no root. The others run each node in a network namespace of its own (tools/lab.py). --output writes
a record (JSON) and a page (Markdown). Exit code 0: nothing was lost; 1: something was, with the reasons.

With --faults each of three nodes also has its own disk, and machines are lost with their disks, frozen or cut off
while the others train on: tools/soaking/faults.py lists the kinds. The reference run uses the same numbers of machines
one after the other (tools/soaking/replay.py), and samples are counted (tools/soaking/ledger.py).
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
from tools.soaking import machines, verdict
from tools.soaking.faults import KINDS, Timeouts, listed_faults, plan_faults
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
    """The undisturbed run. Raises SoakFailed if it fails."""
    with started(job) as running:
        codes = running.wait(timeout_seconds)
    if any(codes):
        raise SoakFailed(f"the undisturbed run ended with {codes}; see the logs in {job.folder}")


def soak(job: SoakJob, freezes: int, total_steps: int, seed: int, timeout_seconds: float) -> dict[str, Any]:
    """Kill as often as the job may restart; returns what was done and how the job ended."""
    world_size = len(job.machines) * job.ranks_per_node
    plans = plan_kills(job.max_restarts, total_steps, world_size, seed, freezes)
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
        "half_written_left": verdict.leftovers(job.checkpoints),
        "kills_while_a_checkpoint_was_written": sum(
            kill["checkpoint_under_way"] is not None for kill in kills if kill["kind"] != "freeze"
        ),
        "recovery_seconds": verdict.recovery(kills),
        "kills": kills,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--kills", default=30, type=click.IntRange(min=1), help="How many ranks are killed, one per attempt.")
@click.option("--freezes", default=0, type=click.IntRange(min=0), help="How many are stopped for up to 5 s.")
@click.option(
    "--faults",
    help=f"Machine faults instead, separated by commas: {', '.join(KINDS)}; in this order, each with a node or none: "
    "machine:0,frozen:leader,cut. They need namespaces, and run one rank per node.",
)
@click.option(
    "--fault_count", type=click.IntRange(min=1), help="Number of faults drawn from --faults, in random order."
)
@click.option("--nodes", type=click.IntRange(min=2), help="Machines.  [default: 2; with --faults 3]")
@click.option("--ranks_per_node", default=2, help="Ranks on each.")
@click.option("--epochs", default=120, help="Length of the run; a checkpoint is saved after each epoch.")
@click.option(
    "--step_seconds", default=0.3, help="With --faults: seconds of pause before each step until the last fault."
)
@click.option("--network", type=click.Choice(["namespaces", "loopback"]), default="namespaces", help="Emulation.")
@click.option("--rate", default="1gbit", help="Rate limit of each namespace, as tc spells it; or none.")
@click.option("--strategy", default="multi_node", help="Profile of the job.")
@click.option("--seed", default=1, help="Seed of the random times and ranks.")
@click.option("--started_port", default=16400, help="First port of the job.")
@click.option("--timeout", default=900.0, help="Timeout of a run after its last kill or fault, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), help="Write OUTPUT.json and OUTPUT.md.")
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Run in this folder, and keep logs and checkpoints in it."
)
def main(output: Path | None, keep: Path | None, **asked: Any) -> None:
    """Kill ranks of a training job at random moments, or lose machines; nothing may be lost."""
    folder = (keep or Path(tempfile.mkdtemp(prefix="fleet_train-soak-"))).absolute()
    command = " ".join(["python", "tools/soak.py", *sys.argv[1:]])
    record: dict[str, Any] = {"circumstances": circumstances() | {"command": command}, "seed": asked["seed"]}
    of_machines = asked["faults"] is not None
    try:
        record |= soaked_with_faults(asked, folder) if of_machines else soaked_with_kills(asked, folder)
    except SoakFailed as error:
        raise click.ClickException(f"{error}") from error
    record["failures"] = machines.failures_of(record) if of_machines else verdict.failures_of(record)
    text = machines.page_of(record) if of_machines else page(record)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        output.with_suffix(".md").write_text(text)
    click.echo(text)
    if record["failures"]:
        raise click.ClickException(f"{'; '.join(record['failures'])}; logs in {folder}")
    if keep is None:
        shutil.rmtree(folder)


def soaked_with_kills(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record of an undisturbed run and of one whose ranks are killed. Raises SoakFailed."""
    network, rate, epochs, kills = asked["network"], asked["rate"], asked["epochs"], asked["kills"]
    nodes, ranks_per_node = asked["nodes"] or 2, asked["ranks_per_node"]
    train = f"--model=mlp --data=digits --augment=shift --batch_size=32 --epochs={epochs} --checkpoint_every=1"
    train += f" --evaluate_every={epochs} --log_every=1 --optimizer=adamw --strategy={asked['strategy']}"
    flags = tuple(train.split())  # attempts after the first resume automatically
    record: dict[str, Any] = {
        "network": {"kind": network, "rate": rate if network == "namespaces" else None},
        "nodes": nodes, "ranks_per_node": ranks_per_node, "train_flags": flags,
    }  # fmt: skip
    with machines_of(network, nodes, rate) as places:
        common = (places, ranks_per_node, asked["started_port"])
        undisturbed = SoakJob(folder / "undisturbed", *common, max_restarts=0, train_flags=flags)
        killed = SoakJob(folder / "killed", *common, max_restarts=kills, train_flags=flags)
        say(f"the undisturbed run, {nodes} nodes x {ranks_per_node} ranks")
        run_to_the_end(undisturbed, asked["timeout"])
        steps = int(verdict.summary_of(undisturbed)["steps"])
        say(f"{steps} steps; now the same with {kills} kills and {asked['freezes']} freezes")
        soaked = soak(killed, asked["freezes"], steps, asked["seed"], asked["timeout"])
        return record | soaked | {"comparison": verdict.compare(undisturbed, killed)}


def soaked_with_faults(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record of a run whose machines are lost, frozen and cut off, and of its reference. Raises SoakFailed."""
    if asked["network"] != "namespaces":
        raise SoakFailed("--faults needs --network namespaces: a machine is a namespace here")
    nodes, times, seed = asked["nodes"] or 3, Timeouts(), asked["seed"]
    words = asked["faults"].split(",")
    listed = listed_faults(words, nodes, times, seed)
    count = asked["fault_count"]
    plans = listed if count is None else plan_faults([each.kind for each in listed], count, nodes, times, seed)
    given = machines.Asked(
        nodes, asked["rate"], asked["epochs"], asked["step_seconds"], times, asked["strategy"], asked["started_port"],
        asked["timeout"],
    )  # fmt: skip
    record = {
        "network": {"kind": "namespaces", "rate": asked["rate"]}, "nodes": nodes, "step_seconds": given.step_seconds,
    }  # fmt: skip
    return record | machines.soak_machines(given, plans, folder, say)


if __name__ == "__main__":
    main()
