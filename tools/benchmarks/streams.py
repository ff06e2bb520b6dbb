"""Replay what the engines enqueue on the streams of several GPUs, under random interleavings, without a GPU.

    nice -n 10 python tools/bench.py streams --record docs/benchmarks
    python tools/bench.py streams --rounds 500 --profile multi_node

100,000 interleavings take about 20 s of one core per profile. Exit code 0: the new engine never deadlocks, and each
negative control does as expected; 1: otherwise, with reasons.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
import paddle
from tqdm import tqdm

from fleet_train.cluster import Cluster
from fleet_train.collectives.engines import CALC, OWN
from fleet_train.profile import Profile, load_profile, profile_names
from tests.streams.programs import CONTROLS, Control, OldEngine, outcome, shortened
from tests.streams.programs import record as traced
from tests.streams.replay import Found, replay, schedule_of
from tests.streams.timing import Rates, Simulation, communication_seconds, exposed_seconds, ideal_exposed_seconds
from tests.streams.trace import Trace, from_first_step, mismatches, wait_cycle
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances

CONTROL_INTERLEAVINGS = 500
WITHOUT_CHOICE = 100
"""Interleavings of a cluster on which one decides for all."""
FLAT = tuple((nodes, 1) for nodes in range(2, 9))
ONE_NODE = tuple((1, ranks) for ranks in range(2, 9))
LOCAL_GROUPS = ((2, 2), (2, 4), (3, 2), (4, 2))
BATCH = 2000
BEYOND_SHARE = 0.2
FREE_SHARE, WHOLE_SHARE = 10, 20
"""Of the interleavings, one in so many is replayed with kernels that always run side by side, and one in so many with
group creation and the broadcast of initial values before the steps: a chain in which every collective is waited for."""
# Hierarchy with everything else that communicates in a step, and averaging that overlaps with steps.
_POWERSGD = {"compression": "powersgd", "powersgd_start_step": 2}
_BEYOND: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("hierarchical, statistics", "hierarchical", {"sync_batch_norm": True}),
    ("hierarchical, PowerSGD", "hierarchical", _POWERSGD),
    ("hierarchical, merge", "hierarchical", {"accumulate_steps": 2}),
    ("hierarchical, int8", "hierarchical", {"compression": "int8"}),
    ("hierarchical, statistics, bf16", "hierarchical", {"sync_batch_norm": True, "compression": "bf16"}),
    ("local_sgd, travelling", "local_sgd", {"local_sgd_overlap_steps": 1}),
    (
        "local_sgd, travelling, hierarchical", "local_sgd",
        {"local_sgd_overlap_steps": 1, "use_hierarchical_allreduce": True, "force_hierarchical_allreduce": True},
    ),
    ("sync_batch_norm, PowerSGD", "sync_batch_norm", _POWERSGD),
)  # fmt: skip
_RULES = (
    ("a collective starts behind what the calculation stream held at its call", "`process_group_nccl.cc`, 3.3.1"),
    ("`task.wait()` holds the calculation stream, not the host; `sync_op=True` is a call and a wait", "the same"),
    ("a stream is first in, first out; an event waits for what was enqueued before it", "CUDA's programming guide"),
    ("a collective ends when the group's same one has started on all its ranks", "NCCL's guide on collectives"),
    ("a device has one collective resident at a time", "NCCL's guide promises no more; NVIDIA/nccl issue 195"),
    ("reading a value, and `paddle.to_tensor` of an array, wait for all of the device's streams", "`GpuMemcpySync`"),
    ("barriers wait for all ranks, futures for their thread", "`store/barriers.py`, `worker_thread.py`"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A profile and how it is modelled; ``share``: of the interleavings of a profile of the catalogue."""

    name: str
    profile: Profile
    share: float = 1.0

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(nodes, ranks per node)"""
        if self.profile.use_hierarchical_allreduce:
            return LOCAL_GROUPS
        return ONE_NODE if self.profile.name == "single_node" else FLAT


def cases(names: Sequence[str] = ()) -> list[Case]:
    """All cases, or those with these names."""
    found = [Case(name, shortened(load_profile(name))) for name in profile_names()]
    for name, base, settings in _BEYOND:
        changed = shortened(load_profile(base)).with_settings("the model of streams", **settings)
        found.append(Case(name, changed, BEYOND_SHARE))
    found += [Case(f"{name}, {CALC}", shortened(load_profile(name), CALC)) for name in profile_names()]
    return [case for case in found if not names or case.name in names]


def replay_case(case: Case, shape: tuple[int, int], interleavings: int, steps: int, seed: int) -> dict[str, Any]:
    """One row: the results of random interleavings of the new engine's traces."""
    began, traces = time.process_time(), traced(case.profile, Cluster.imagined(*shape), steps)
    row: dict[str, Any] = {
        "profile": case.name,
        "nodes": shape[0],
        "ranks_per_node": shape[1],
        "ranks": len(traces),
        "actions_per_rank": max(sum(map(len, trace.threads.values())) for trace in traces),
        "collectives_per_rank": max(len(trace.calls) for trace in traces),
        "streams_per_rank": 1 + max(len(trace.groups) for trace in traces),
        "mismatches": mismatches(traces),
    }
    row["choice"] = has_choice(traces)
    number = interleavings if row["choice"] else min(interleavings, WITHOUT_CHOICE)
    found = Found() if row["mismatches"] else _replay(traces, number, seed)
    row |= {"interleavings": found.interleavings, "deadlocks": found.deadlocks}
    row |= {"example": wait_cycle(found.example) if found.example else []}
    return row | {"seconds": round(time.process_time() - began, 1)}


