"""Chooses the open settings of a profile, buckets and communicators, by price. Pure arithmetic.

The computing time of a step is unknown before the first one, so a choice must do well for a short, a medium and a long
one: it minimizes the sum of the step times, each relative to the shortest that any choice gives there.

The link itself is fitted to timed allreduces (`fit`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, fsum
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.errors import ClusterError
from fleet_train.plan.build import as_sent, build_chosen, cut_into_buckets, without_buckets
from fleet_train.plan.phases import flows, rounds
from fleet_train.plan.plan import MEGABYTE, CommPlan
from fleet_train.plan.price import PAPER, TYPICAL, Compute, Costs, Link, Network, Paths, predict, with_given_link
from fleet_train.profile import Profile
from fleet_train.profile.knobs import AUTO
from fleet_train.profile.methods.base import CollectiveSpec, TensorSpec
from fleet_train.profile.profile import (
    CHOSEN,
    COMMUNICATORS,
    EDGE,
    SIZE,
    Buckets,
    chosen_in_words,
    open_knobs,
)

MOST_COMMUNICATORS = 4
MOST_BUCKETS = 64
OWNERS_BUCKETS = 8
"""A sharded optimizer's buckets are at most this share of all gradients, or the largest with a few small ones."""
WORTH_CUTTING_BYTES = 256 * 1024
"""Fewer bytes of gradients go into one bucket on one communicator: there is nothing to overlap."""
_EDGES = (0.25, 1.0, 4.0)
_CLOSE = 1.01
"""Choices this close to the best count as equal; of these, the one with the fewest communicators, then buckets,
wins."""
_COMPUTING = (0.25, 1.0, 4.0)
"""The computing times that a choice must do well for, relative to the time of the gradients alone on the link."""


@dataclass(frozen=True)
class ChoiceConditions:
    """The basis of a choice. ``compute``: None = unknown. ``source``: where the network's numbers come from."""

    network: Network = PAPER
    costs: Costs = TYPICAL
    compute: Compute | None = None
    most_communicators: int = MOST_COMMUNICATORS
    source: str = "assumed"


@dataclass(frozen=True)
class Choice:
    """The outcome of a choice. ``profile``: with numbers for open settings. ``sentences``: rank 0's messages."""

    profile: Profile
    sentences: tuple[str, ...] = ()


def needs_link(profile: Profile, gradients: Sequence[TensorSpec], cluster: Cluster) -> bool:
    """Whether a choice depends on the link's speed and the profile does not give it."""
    is_given = profile.link_gigabits > 0 and profile.link_latency_ms > 0
    return bool(open_knobs(profile)) and not is_given and is_worth_cutting(gradients, cluster)


def choose(profile: Profile, gradients: Sequence[TensorSpec], cluster: Cluster, conditions: ChoiceConditions) -> Choice:
    """Choose the open settings of ``profile``. The same arguments give the same choice on every rank.

    Times are added by ``fsum``: Python 3.12's ``sum`` rounds otherwise than older ones.
    """
    if not open_knobs(profile):
        return Choice(profile)
    gradients = as_sent(gradients, cluster, profile)
    if not is_worth_cutting(gradients, cluster):
        return Choice(_with_buckets(profile, Buckets(1, *_sizes(profile, MEGABYTE)[-1]), f"{CHOSEN}: too small to cut"))
    network = with_given_link(conditions.network, cluster, profile)
    paths = Paths(cluster, network, conditions.costs)
    plans = _candidates(profile, gradients, cluster, conditions.most_communicators)
    computing = (conditions.compute,) if conditions.compute else _assumed_computing(plans[0][1], paths)
    buckets, plan = _best(plans, cluster, paths, computing)
    link = _link_in_words(network, cluster, profile, conditions)
    chosen = _with_buckets(profile, buckets, f"{CHOSEN} for {link}")
    return Choice(chosen, (_sentence(chosen, plan, link),))


def build_plan(
    gradients: Sequence[TensorSpec],
    cluster: Cluster,
    profile: Profile,
    averaged: Sequence[TensorSpec] = (),
    statistics: Sequence[CollectiveSpec] = (),
    state_values_per_parameter: int = 0,
) -> CommPlan:
    """Build the plan of any profile: open settings are chosen for `PAPER`, or for the link in the profile."""
    chosen = choose(profile, gradients, cluster, ChoiceConditions()).profile
    return build_chosen(gradients, cluster, chosen, averaged, statistics, state_values_per_parameter)


