"""Chooses the open settings of a profile, buckets and communicators, by price. Pure arithmetic.

The computing time of a step is unknown before the first one, so a choice must do well for a short, a medium and a long
one: it minimizes the sum of the step times, each relative to the shortest that any choice gives there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.plan.build import build_settled
from fleet_train.plan.phases import CollectiveSpec
from fleet_train.plan.plan import MEGABYTE, CommPlan, TensorSpec
from fleet_train.plan.price.costs import TYPICAL, Costs
from fleet_train.plan.price.predict import Compute, Link, Network, Paths, predict
from fleet_train.profile import Profile
from fleet_train.profile.buckets import CHOSEN, COMMUNICATORS, EDGE, SIZE, Buckets, chosen_in_words, open_knobs
from fleet_train.profile.knobs import AUTO

PAPER = Network(Link(1e-4, 1e9 / 8), Link(3e-5, 1e10 / 8))
"""If nothing was measured or given: 1 Gb/s and 0.1 ms between nodes, 10 Gb/s and 0.03 ms inside one."""
MOST_COMMUNICATORS = 4
MOST_BUCKETS = 64
WORTH_CUTTING_BYTES = 256 * 1024
"""Fewer bytes of gradients go into one bucket on one communicator: there is nothing to overlap."""
_EDGES = (0.25, 1.0, 4.0)
_CLOSE = 1.01
"""Choices this close to the best count as equal; of these, the one with the fewest communicators, then buckets,
wins."""
_COMPUTING = (0.25, 1.0, 4.0)
"""The computing times that a choice must do well for, relative to the time of the gradients alone on the link."""


@dataclass(frozen=True)
class Conditions:
    """The basis of a choice. ``compute``: None = unknown. ``source``: where the network's numbers come from."""

    network: Network = PAPER
    costs: Costs = TYPICAL
    compute: Compute | None = None
    most_communicators: int = MOST_COMMUNICATORS
    source: str = "assumed"


@dataclass(frozen=True)
class Choice:
    """``profile``: with numbers for the open settings. ``sentences``: rank 0's messages about them."""

    profile: Profile
    sentences: tuple[str, ...] = ()


def needs_link(
    profile: Profile, gradients: Sequence[TensorSpec], cluster: Cluster, judged: Collection[str] = ()
) -> bool:
    """Whether a choice depends on the link's speed and the profile does not give it. ``judged``: compressions that may
    be declined by it."""
    told = profile.link_gigabits > 0 and profile.link_latency_ms > 0
    depends = bool(open_knobs(profile)) or profile.compression in judged
    return depends and not told and is_worth_cutting(gradients, cluster)


def choose(profile: Profile, gradients: Sequence[TensorSpec], cluster: Cluster, conditions: Conditions) -> Choice:
    """Choose the open settings of ``profile``. The same arguments give the same choice on every rank.

    Times are added by ``fsum``: Python 3.12's ``sum`` rounds otherwise than older ones.
    """
    if not open_knobs(profile):
        return Choice(profile)
    if not is_worth_cutting(gradients, cluster):
        return Choice(_settled(profile, Buckets(1, *_sizes(profile, MEGABYTE)[-1]), f"{CHOSEN}: too small to cut"))
    network = with_given_link(conditions.network, cluster, profile)
    paths = Paths(cluster, network, conditions.costs)
    plans = _candidates(profile, gradients, cluster, conditions.most_communicators)
    computing = (conditions.compute,) if conditions.compute else assumed_computing(plans[0][1], paths)
    buckets, plan = _best(plans, cluster, paths, computing)
    link = link_in_words(network, cluster, profile, conditions)
    settled = _settled(profile, buckets, f"{CHOSEN} for {link}")
    return Choice(settled, (_sentence(settled, plan, link),))


def build_plan(
    gradients: Sequence[TensorSpec],
    cluster: Cluster,
    profile: Profile,
    averaged: Sequence[TensorSpec] = (),
    statistics: Sequence[CollectiveSpec] = (),
    state_values_per_parameter: int = 0,
) -> CommPlan:
    """`build_settled` for any profile: open settings are chosen for `PAPER`, or for the link in the profile."""
    settled = choose(profile, gradients, cluster, Conditions()).profile
    return build_settled(gradients, cluster, settled, averaged, statistics, state_values_per_parameter)


def with_given_link(network: Network, cluster: Cluster, profile: Profile) -> Network:
    """``network`` with ``link_gigabits`` and ``link_latency_ms`` as the job's link, if given."""
    several = cluster.node_num > 1
    known = network.between if several else network.inside
    link = Link(
        profile.link_latency_ms / 1e3 or known.latency_seconds,
        profile.link_gigabits * 1e9 / 8 or known.bytes_per_second,
    )
    return Network(link, network.inside) if several else Network(network.between, link)


def is_worth_cutting(gradients: Sequence[TensorSpec], cluster: Cluster) -> bool:
    """Whether communication takes long enough for a choice to matter."""
    return cluster.world_size > 1 and _bytes(gradients) > WORTH_CUTTING_BYTES