def has_choice(traces: Sequence[Trace]) -> bool:
    """Whether a device may run one of several collectives first: a rank has several communicators."""
    return any(len(trace.groups) > 1 for trace in traces)


def _replay(traces: list[Trace], interleavings: int, seed: int) -> Found:
    whole, steps = schedule_of(traces), schedule_of([from_first_step(trace) for trace in traces])
    free, started = interleavings // FREE_SHARE, interleavings // WHOLE_SHARE
    kinds = ((whole, True, started), (steps, False, free), (steps, True, interleavings - free - started))
    found = Found()
    for schedule, one_resident, number in kinds:
        for first in range(0, number, BATCH):
            random = np.random.default_rng([seed, schedule is whole, one_resident, first])
            found.add(replay(schedule, min(BATCH, number - first), random, one_resident))
    return found


def rows_of(case: Case, interleavings: int, steps: int, seed: int) -> list[Any]:
    """One row per cluster; the interleavings are divided among them."""
    share, rest = divmod(round(interleavings * case.share), len(case.shapes))
    return [
        replay_case(case, shape, share + (number < rest), steps, seed + number)
        for number, shape in enumerate(case.shapes)
    ]


def exposed(case: Case, rates: Rates, steps: int) -> dict[str, Any]:
    """Milliseconds per step, on the smallest cluster on which the profile communicates."""
    cluster = Cluster.imagined(*case.shapes[0])
    ours = [from_first_step(trace) for trace in traced(case.profile, cluster, steps, proves=False)]
    alone = case.profile.with_settings("the old code on NCCL", nccl_comm_num=1, collective_stream=OWN)
    old = [from_first_step(trace) for trace in traced(alone, cluster, steps, OldEngine)]
    seconds = {
        "compute_ms": Simulation(ours, rates, communicates=False).seconds(),
        "communication_ms": communication_seconds(ours[0], rates),
        "ideal_ms": ideal_exposed_seconds(ours[0], rates),
        "ours_ms": exposed_seconds(ours, rates),
        "old_ms": exposed_seconds(old, rates),
    }
    figures = {name: round(1e3 * each / steps, 3) for name, each in seconds.items()}
    return {"profile": case.name, "ranks": cluster.world_size, **figures}


def control_row(control: Control, seed: int) -> dict[str, Any]:
    """What was found in a negative control, beside what is expected."""
    came = outcome(control, CONTROL_INTERLEAVINGS, seed)
    return {
        "name": control.name,
        "profile": control.profile,
        "ranks": came.ranks,
        "one_resident": control.one_resident,
        "interleavings": came.found.interleavings,
        "deadlocks": came.found.deadlocks,
        "found": came.what,
        "expected": control.expected,
        "example": wait_cycle(came.found.example) if came.found.example else came.mismatches[:1],
    }


def failures_of(record: Mapping[str, Any]) -> list[str]:
    """What is wrong, one sentence each."""
    failures = []
    for row in record["replays"]:
        where = f"{row['profile']} on {row['nodes']} x {row['ranks_per_node']}"
        if row["mismatches"]:
            failures.append(f"{where}: {row['mismatches'][0]}")
        if row["deadlocks"]:
            failures.append(f"{where}: {row['deadlocks']} deadlocks; {'; '.join(row['example'])}")
    for row in record["controls"]:
        if row["found"] != row["expected"]:
            failures.append(f"control '{row['name']}': found {row['found']}, expected {row['expected']}")
    return failures