def is_worth_cutting(gradients: Sequence[TensorSpec], cluster: Cluster) -> bool:
    """Whether communication takes long enough for a choice to matter."""
    return cluster.world_size > 1 and _bytes(gradients) > WORTH_CUTTING_BYTES


def _bytes(gradients: Sequence[TensorSpec]) -> int:
    """The bytes of the gradients that are sent whole, in buckets that can be cut."""
    return sum(gradient.nbytes for gradient in gradients if not gradient.rows)


def _candidates(
    profile: Profile, gradients: Sequence[TensorSpec], cluster: Cluster, most_communicators: int
) -> list[tuple[Buckets, CommPlan]]:
    """Every bucketing that the given knobs allow, each once; from few communicators and buckets to many."""
    # With the same buckets, sums have the same bits whenever they are waited for.
    shape = replace(without_buckets(cluster, profile), overlaps_next_step=False)
    numbers = [int(number) for number in _numbers(profile.nccl_comm_num, range(1, most_communicators + 1))]
    cuts: dict[tuple[int, ...], tuple[Buckets, CommPlan]] = {}
    largest = max((gradient.nbytes for gradient in gradients if not gradient.rows), default=0)
    for size, edge in _sizes(profile, _bytes(gradients), largest):
        buckets = Buckets(numbers[0], size, edge)
        plan = replace(shape, buckets=cut_into_buckets(gradients, profile, buckets, shape))
        cut = tuple(len(bucket.gradients) for bucket in plan.buckets)
        # Many sizes give the same bucketing; the largest one is reported.
        if cut not in cuts or size > cuts[cut][0].megabytes:
            cuts[cut] = buckets, plan
    plans = sorted(cuts.values(), key=lambda candidate: len(candidate[1].buckets))
    plans = [candidate for candidate in plans if len(candidate[1].buckets) <= MOST_BUCKETS] or plans[:1]
    return [_on_communicators(*candidate, number) for number in numbers for candidate in plans]


def _on_communicators(buckets: Buckets, plan: CommPlan, number: int) -> tuple[Buckets, CommPlan]:
    """Assign the buckets in turn to ``number`` communicators."""
    taken = tuple(replace(bucket, communicator=bucket.index % number) for bucket in plan.buckets)
    return replace(buckets, communicators=number), replace(plan, buckets=taken, communicators=number)


def _sizes(profile: Profile, nbytes: int, largest: int = 0) -> list[tuple[float, float]]:
    """Sizes of a bucket and of the first and last one, in MB: powers of two up to one that holds all gradients."""
    if not profile.fuse_all_reduce_ops:
        return [(0.0, 0.0)]
    powers = [0.25 * 2**power for power in range(13)]
    if profile.sharding:  # what is on its way is in memory several times
        powers = [size for size in powers if size * MEGABYTE <= nbytes / OWNERS_BUCKETS] or powers[:1]
        with_small_ones = ceil(4.4 * largest / MEGABYTE) / 4
        powers += [with_small_ones] * (with_small_ones > powers[-1])
    holding = next((size for size in powers if size * MEGABYTE >= nbytes), powers[-1])
    sizes = _numbers(profile.fuse_grad_size_in_MB, [size for size in powers if size <= holding])
    edge = profile.last_comm_group_size_MB
    if edge != AUTO:
        sizes = sizes if profile.fuse_grad_size_in_MB != AUTO else sorted({float(edge), *sizes})
        return [(size, float(edge)) for size in sizes if size >= float(edge)]
    return [(size, edge) for size in sizes for edge in sorted({min(size, edge) for edge in (*_EDGES, size)})]


def _numbers(given: Any, otherwise: Sequence[float]) -> list[float]:
    return list(otherwise) if given == AUTO else [given]


def _assumed_computing(plan: CommPlan, paths: Paths) -> tuple[Compute, ...]:
    """Computing times from short to long, relative to the time of the gradients of ``plan`` on the link."""
    link = fsum(phase.seconds for bucket in plan.buckets for sent in bucket.sent for phase in paths.of(plan, sent))
    return tuple(Compute.of(share * link) for share in _COMPUTING)


