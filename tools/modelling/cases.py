"""The replayed cases: every profile of the catalogue, and some others, on clusters of 2 to 8 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_train.cluster import Cluster
from fleet_train.profile import Profile, load_profile, profile_names
from tests.streams.programs import OldEngine, record, shortened
from tests.streams.replay import Found, replay, schedule_of
from tests.streams.timing import Rates, Simulation, communication_seconds, exposed_seconds, ideal_exposed_seconds
from tests.streams.trace import Trace, from_first_step, mismatches, wait_cycle

FLAT = tuple((nodes, 1) for nodes in range(2, 9))
ONE_NODE = tuple((1, ranks) for ranks in range(2, 9))
LOCAL_GROUPS = ((2, 2), (2, 4), (4, 2))
BATCH = 2000
BEYOND_SHARE = 0.2
FREE_SHARE, WHOLE_SHARE = 10, 20
"""Of the interleavings, one in so many is replayed with kernels that always run side by side, and one in so many with
group creation and the broadcast of initial values before the steps: a chain in which every collective is waited for."""


@dataclass(frozen=True)
class Case:
    """A profile and how it is modelled."""

    name: str
    profile: Profile
    share: float = 1.0
    """As a share of the interleavings of a profile of the catalogue."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(nodes, ranks per node)"""
        if self.profile.use_hierarchical_allreduce:
            return LOCAL_GROUPS
        return ONE_NODE if self.profile.name == "single_node" else FLAT


# Hierarchy with everything else that communicates in a step, and averaging that overlaps with steps.
_BEYOND: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("hierarchical, statistics", "hierarchical", {"sync_batch_norm": True}),
    ("hierarchical, PowerSGD", "hierarchical", {"compression": "powersgd", "powersgd_start_step": 2}),
    ("hierarchical, merge", "hierarchical", {"accumulate_steps": 2}),
    ("hierarchical, statistics, bf16", "hierarchical", {"sync_batch_norm": True, "compression": "bf16"}),
    ("local_sgd, travelling", "local_sgd", {"local_sgd_overlap_steps": 1}),
    (
        "local_sgd, travelling, hierarchical",
        "local_sgd",
        {"local_sgd_overlap_steps": 1, "use_hierarchical_allreduce": True},
    ),
    ("sync_batch_norm, PowerSGD", "sync_batch_norm", {"compression": "powersgd", "powersgd_start_step": 2}),
)


def cases(names: tuple[str, ...] = ()) -> list[Case]:
    """All cases, or those with these names."""
    found = [Case(name, shortened(load_profile(name))) for name in profile_names()]
    found += [Case(name, _changed(base, settings), BEYOND_SHARE) for name, base, settings in _BEYOND]
    return [case for case in found if not names or case.name in names]


def _changed(base: str, settings: dict[str, Any]) -> Profile:
    return shortened(load_profile(base)).with_settings("the model of streams", **settings)


def replay_case(
    case: Case, shape: tuple[int, int], interleavings: int, steps: int, seed: int, on_done: Callable[[int], None]
) -> dict[str, Any]:
    """One row: the results of random interleavings of the new engine's traces."""
    traces = record(case.profile, Cluster.imagined(*shape), steps)
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
    found = Found() if row["mismatches"] else _replay(traces, interleavings, seed, on_done)
    example = wait_cycle(found.example) if found.example else []
    return row | {"interleavings": found.interleavings, "deadlocks": found.deadlocks, "example": example}


def _replay(traces: list[Trace], interleavings: int, seed: int, on_done: Callable[[int], None]) -> Found:
    whole, steps = schedule_of(traces), schedule_of([from_first_step(trace) for trace in traces])
    free, started = interleavings // FREE_SHARE, interleavings // WHOLE_SHARE
    kinds = ((whole, True, started), (steps, False, free), (steps, True, interleavings - free - started))
    found = Found()
    for schedule, one_resident, number in kinds:
        for first in range(0, number, BATCH):
            random = np.random.default_rng([seed, schedule is whole, one_resident, first])
            found.add(replay(schedule, min(BATCH, number - first), random, one_resident, on_done))
    return found


def exposed(case: Case, rates: Rates, steps: int) -> dict[str, Any]:
    """Milliseconds per step, on the smallest cluster on which the profile communicates."""
    cluster = Cluster.imagined(*case.shapes[0])
    ours = [from_first_step(trace) for trace in record(case.profile, cluster, steps)]
    alone = case.profile.with_settings("the old code on NCCL", nccl_comm_num=1)
    old = [from_first_step(trace) for trace in record(alone, cluster, steps, OldEngine)]

    def per_step(seconds: float) -> float:
        return round(1e3 * seconds / steps, 3)

    return {
        "profile": case.name,
        "ranks": cluster.world_size,
        "compute_ms": per_step(Simulation(ours, rates, communicates=False).seconds()),
        "communication_ms": per_step(communication_seconds(ours[0], rates)),
        "ideal_ms": per_step(ideal_exposed_seconds(ours[0], rates)),
        "ours_ms": per_step(exposed_seconds(ours, rates)),
        "old_ms": per_step(exposed_seconds(old, rates)),
    }
