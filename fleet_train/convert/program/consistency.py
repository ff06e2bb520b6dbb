"""What all ranks must share before the first step: compared over the store; errors name both ranks."""

from __future__ import annotations

from typing import Any

from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.join import refuse_other_ranks
from fleet_train.errors import ScheduleMismatch
from fleet_train.plan import CommPlan, first_difference
from fleet_train.profile import Profile
from fleet_train.profile.difference import comparable, first_differing_knob


def agree(job: Job, name: str, value: Any) -> None:
    """Raise ScheduleMismatch on every rank unless all of them pass the same JSON value for ``name``."""
    brought = job.compare(f"agree on {name} {job.count(f'agree on {name}')}", {name: value})
    refuse_other_ranks(brought, job.cluster)


def agree_on_plan(job: Job, plan: CommPlan, profile: Profile) -> None:
    """Raise ScheduleMismatch on every rank unless all have the same plan and profile.

    Digests are exchanged first; full plans and profiles only if the digests differ.
    """
    number = job.count("plan")
    if job.compare(f"plan {number}", plan.digest):
        brought = job.compare(f"plan {number} in full", {"plan": plan.to_json(), "profile": comparable(profile)})
        raise ScheduleMismatch(_explain(job, brought))


def _explain(job: Job, brought: Variants) -> str:
    (zero, ours), (others, theirs) = brought[:2]
    other = others[0][0]
    differing = job.world_size - sum(last - first + 1 for first, last in zero)
    where = first_differing_knob(ours["profile"], theirs["profile"]) or first_difference(ours["plan"], theirs["plan"])
    return (
        f"{job.cluster.describe(0)} and {job.cluster.describe(other)} would communicate differently: {where} "
        f"(here = rank 0, there = rank {other}); {differing} of {job.world_size} ranks differ from rank 0. "
        "Start every rank with the same script, arguments and profile"
    )