def _with_buckets(profile: Profile, buckets: Buckets, origin: str = CHOSEN) -> Profile:
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
    return next(candidate for candidate, total in zip(plans, totals, strict=True) if total <= _CLOSE * min(totals))


def _link_in_words(network: Network, cluster: Cluster, profile: Profile, conditions: ChoiceConditions) -> str:
    """The link of a job, and where its numbers come from."""
    link = network.between if cluster.node_num > 1 else network.inside
    figures = f"{link.bytes_per_second * 8 / 1e9:.3g} Gb/s, {link.latency_seconds * 1e3:.2g} ms"
    given = [name for name in ("link_gigabits", "link_latency_ms") if getattr(profile, name)]
    if not given:
        return f"{figures} ({conditions.source})"
    return f"{figures} ({' and '.join(given)} given" + (")" if len(given) == 2 else f", the other {conditions.source})")


def _sentence(chosen: Profile, plan: CommPlan, link: str) -> str:
    number, megabytes = len(plan.buckets), plan.gradient_bytes / MEGABYTE
    return (
        f"{chosen_in_words(chosen)}: chosen for {link} and {megabytes:.3g} MB of gradients, which makes {number} "
        f"bucket{'s' if number > 1 else ''}; numbers in the profile override this"
    )


MEASURED_BYTES = tuple(4**power * 1024 for power in range(1, 8))
"""Timed buffer sizes: 4 KiB to 16 MiB, each four times the previous one."""

_ROUNDS_OF_FITTING = 50
_BANDWIDTH_STEP, _LATENCY_STEP, _LEAST_LATENCY = 1.25, 2.0, 1e-5


@dataclass(frozen=True)
class Sample:
    """The median time of an allreduce: bytes of one rank's buffer, seconds on the slowest rank."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredLink:
    """The result of a sweep over one kind of link. ``group_size``: ranks in each allreduce."""

    group_size: int
    samples: tuple[Sample, ...]
    link: Link
    error: float
    """Median of |fitted - measured| / measured over the samples."""


def fit(samples: Sequence[Sample], group_size: int) -> MeasuredLink:
    """Latency and bandwidth in ``seconds = rounds * latency + bytes sent / bandwidth``.

    Medians, latency over the smaller half of the sizes and bandwidth over the others, alternating until both converge:
    one disturbed size changes neither. Raises ClusterError for fewer than two sizes.
    """
    ordered = sorted(samples, key=lambda sample: sample.nbytes)
    if len({sample.nbytes for sample in ordered}) < 2:
        raise ClusterError(
            f"{len(samples)} buffer size{'' if len(samples) == 1 else 's'} measured: latency and bandwidth need two at "
            "least"
        )
    steps = rounds("allreduce", group_size)
    rows = [(_sent_bytes(sample.nbytes, group_size), sample.seconds) for sample in ordered]
    # Of the usual seven: 4 KiB to 256 KiB, and 1 to 16 MiB, as large as buckets are.
    middle = (len(rows) + 1) // 2
    small, large = rows[:middle], rows[middle:]
    latency = rate = 0.0
    for _ in range(_ROUNDS_OF_FITTING):
        # If latency alone would explain the whole time, count at least a tenth as transfer.
        rate = statistics.median(sent / max(seconds - steps * latency, seconds / 10) for sent, seconds in large)
        latency = statistics.median(max(0.0, seconds - sent / rate) / steps for sent, seconds in small)
    errors = [abs(steps * latency + sent / rate - seconds) / seconds for sent, seconds in rows]
    return MeasuredLink(group_size, tuple(ordered), Link(latency, rate), statistics.median(errors))


def coarse(link: Link) -> Link:
    """A link on a grid: bandwidths in steps of a quarter, latencies in steps of two.

    Short measurements differ from run to run; the choice based on them should not.
    """
    return Link(
        _LATENCY_STEP ** round(math.log(max(link.latency_seconds, _LEAST_LATENCY), _LATENCY_STEP)),
        _BANDWIDTH_STEP ** round(math.log(link.bytes_per_second, _BANDWIDTH_STEP)),
    )


def _sent_bytes(nbytes: int, group_size: int) -> float:
    return max(flow.nbytes for flow in flows("allreduce", range(group_size), nbytes).values())
