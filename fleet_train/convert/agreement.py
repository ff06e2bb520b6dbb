"""What all ranks must have in common before the first step: compared over the store, told with both ranks' names."""

from __future__ import annotations

from typing import Any

from fleet_train.collectives.job import Job
from fleet_train.collectives.join import refuse_differences
from fleet_train.errors import ScheduleMismatch
from fleet_train.plan import CommPlan, first_difference
from fleet_train.profile import Profile
from fleet_train.profile.difference import comparable, first_differing_knob


def agree(job: Job, name: str, value: Any) -> None:
    """Raise ScheduleMismatch on every rank unless all of them bring the same JSON value for ``name``."""
    everybody = job.gather(f"agree on {name} {job.count(f'agree on {name}')}", value)
    refuse_differences({rank: {name: brought} for rank, brought in everybody.items()}, job.cluster)


def agree_on_plan(job: Job, plan: CommPlan, profile: Profile) -> None:
    """Raise ScheduleMismatch on every rank unless all of them would communicate the same, by the same profile.

    The digests travel first; plans and profiles in full only where they differ.
    """
    number = job.count("plan")
    digests = job.gather(f"plan {number}", plan.digest)
    differing = [rank for rank, digest in digests.items() if digest != digests[0]]
    if differing:
        brought = job.gather(f"plan {number} in full", {"plan": plan.to_json(), "profile": comparable(profile)})
        raise ScheduleMismatch(_explain(job, brought, differing))


def _explain(job: Job, brought: dict[int, Any], differing: list[int]) -> str:
    other = differing[0]
    ours, theirs = brought[0], brought[other]
    where = first_differing_knob(ours["profile"], theirs["profile"]) or first_difference(ours["plan"], theirs["plan"])
    return (
        f"{job.cluster.describe(0)} and {job.cluster.describe(other)} would not communicate the same: {where} "
        f"(here = rank 0, there = rank {other}); {len(differing)} of {job.world_size} ranks differ from rank 0. "
        "Start every rank with the same script, arguments and profile"
    )
