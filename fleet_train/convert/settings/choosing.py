"""Chooses the settings that a profile leaves open, the same on every rank; measures the link if the choice needs it."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.link_probe import glance
from fleet_train.convert.settings.apply_profile import say
from fleet_train.plan import TensorSpec
from fleet_train.plan.price.choose import MOST_COMMUNICATORS, PAPER, Conditions, choose, needs_link
from fleet_train.plan.price.costs import ENQUEUED, TYPICAL
from fleet_train.plan.price.decline import JUDGED, decline
from fleet_train.plan.price.predict import Network
from fleet_train.profile import Profile


def settle(job: Job, profile: Profile, gradients: Sequence[TensorSpec]) -> Profile:
    """``profile`` with numbers for open settings, and without a compression that does not pay; rank 0 reports which.

    All ranks call it with the same arguments.
    """
    judged = JUDGED if profile.compression_declines else frozenset[str]()
    if job.network is None and needs_link(profile, gradients, job.cluster, judged):
        job.network = _measured(job)
    source = job.network_source if job.network else "assumed"
    most, costs = (MOST_COMMUNICATORS, TYPICAL) if job.engine.side_by_side else (1, ENQUEUED)
    conditions = Conditions(job.network or PAPER, costs, most_communicators=most, source=source)
    kept = decline(profile, gradients, job.cluster, conditions, judged)
    choice = choose(kept.profile, gradients, job.cluster, conditions)
    say([*kept.sentences, *choice.sentences], job.cluster.rank)
    return choice.profile


def _measured(job: Job) -> Network:
    """The ranks communicate over the link between nodes, if there are several."""
    link = glance(job)
    return Network(link, PAPER.inside) if job.cluster.node_num > 1 else Network(PAPER.between, link)
