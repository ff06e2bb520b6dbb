"""A soak with machine faults from start to end: faults, reference run, verdict, and the page of its record."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from fleet_train.data.sampler import epoch_order
from tools.benchmarks.record import told_circumstances
from tools.lab import Lab
from tools.soaking.faults import MEANINGS, Faults, PlannedFault, Timeouts, recovery_of
from tools.soaking.kills import SoakFailed
from tools.soaking.ledger import Ledger, Stretch, all_steps, attempts_of, merged, samples_wrong, steps_of, surviving
from tools.soaking.nodes import MachineJob, Machines, started
from tools.soaking.program import HURRY, STEP_SECONDS
from tools.soaking.replay import newest_checkpoint, replay
from tools.soaking.verdict import different_tensors

NEXT_STEP_WITHIN_SECONDS = 60.0
_SEED = 0


@dataclass(frozen=True)
class Asked:
    """The command line's options. Times in seconds."""

    nodes: int
    rate: str
    epochs: int
    step_seconds: float
    times: Timeouts
    strategy: str
    started_port: int
    timeout_seconds: float


def launch_flags(times: Timeouts, max_restarts: int) -> tuple[str, ...]:
    flags = f"--min_nodes=2 --max_restarts={max_restarts} --lost_node_timeout={times.lost_node:g}"
    return *f"{flags} --rejoin_timeout={times.rejoin:g} --direct_ranks=0".split(), "--job_id=soak"


def train_flags(asked: Asked) -> tuple[str, ...]:
    flags = "--model=mlp --data=digits --augment=shift --batch_size=32 --log_every=1 --optimizer=adamw"
    flags += f" --epochs={asked.epochs} --evaluate_every={asked.epochs} --strategy={asked.strategy} --seed={_SEED}"
    return *flags.split(), "--checkpoint_every=1", "--checkpoint_every_steps=7", "--checkpoint_copies=2"