def page(record: Mapping[str, Any]) -> list[str]:
    rates, total = record["rates"], sum(row["interleavings"] for row in record["replays"])
    fine = f"no deadlock and no order mismatch of the new engine in {total:,} replays; every control as expected"
    of_engine = "profile,clusters,choice,interleavings,deadlocks,order mismatches,communication,ideal,ours,old".split(
        ","
    )
    headings = ("name", "profile", "ranks", "one_resident", "deadlocks", "interleavings", "found", "expected")
    controls = [[row[each] for each in headings] for row in record["controls"]]
    return [
        f"# Model of streams, {record['circumstances']['date'][:10]}",
        "",
        "- Nothing ran on a GPU. Each rank's trace is what the real conversion, `GradientExchange` and engine did as "
        f"Paddle's executor ran {record['steps']} steps on a CPU, with groups and a store that record; the traces of "
        "all ranks were then replayed together. The network has 13 gradients in 5 buckets, warm-ups are 2 steps long.",
        f"- {record['interleavings']:,} random interleavings per profile of the catalogue, and a fifth of that for "
        f"other cases (names with a comma), seed {record['seed']}, divided among clusters. One in ten has kernels of "
        "all communicators side by side, the others one resident at a time; one in twenty begins with the creation of "
        "groups, the others with the first step. Where a rank has one communicator, there is no choice, one "
        f"interleaving stands for all, and {WITHOUT_CHOICE} are replayed for each cluster.",
        "- A profile alone: collective_stream own, with its proof in the first three steps; then calc.",
        *told_circumstances(record["circumstances"]),
        f"- Result: {'**failed**: ' + '; '.join(record['failures']) if record['failures'] else fine}.",
        "",
        *table(("rule of the model", "follows from"), _RULES),
        "",
        "## The new engine",
        "",
        "Exposed: what communication adds to a step, in ms, on the smallest cluster of the profile. An operator of the "
        f"program takes {rates['kernel'] * 1e6:.0f} us, the link has {rates['latency'] * 1e6:.0f} us of latency and "
        f"{rates['bytes_per_second'] / 1e6:.0f} MB/s, a barrier takes {rates['barrier'] * 1e6:.0f} us: assumed, so "
        "that a dense step communicates for about as long as its backward pass computes. *Ideal*: a bucket travels "
        "once its gradients are there, on one link in order, and nothing waits before it uses a result. *Old*: the "
        "old code with one communicator; with two it stands still. Every second step fetches the loss, and a fetch "
        "waits for all streams: an averaging that is to travel on is waited for where it starts in such a step.",
        "",
        *table(of_engine, [_cells(record, each) for each in record["exposed"]]),
        "",
        "## Negative controls",
        "",
        *table([each.replace("_", " ") for each in headings], controls),
        "",
        *(f"**{row['name']}**: {'; '.join(row['example'])}.\n" for row in record["controls"] if row["example"]),
    ]  # fmt: skip


def _cells(record: Mapping[str, Any], figures: Mapping[str, Any]) -> list[Any]:
    rows = [row for row in record["replays"] if row["profile"] == figures["profile"]]
    return [
        figures["profile"],
        ", ".join(f"{row['nodes']} x {row['ranks_per_node']}" for row in rows),
        "yes" if any(row["choice"] for row in rows) else "none",
        f"{sum(row['interleavings'] for row in rows):,}",
        sum(row["deadlocks"] for row in rows),
        sum(len(row["mismatches"]) for row in rows),
        *(f"{figures[name]:.3f}" for name in ("communication_ms", "ideal_ms", "ours_ms", "old_ms")),
    ]


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=5, type=click.IntRange(min=5), help="Steps of each training.")
@click.option("--seed", default=1, help="Seed of the random interleavings.")
@click.option("--profile", "names", multiple=True, help="Only this profile; repeat for more.")
@recorded(100_000, "each replays every profile in one random interleaving")
def main(steps: int, seed: int, names: tuple[str, ...], rounds: int, keep: Keep) -> None:
    warnings.simplefilter("ignore")
    paddle.enable_static()
    chosen, rates = cases(names), Rates()
    record: dict[str, Any] = {
        "circumstances": circumstances(), "interleavings": rounds, "steps": steps, "seed": seed, "rates": asdict(rates),
        "controls": [control_row(control, seed) for control in tqdm(CONTROLS, desc="controls", leave=False)],
        "exposed": [exposed(case, rates, steps) for case in tqdm(chosen, desc="exposed time", leave=False)],
    }  # fmt: skip
    replayed = tqdm(chosen, desc="replays")
    record["replays"] = [row for case in replayed for row in rows_of(case, rounds, steps, seed)]
    record["failures"] = failures_of(record)
    keep(record, page(record))
    click.echo("\n".join(page(record)))
    if record["failures"]:
        raise click.ClickException("; ".join(record["failures"]))
