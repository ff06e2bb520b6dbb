"""Kill and freeze ranks of a training job, or lose, freeze and cut off machines: nothing that was trained may be lost.

    python tools/soak.py --faults save,step,start,freeze --network loopback --nodes 2 --epochs 6
    python tools/soak.py --faults save,step,start,freeze --fault_count 60 --network loopback --nodes 2 --epochs 120
    sudo .venv/bin/python tools/soak.py --faults machine:0,frozen:leader,cut --epochs 12
    sudo .venv/bin/python tools/soak.py --faults machine,frozen,cut,relay --fault_count 30 --record docs/benchmarks

Each machine has its own disk. Faults of ranks (step, save, start, freeze) need no root on loopback addresses; those of
machines (machine, frozen, cut, relay) need the network namespaces of tools/lab.py. tools/soaking/faults.py says what
each does. The ranks write down every step, with its samples and its loss, in a ledger outside the disks. What was not
rolled back is then trained again by plain jobs, one after the other, on the same numbers of machines (with LocalSGD
also with the same saves, which average the ranks): every tensor, loss and batch has to be the same, bit by bit. Exit
code 0: nothing was lost; 1: something was, with the reasons.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet_train.data.sampler import epoch_order
from fleet_train.errors import Preempted
from fleet_train.profile import load_profile
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances
from tools.lab import Lab
from tools.soaking.faults import KINDS, OF_MACHINES, Faults, PlannedFault, launch_flags, plan_faults, recovery_of
from tools.soaking.job import Job, SoakFailed, started
from tools.soaking.ledger import STEP_SECONDS, STOP_AT, Ledger, Stretch, merged, samples_wrong, steps_of, surviving

_SEED = 0
_TENSORS = "persistables.safetensors"
_STRETCH_SECONDS = 600.0


def train_flags(epochs: int, strategy: str) -> tuple[str, ...]:
    flags = "--model=mlp --data=digits --augment=shift --batch_size=32 --log_every=1 --optimizer=adamw"
    flags += f" --epochs={epochs} --evaluate_every={epochs} --strategy={strategy} --seed={_SEED}"
    return tuple(f"{flags} --checkpoint_every=1 --checkpoint_every_steps=7 --checkpoint_copies=2".split())


def soak(job: Job, plans: Sequence[PlannedFault], timeout_seconds: float) -> dict[str, Any]:
    """What was done to the job, and how it ended. Raises SoakFailed if it does not train to its end."""
    began, ledger = time.monotonic(), Ledger(job.ledger)
    with started(job) as running:
        faults = Faults(running, ledger, _say)
        faults.carry_out(plans)
        _say("all faults are done; the job trains to its end")
        ledger.hurry()
        codes = running.wait(timeout_seconds)
        left = {"orphans": running.orphans(), "left_behind": running.left_behind()}
    if any(codes):
        raise SoakFailed(f"the launchers ended with {codes}; left behind: {left}; see the logs in {job.folder}")
    begun = {line["attempt"]: line["world"] for line in ledger.lines() if line["event"] == "begin"}
    summaries = [path.read_text() for path in job.folder.glob("node*/out/summary.json")]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "exit_codes": codes,
        **left,
        "faults": faults.done,
        "recovery_seconds": recovery_of(faults.done),
        "full_strength_seconds": recovery_of(faults.done, "seconds_to_full_strength"),
        "attempts": [{"attempt": number, "world_size": world} for number, world in sorted(begun.items())],
        "test_accuracy": max(json.loads(text)["test_accuracy"] for text in summaries),
    }


def replay(model: Job, stretches: Sequence[Stretch], folder: Path) -> list[Job]:
    """The reference: a plain job for each stretch, from the last checkpoint of the one before it. Raises SoakFailed."""
    jobs: list[Job] = []
    (strategy,) = (flag.partition("=")[2] for flag in model.train_flags if flag.startswith("--strategy="))
    # With LocalSGD a save averages the ranks: it has to come after the same steps.
    left_out = "--checkpoint_copies" if load_profile(strategy).use_local_sgd else "--checkpoint"
    train = tuple(flag for flag in model.train_flags if not flag.startswith(left_out))
    for number, stretch in enumerate(stretches):
        is_last = number + 1 == len(stretches)
        job = replace(
            model,
            folder=folder / f"stretch{number}",
            nodes=model.nodes[: stretch.world_size // model.ranks_per_node],
            launch_flags=(),
            train_flags=(*train, "--resume"),
            environ={} if is_last else {STOP_AT: f"{stretch.end[0]}:{stretch.end[1]}"},
        )
        _say(f"reference {number + 1} of {len(stretches)}: {stretch}")
        if jobs:
            before = jobs[-1].newest_checkpoint(jobs[-1].nodes)
            shutil.copytree(before, job.checkpoints(job.nodes[0]) / before.name)
        with started(job) as running:
            codes = running.wait(_STRETCH_SECONDS)
        if any(code not in (0, Preempted.exit_code) for code in codes):
            raise SoakFailed(f"a reference run ended with {codes}; see the logs in {job.folder}")
        jobs.append(job)
    return jobs


def judge(job: Job, epochs: int, folder: Path) -> dict[str, Any]:
    """Compare the steps that were not rolled back with a reference run of them."""
    lines = Ledger(job.ledger).lines()
    last = max((line for line in lines if line["event"] == "save"), key=lambda line: float(line["time"]))
    try:
        stretches = surviving(lines, last["digest"])
    except ValueError as error:
        raise SoakFailed(f"the history of the job cannot be reconstructed: {error}") from None
    reference = replay(job, merged(stretches), folder)
    steps = steps_of(lines, stretches)
    theirs = steps_of(line for each in reference for line in Ledger(each.ledger).lines())
    number = next(line["samples"] for line in lines if line["event"] == "begin")
    orders = {epoch: [int(i) for i in epoch_order(number, _SEED, epoch)] for epoch in range(epochs)}
    made = sum(line["event"] == "step" and line["rank"] == 0 for line in lines)
    return {
        "stretches": [asdict(each) for each in stretches],
        "reference_runs": len(reference),
        "comparison": compare_tensors(job, reference[-1]) | compare_steps(steps, theirs),
        "samples": {"epochs": epochs, "in_each": number, "wrong": samples_wrong(steps, number, epochs, orders)},
        "rolled_back": made - sum(rank == 0 for _, rank in steps),
    }


def compare_tensors(job: Job, reference: Job) -> dict[str, Any]:
    """Names of tensors of the final checkpoints that differ in any bit, or that only one side has."""
    paths = (reference.newest_checkpoint(reference.nodes[:1]), job.newest_checkpoint(job.nodes))
    one, other = (
        {name: (value.dtype, value.shape, value.tobytes()) for name, value in load_file(path / _TENSORS).items()}
        for path in paths
    )
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return {"tensors": len(one), "tensors_that_differ": different}


def compare_steps(steps: Any, theirs: Any) -> dict[str, int]:
    """Steps of a rank: those missing on one side, and those whose loss or samples differ."""
    both = steps.keys() & theirs.keys()
    # A loss is also fetched when a checkpoint is due, and the reference writes fewer of these.
    fetched = [key for key in both if None not in (steps[key]["loss"], theirs[key]["loss"])]
    return {
        "steps_of_ranks": len(theirs),
        "steps_that_one_lacks": len(steps.keys() ^ theirs.keys()),
        "losses": len(fetched),
        "losses_that_differ": sum(steps[key]["loss"] != theirs[key]["loss"] for key in fetched),
        "batches_that_differ": sum(steps[key]["indices"] != theirs[key]["indices"] for key in both),
    }


def failures_of(record: dict[str, Any]) -> list[str]:
    """What is wrong, one sentence each; empty if the soak passed."""
    same, recovery, wrong = record["comparison"], record["recovery_seconds"], record["samples"]["wrong"]
    of_machines = [fault for fault in record["faults"] if fault["kind"] in OF_MACHINES]
    longest, bound = recovery_of(of_machines).get("longest", 0.0), record["next_step_within"]
    checks = [
        (any(record["exit_codes"]), f"the launchers ended with {record['exit_codes']}"),
        (record["orphans"], f"left running: {record['orphans']}"),
        (record["left_behind"], f"left behind: {record['left_behind']}"),
        (same["tensors"] == 0 or same["tensors_that_differ"], f"tensors that differ: {same['tensors_that_differ']}"),
        (same["steps_that_one_lacks"], f"{same['steps_that_one_lacks']} steps are not in both runs"),
        (same["losses"] == 0 or same["losses_that_differ"], f"{same['losses_that_differ']} losses differ"),
        (same["batches_that_differ"], f"{same['batches_that_differ']} batches have different samples"),
        (wrong, f"samples lost or seen too often, by epoch: {wrong}"),
        (recovery["measured"] < len(record["faults"]), "no step followed some faults"),
        (longest > bound, f"the next step took {longest} s (bound: {bound:g} s)"),
    ]
    return [words for is_wrong, words in checks if is_wrong]


def page(record: dict[str, Any]) -> list[str]:
    failures = "; ".join(record["failures"])
    headings = ("fault", "victim", "away, s", "next step after, s", "all machines after, s")
    return [
        f"# Soak, {record['circumstances']['date'][:10]}: {record['nodes']} nodes x {record['ranks_per_node']} ranks",
        "",
        f"- Job: `launch {' '.join(record['launch_flags'])} fleet_train train {' '.join(record['train_flags'])}`; "
        f"{record['step_seconds']:g} s of pause before each step until the last fault; each node has its own disk; "
        f"test accuracy {record['test_accuracy']:.4f}.",
        f"- Reference: {record['reference_runs']} plain jobs one after the other, without faults, restarts, copies and "
        "relays, each for as many steps and machines as the job with faults trained between two changes of size.",
        *told_circumstances(record["circumstances"], f"network: {record['network']}"),
        f"- Result: {f'**failed**: {failures}' if failures else 'nothing was lost'}.",
        "",
        *table(("what", "value"), _totals(record)),
        "",
        *table(headings, [_cells(fault) for fault in record["faults"]]),
    ]


def _totals(record: dict[str, Any]) -> list[tuple[str, object]]:
    same, faults, samples = record["comparison"], record["faults"], record["samples"]
    kinds = Counter(fault["kind"] for fault in faults)
    worlds = Counter(attempt["world_size"] for attempt in record["attempts"])
    changes = sum(one["world_size"] != other["world_size"] for one, other in pairwise(record["stretches"]))
    other = same["batches_that_differ"] + same["steps_that_one_lacks"]
    return [
        *((f"`{kind}`: {KINDS[kind]}", number) for kind, number in sorted(kinds.items())),
        ("while a checkpoint was being written", sum(fault["checkpoint_under_way"] is not None for fault in faults)),
        ("of the machine that led", sum(bool(fault["role"]) for fault in faults)),
        ("ended only after the others had trained without it", sum(fault["until_gone_on"] for fault in faults)),
        ("launchers that had given up meanwhile and were restarted", sum(fault["given_up"] for fault in faults)),
        ("attempts that trained, by ranks", ", ".join(f"{worlds[size]} on {size}" for size in sorted(worlds))),
        ("stretches that were not rolled back; changes of size in them", f"{len(record['stretches'])}; {changes}"),
        ("steps rolled back (after the last checkpoint)", record["rolled_back"]),
        ("final tensors that differ from the reference's", f"{len(same['tensors_that_differ'])} of {same['tensors']}"),
        ("losses that differ, over all ranks", f"{same['losses_that_differ']} of {same['losses']}"),
        ("steps of ranks with different samples, or in one run only", f"{other} of {same['steps_of_ranks']}"),
        ("epochs in which a sample was lost or seen too often", f"{len(samples['wrong'])} of {samples['epochs']}"),
        ("processes, files left behind", f"{len(record['orphans'])}, {len(record['left_behind'])}"),
        ("seconds from a fault to the next step: median, longest", _seconds(record["recovery_seconds"])),
        ("... to a step on all machines", _seconds(record["full_strength_seconds"])),
        ("seconds in all, without the reference", record["seconds"]),
    ]


def _cells(fault: dict[str, Any]) -> list[object]:
    away = f"{fault['away_seconds']}{', others trained on' if fault['until_gone_on'] else ''}"
    after = [fault["seconds_to_next_step"], fault["seconds_to_full_strength"]]
    return [fault["kind"], f"{fault['victim']}{fault['role']}", away, *after]


def _seconds(times: dict[str, float]) -> str:
    return f"{times['median']}, {times['longest']}" if times["measured"] else "not measured"


@click.command(
    "soak",
    help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"),
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option("--faults", "words", required=True, help=f"In this order, by commas: {', '.join(KINDS)}.")
@click.option("--fault_count", type=click.IntRange(min=1), help="So many, drawn from --faults, in random order.")
@click.option("--nodes", default=3, type=click.IntRange(min=2), help="Machines.")
@click.option("--ranks_per_node", default=1, help="Ranks on each; with faults of machines, 1.")
@click.option("--epochs", default=45, help="Length of the run.")
@click.option("--step_seconds", default=0.3, help="Seconds of pause before each step until the last fault.")
@click.option("--network", type=click.Choice(["namespaces", "loopback"]), default="namespaces", help="Emulation.")
@click.option("--rate", default="1gbit", help="Rate limit of each namespace, as tc spells it; or none.")
@click.option("--strategy", default="multi_node", help="Profile of the job.")
@click.option("--seed", default=1, help="Seed of the random times and victims.")
@click.option("--started_port", default=16400, help="First port of the job.")
@click.option("--timeout", default=900.0, help="Timeout of the run after its last fault, in seconds.")
@click.option("--next_step_within", default=60.0, help="Seconds that a fault of a machine may cost.")
@click.option("--keep_files", type=click.Path(path_type=Path), help="Run here, and keep logs and checkpoints.")
@recorded()
def main(words: str, keep: Keep, keep_files: Path | None, **asked: Any) -> None:
    folder = (keep_files or Path(tempfile.mkdtemp(prefix="fleet_train-soak-"))).absolute()
    try:
        record = soaked(words.split(","), folder, **asked)
    except SoakFailed as error:
        raise click.ClickException(f"{error}") from error
    keep(record, page(record))
    click.echo("\n".join(page(record)))
    if record["failures"]:
        raise click.ClickException(f"{'; '.join(record['failures'])}; logs in {folder}")
    if keep_files is None:
        shutil.rmtree(folder)


def soaked(
    words: Sequence[str], folder: Path, fault_count: int | None, nodes: int, ranks_per_node: int, epochs: int,
    step_seconds: float, network: str, rate: str, strategy: str, seed: int, started_port: int, timeout: float,
    next_step_within: float,
) -> dict[str, Any]:  # fmt: skip
    """The record of a run with faults, and of its reference. Raises SoakFailed."""
    plans = plan_faults(words, fault_count, nodes, nodes * ranks_per_node, seed)
    if any(plan.kind in OF_MACHINES for plan in plans) and (network != "namespaces" or ranks_per_node != 1):
        raise SoakFailed("faults of machines need --network namespaces --ranks_per_node 1: a machine is a namespace")
    flags, pause = train_flags(epochs, strategy), {STEP_SECONDS: str(step_seconds)}
    record: dict[str, Any] = {
        "circumstances": circumstances(), "seed": seed, "network": f"{network}, {rate}", "nodes": nodes,
        "ranks_per_node": ranks_per_node, "step_seconds": step_seconds, "launch_flags": launch_flags(plans),
        "train_flags": flags, "next_step_within": next_step_within,
    }  # fmt: skip
    with Lab(nodes, rate) if network == "namespaces" else nullcontext() as lab:
        job = Job(folder / "soaked", lab, range(nodes), ranks_per_node, started_port, launch_flags(plans), flags, pause)
        _say(f"{nodes} machines, {len(plans)} faults")
        record |= soak(job, plans, timeout)
        (folder / "faults.json").write_text(json.dumps(record, indent=1))  # kept if the verdict fails
        record |= judge(job, epochs, folder / "reference")
    return record | {"failures": failures_of(record)}


def _say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


if __name__ == "__main__":
    main()