def soak_machines(
    asked: Asked, plans: Sequence[PlannedFault], folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run it; returns its record. Raises SoakFailed if the job, or its reference, does not complete."""
    flags = launch_flags(asked.times, max_restarts=2 * len(plans))
    with Lab(asked.nodes, asked.rate) as lab:
        nodes = range(asked.nodes)
        pause = {STEP_SECONDS: str(asked.step_seconds)}
        job = MachineJob(folder / "soaked", lab, nodes, asked.started_port, flags, train_flags(asked), pause)
        record: dict[str, Any] = {"launch_flags": flags, "train_flags": job.train_flags}
        say(f"{asked.nodes} machines, {len(plans)} faults")
        record |= _run(job, plans, asked.timeout_seconds, say)
        (folder / "faults.json").write_text(json.dumps(record, indent=1))  # kept if the verdict fails
        return {**record, **_judge(job, record["last_checkpoint"], asked.epochs, folder / "reference", say)}


def _run(job: MachineJob, plans: Sequence[PlannedFault], timeout_seconds: float, say: Callable[[str], None]) -> Any:
    began = time.monotonic()
    ledger = Ledger(job.ledger)
    with started(job) as machines:
        faults = Faults(machines, ledger, say)
        faults.carry_out(plans)
        say("all faults are done; the job trains to its end")
        (job.ledger / HURRY).touch()
        codes = machines.wait(timeout_seconds)
        seconds = round(time.monotonic() - began, 1)
        left = {"orphans": machines.orphans(), "left_behind": machines.left_behind()}
    if any(codes):
        raise SoakFailed(f"the launchers ended with {codes}; left behind: {left}; see the logs in {job.folder}")
    return {
        "seconds": seconds,
        "exit_codes": codes,
        **left,
        "faults": faults.done,
        "recovery_seconds": recovery_of(faults.done),
        "full_strength_seconds": recovery_of(faults.done, "seconds_to_full_strength"),
        "attempts": attempts_of(ledger.lines()),
        "last_checkpoint": _last_save(ledger),
        "summary": _summary(machines),
    }


def _last_save(ledger: Ledger) -> dict[str, Any]:
    return max((line for line in ledger.lines() if line["event"] == "save"), key=lambda line: float(line["time"]))


def _summary(machines: Machines) -> Any:
    paths = [machines.job.output(node) / "summary.json" for node in machines.job.nodes]
    newest = max((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text())


def _judge(job: MachineJob, last: dict[str, Any], epochs: int, folder: Path, say: Callable[[str], None]) -> Any:
    """Compare the steps that were not rolled back with a reference run of them."""
    lines = Ledger(job.ledger).lines()
    try:
        stretches = surviving(lines, last["digest"])
    except ValueError as error:
        raise SoakFailed(f"the history of the job cannot be reconstructed: {error}") from None
    reference = replay(job, merged(stretches), folder, say)
    steps = steps_of(lines, stretches)
    theirs = all_steps(line for each in reference for line in Ledger(each.ledger).lines())
    return {
        "stretches": [each.as_json() for each in stretches],
        "reference_runs": len(reference),
        "comparison": _compare(job, reference[-1]) | _compare_steps(steps, theirs),
        "samples": _samples(steps, epochs, next(line["samples"] for line in lines if line["event"] == "begin")),
        "rolled_back": _rolled_back(lines, stretches),
    }


def _compare(job: MachineJob, reference: MachineJob) -> dict[str, Any]:
    soaked = max((newest_checkpoint(job, node) for node in job.nodes if _has_any(job, node)), key=_written_at)
    one, other = (load_file(each / "persistables.safetensors") for each in (newest_checkpoint(reference, 0), soaked))
    return {"tensors": len(one), "tensors_that_differ": different_tensors(one, other), "final": soaked.name}


def _has_any(job: MachineJob, node: int) -> bool:
    return any((job.output(node) / "checkpoints").glob("step-*/complete.json"))


def _written_at(checkpoint: Path) -> int:
    return (checkpoint / "complete.json").stat().st_mtime_ns


def _compare_steps(steps: Any, theirs: Any) -> dict[str, int]:
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


def _samples(steps: Any, epochs: int, number: int) -> dict[str, Any]:
    orders = {epoch: [int(i) for i in epoch_order(number, _SEED, epoch)] for epoch in range(epochs)}
    return {"epochs": epochs, "in_each": number, "wrong": samples_wrong(steps, number, epochs, orders)}


def _rolled_back(lines: Any, stretches: Sequence[Stretch]) -> int:
    """Steps of rank 0 that are in no stretch: rolled back and trained again."""
    made = sum(line["event"] == "step" and line["rank"] == 0 for line in lines)
    return int(made) - sum(rank == 0 for _, rank in steps_of(lines, stretches))


def failures_of(record: dict[str, Any]) -> list[str]:
    """What is wrong, one sentence each; empty if the soak passed."""
    same, samples = record["comparison"], record["samples"]
    recovery, faults = record["recovery_seconds"], record["faults"]
    checks = [
        (any(record["exit_codes"]), f"the launchers ended with {record['exit_codes']}"),
        (record["orphans"], f"left running: {record['orphans']}"),
        (record["left_behind"], f"left behind: {record['left_behind']}"),
        (same["tensors"] == 0 or same["tensors_that_differ"], f"tensors that differ: {same['tensors_that_differ']}"),
        (same["steps_that_one_lacks"], f"{same['steps_that_one_lacks']} steps are not in both runs"),
        (same["losses"] == 0 or same["losses_that_differ"], f"{same['losses_that_differ']} losses differ"),
        (same["batches_that_differ"], f"{same['batches_that_differ']} batches have different samples"),
        (samples["wrong"], f"samples lost or seen too often, by epoch: {samples['wrong']}"),
        (recovery["measured"] < len(faults), "no step followed some faults"),
        (
            recovery.get("longest", 0.0) > NEXT_STEP_WITHIN_SECONDS,
            f"the next step took {recovery.get('longest')} s (bound: {NEXT_STEP_WITHIN_SECONDS:g} s)",
        ),
    ]
    return [words for is_wrong, words in checks if is_wrong]


def page_of(record: dict[str, Any]) -> str:
    at, same = record["circumstances"], record["comparison"]
    faults, line = record["faults"], record["stretches"]
    kinds = Counter(fault["kind"] for fault in faults)
    worlds = Counter(attempt["world_size"] for attempt in record["attempts"])
    rows = [
        *((f"`{kind}`: {MEANINGS[kind]}", number) for kind, number in sorted(kinds.items())),
        ("of the first node; of the machine that led", _two(f["node"] == 0 for f in faults) + "; " + _leading(faults)),
        ("ended only after the others had trained without it", sum(fault["until_gone_on"] for fault in faults)),
        ("launchers that had given up meanwhile and were restarted", sum(fault["given_up"] for fault in faults)),
        ("attempts that trained, by machines", ", ".join(f"{worlds[size]} on {size}" for size in sorted(worlds))),
        ("stretches that were not rolled back; changes of world size in them", f"{len(line)}; {_changes(line)}"),
        ("steps rolled back (after the last checkpoint)", record["rolled_back"]),
        ("final tensors that differ from the reference's", f"{len(same['tensors_that_differ'])} of {same['tensors']}"),
        ("losses that differ, over all ranks", f"{same['losses_that_differ']} of {same['losses']}"),
        ("steps of ranks with different samples, or in one run only", f"{_other(same)} of {same['steps_of_ranks']}"),
        (
            "epochs in which a sample was lost or seen too often",
            f"{len(record['samples']['wrong'])} of {_epochs(record)}",
        ),
        ("processes, temporary folders, half-written checkpoints left", f"{len(record['orphans'])}, {_left(record)}"),
        ("seconds from a fault to the next step: median, longest", _seconds(record["recovery_seconds"])),
        ("... to a step on all machines", _seconds(record["full_strength_seconds"])),
        ("seconds in all, without the reference", record["seconds"]),
    ]
    network = f"network namespaces, {record['network']['rate']}"
    lines = [
        f"# Soak with machine faults, {at['date'][:10]}: {record['nodes']} nodes x 1 rank, {network}",
        "",
        f"- Job: `launch {' '.join(record['launch_flags'])} fleet_train train {' '.join(record['train_flags'])}`; "
        f"{record['step_seconds']:g} s of pause before each step until the last fault; each node has its own disk; "
        f"test accuracy {record['summary']['test_accuracy']:.4f}.",
        f"- Reference: {record['reference_runs']} plain jobs one after the other, without faults, restarts, copies and "
        "relays, each for as many steps and machines as the job with faults trained between two changes of world size.",
        *told_circumstances(at),
        f"- Result: {'**failed**: ' + '; '.join(record['failures']) if record['failures'] else 'nothing was lost'}.",
        "",
        "| what | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "| fault | machine | away, s | next step after, s | all machines after, s |",
        "| --- | --- | --- | --- | --- |",
        *(_row(fault) for fault in faults),
        "",
    ]
    return "\n".join(lines)


def _row(fault: dict[str, Any]) -> str:
    away = f"{fault['away_seconds']}{', others trained on' if fault['until_gone_on'] else ''}"
    times = f"{fault['seconds_to_next_step']} | {fault['seconds_to_full_strength']}"
    return f"| {fault['kind']} | {fault['node']}{fault['role']} | {away} | {times} |"


def _two(values: Any) -> str:
    return str(sum(values))


def _leading(faults: Sequence[dict[str, Any]]) -> str:
    return str(sum(fault["node"] == fault["leader"] for fault in faults))


def _changes(stretches: Sequence[dict[str, Any]]) -> int:
    sizes = [each["world_size"] for each in stretches]
    return sum(one != other for one, other in pairwise(sizes))


def _other(same: dict[str, int]) -> int:
    return same["batches_that_differ"] + same["steps_that_one_lacks"]


def _epochs(record: dict[str, Any]) -> int:
    return int(record["samples"]["epochs"])


def _left(record: dict[str, Any]) -> str:
    drafts = sum("step-" in name for name in record["left_behind"])
    return f"{len(record['left_behind']) - drafts}, {drafts}"


def _seconds(times: dict[str, float]) -> str:
    return f"{times['median']}, {times['longest']}" if times["measured"] else "not measured"