def _bytes(gradients: Sequence[TensorSpec]) -> int:
    return sum(gradient.nbytes for gradient in gradients)


def _candidates(
    profile: Profile, gradients: Sequence[TensorSpec], cluster: Cluster, most_communicators: int
) -> list[tuple[Buckets, CommPlan]]:
    """Every bucketing that the given knobs allow, each once; from few communicators and buckets to many."""
    numbers = [int(number) for number in _numbers(profile.nccl_comm_num, range(1, most_communicators + 1))]
    cuts: dict[tuple[int, ...], tuple[Buckets, CommPlan]] = {}
    for size, edge in _sizes(profile, _bytes(gradients)):
        buckets = Buckets(numbers[0], size, edge)
        plan = build_settled(gradients, cluster, _settled(profile, buckets))
        cut = tuple(len(bucket.gradients) for bucket in plan.buckets)
        # Many sizes give the same bucketing; the largest one is reported.
        if cut not in cuts or size > cuts[cut][0].megabytes:
            cuts[cut] = buckets, plan
    plans = sorted(cuts.values(), key=lambda one: len(one[1].buckets))
    plans = [one for one in plans if len(one[1].buckets) <= MOST_BUCKETS] or plans[:1]
    return [_on_communicators(*one, number) for number in numbers for one in plans]


def _on_communicators(buckets: Buckets, plan: CommPlan, number: int) -> tuple[Buckets, CommPlan]:
    """The same buckets, assigned in turn to ``number`` communicators."""
    taken = tuple(replace(bucket, communicator=bucket.index % number) for bucket in plan.buckets)
    return replace(buckets, communicators=number), replace(plan, buckets=taken, communicators=number)


def _sizes(profile: Profile, nbytes: int) -> list[tuple[float, float]]:
    """Sizes of a bucket and of the first and last one, in MB: powers of two up to one that holds all gradients."""
    if not profile.fuse_all_reduce_ops:
        return [(0.0, 0.0)]
    powers = [0.25 * 2**power for power in range(13)]
    holding = next((size for size in powers if size * MEGABYTE >= nbytes), powers[-1])
    sizes = _numbers(profile.fuse_grad_size_in_MB, [size for size in powers if size <= holding])
    edge = profile.last_comm_group_size_MB
    if edge != AUTO:
        sizes = sizes if profile.fuse_grad_size_in_MB != AUTO else sorted({float(edge), *sizes})
        return [(size, float(edge)) for size in sizes if size >= float(edge)]
    return [(size, edge) for size in sizes for edge in sorted({min(size, edge) for edge in (*_EDGES, size)})]


def _numbers(given: Any, otherwise: Sequence[float]) -> list[float]:
    return list(otherwise) if given == AUTO else [given]


def assumed_computing(plan: CommPlan, paths: Paths) -> tuple[Compute, ...]:
    """Computing times from short to long, relative to the time of the gradients of ``plan`` on the link."""
    link = fsum(phase.seconds for bucket in plan.buckets for sent in bucket.sent for phase in paths.of(plan, sent))
    return tuple(Compute.of(share * link) for share in _COMPUTING)


def _settled(profile: Profile, buckets: Buckets, origin: str = CHOSEN) -> Profile:
    """``profile`` with these numbers for settings without one."""
    numbers = {COMMUNICATORS: buckets.communicators, SIZE: buckets.megabytes, EDGE: buckets.edge_megabytes}
    return profile.with_choices(origin, **{knob: numbers[knob] for knob in open_knobs(profile)})


def _best(
    plans: Sequence[tuple[Buckets, CommPlan]], cluster: Cluster, paths: Paths, computing: Sequence[Compute]
) -> tuple[Buckets, CommPlan]:
    """The first plan whose steps are nearly the shortest, over all of ``computing``."""
    totals = [0.0] * len(plans)
    for compute in computing:
        steps = [predict(plan, cluster, paths.network, compute, warm_up=True, paths=paths).step for _, plan in plans]
        totals = [total + step / min(steps) for total, step in zip(totals, steps, strict=True)]
    return next(one for one, total in zip(plans, totals, strict=True) if total <= _CLOSE * min(totals))


def link_in_words(network: Network, cluster: Cluster, profile: Profile, conditions: Conditions) -> str:
    """The link of a job, and where its numbers come from."""
    link = network.between if cluster.node_num > 1 else network.inside
    figures = f"{link.bytes_per_second * 8 / 1e9:.3g} Gb/s, {link.latency_seconds * 1e3:.2g} ms"
    told = [name for name in ("link_gigabits", "link_latency_ms") if getattr(profile, name)]
    if not told:
        return f"{figures} ({conditions.source})"
    return f"{figures} ({' and '.join(told)} given" + (")" if len(told) == 2 else f", the other {conditions.source})")


def _sentence(settled: Profile, plan: CommPlan, link: str) -> str:
    number, megabytes = len(plan.buckets), plan.gradient_bytes / MEGABYTE
    return (
        f"{chosen_in_words(settled)}: chosen for {link} and {megabytes:.3g} MB of gradients, which makes {number} "
        f"bucket{'s' if number > 1 else ''}; numbers in the profile override this"
    )
