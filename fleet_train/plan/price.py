"""Seconds per step on a network given by latency and bandwidth: a model; every result is a prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from fleet_train.cluster import Cluster
from fleet_train.plan.order import BucketTimes, postponed, step_seconds
from fleet_train.plan.phases import CollectivePhase, phases_of, rounds
from fleet_train.plan.plan import Averaging, CommPlan
from fleet_train.plan.queues import PricedTask, QueuedBucket, TaskPhase, finish_times
from fleet_train.profile import Profile
from fleet_train.profile.methods import COMPRESSIONS
from fleet_train.profile.methods.base import Bucket, CodingCosts, CollectiveSpec


@dataclass(frozen=True)
class Costs:
    """What communication costs in addition to the link's time: seconds, measured on processors.

    All zero by default: then a price is that of the link alone.

    Mappings go by compression (``none`` for float32); their seconds are per byte of the float32 values exchanged.
    """

    collective_seconds: float = 0.0
    """Seconds per collective of a step: waking its threads, filling and draining its pipeline. Collectives on other
    communicators use the link meanwhile."""
    bucket_seconds: float = 0.0
    """Seconds per bucket on the computing thread: the host operators that start it and wait for it."""
    handing_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Seconds on the computing thread before a bucket is passed to its communicator: copies."""
    codec_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Seconds on the communicators' threads besides the link's: coding (quantised by compiled loops) and copies."""
    waiting_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """How much longer coding takes while computing: zero if enough processors are idle."""
    taken_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """How much longer the computing takes while values are coded."""
    averaging_seconds_per_byte: float = 0.0
    """Seconds for averaged parameters on the computing thread: copies, the outer step, applying the mean."""

    @property
    def share_processors(self) -> bool:
        """Whether exchanging and computing slow one another down."""
        return any(self.taken_seconds_per_byte.values()) or any(self.waiting_seconds_per_byte.values())

    def of(self, compression: str) -> CodingCosts:
        """Seconds per byte of one compression."""
        tables = (
            self.handing_seconds_per_byte,
            self.codec_seconds_per_byte,
            self.waiting_seconds_per_byte,
            self.taken_seconds_per_byte,
        )
        return CodingCosts(*(table.get(compression, 0.0) for table in tables))


NOTHING = Costs()
TYPICAL = Costs(
    collective_seconds=5e-4,
    bucket_seconds=2.5e-4,
    handing_seconds_per_byte={name: compression.costs.handing for name, compression in COMPRESSIONS.items()},
    codec_seconds_per_byte={name: compression.costs.codec for name, compression in COMPRESSIONS.items()},
    waiting_seconds_per_byte={name: compression.costs.waiting for name, compression in COMPRESSIONS.items()},
    taken_seconds_per_byte={name: compression.costs.taken for name, compression in COMPRESSIONS.items()},
    averaging_seconds_per_byte=2e-9,
)
"""Paddle's Gloo with all processors computing: measured with two ranks on two cores of a 2020s server.
`tools/bench.py prediction` compares what they predict with trials."""
ENQUEUED = replace(TYPICAL, waiting_seconds_per_byte={}, taken_seconds_per_byte={})
"""Costs of collectives enqueued on a device's streams: how much they slow its computing is unknown."""


BACKWARD_SHARE = 2 / 3
"""Share of the computing time, unless measured: the backward pass costs about two forward passes."""
_TURNS = 4


@dataclass(frozen=True)
class Link:
    """Latency in seconds of one message of a collective, bandwidth in bytes per second and direction."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Network:
    """``between``: what a node sends to other nodes, shared by its ranks. ``inside``: what one rank sends on a node."""

    between: Link
    inside: Link


PAPER = Network(Link(1e-4, 1e9 / 8), Link(3e-5, 1e10 / 8))
"""The network that is assumed unless measured or given: 1 Gb/s, 0.1 ms between nodes, 10 Gb/s, 0.03 ms inside."""


@dataclass(frozen=True)
class Compute:
    """One rank's computing time of a step in seconds: forward pass, backward pass, update."""

    forward: float
    backward: float
    update: float = 0.0

    @classmethod
    def of(cls, seconds: float, backward_share: float = BACKWARD_SHARE) -> Compute:
        return cls(seconds * (1 - backward_share), seconds * backward_share)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one step, in seconds; LocalSGD: the mean of a period."""

    compute: float
    communication: float
    """The time from each collective's start to its end, summed over the step, each as if alone on the link."""
    exposed: float
    """The time that communication adds to the step."""
    step: float
    samples_per_second: float
    """The samples per second of all ranks together; 0 when no batch size was given."""


def predict(
    plan: CommPlan,
    cluster: Cluster,
    network: Network,
    compute: Compute,
    batch_size: int = 0,
    warm_up: bool = False,
    costs: Costs = NOTHING,
    paths: Paths | None = None,
) -> Prediction:
    """Price one update. ``batch_size``: samples per rank and micro-batch. ``compute``: of one micro-batch. ``warm_up``:
    an update of LocalSGD's synchronous warm-up. ``paths``: those of ``cluster`` and ``network``, if several plans of
    one cluster are priced.

    Buckets become ready linearly in bytes during the (last) backward pass; each communicator takes its buckets in turn;
    communicators share the link and, by ``costs``, the processors with the computation that they overlap. Buckets that
    are waited for in the next step overlap its forward pass, too. An averaging
    of LocalSGD overlaps the steps of its overlap setting, the statistics of batch norm overlap nothing. A sharded
    optimizer's new parameters follow their bucket's gradients.
    """
    paths = paths or Paths(cluster, network, costs)
    if plan.averaging is not None and not warm_up:
        communication, exposed = _averagings(plan, plan.averaging, compute, paths)
    else:
        statistics = plan.accumulate_steps * _seconds(plan, plan.statistics, paths)
        communication, exposed = _buckets(plan, compute, paths)
        communication, exposed = communication + statistics, exposed + statistics
    computing = compute.total * plan.accumulate_steps
    step = computing + exposed
    samples = batch_size * plan.accumulate_steps * cluster.world_size / step if step else 0.0
    return Prediction(computing, communication, exposed, step, samples)


class Paths:
    """How exchanges use a cluster's links, computed once for each: candidate plans share most of them."""

    def __init__(self, cluster: Cluster, network: Network, costs: Costs = NOTHING) -> None:
        self.network = network
        self.costs = costs
        self._cluster = cluster
        self._known: dict[tuple[int, CollectiveSpec], list[TaskPhase]] = {}

    def of(self, plan: CommPlan, sent: CollectiveSpec) -> list[TaskPhase]:
        """The phases of one exchange of ``plan``, which must be a plan for this cluster."""
        key = plan.group_size, sent
        if key not in self._known:
            collectives = phases_of(plan.world_size, plan.group_size, sent)
            self._known[key] = [phase for collective in collectives for phase in self._timed(collective)]
        return self._known[key]

    def queued(self, plan: CommPlan) -> list[QueuedBucket]:
        """The buckets of a plan, each with what it has to send."""
        return [
            QueuedBucket(
                bucket.communicator,
                tuple(phase for sent in bucket.sent for phase in self.of(plan, sent)),
                bucket.handled_bytes,
            )
            for bucket in plan.buckets
        ]

    def _timed(self, phase: CollectivePhase) -> list[TaskPhase]:
        """Waiting, then moving the bytes of the busiest port: a node's towards others, or a rank's inside a node."""
        edges = phase.flows()
        if not edges:
            return []
        ports: dict[tuple[str, int, str], float] = defaultdict(float)
        for (sender, receiver), flow in edges.items():
            nodes = self._cluster.ranks[sender].node_index, self._cluster.ranks[receiver].node_index
            between = nodes[0] != nodes[1]
            source, destination = nodes if between else (sender, receiver)
            for direction, place in (("out", source), ("in", destination)):
                ports["between" if between else "inside", place, direction] += flow.nbytes
        seconds = max(nbytes / self._link(kind).bytes_per_second for (kind, _, _), nbytes in ports.items())
        resource = "between" if any(kind == "between" for kind, _, _ in ports) else "inside"
        waiting = self._link(resource).latency_seconds * rounds(phase.kind, max(len(group) for group in phase.groups))
        return [TaskPhase("", waiting + self.costs.collective_seconds), TaskPhase(resource, seconds)]

    def _link(self, kind: str) -> Link:
        return self.network.between if kind == "between" else self.network.inside


def _averagings(plan: CommPlan, averaging: Averaging, compute: Compute, paths: Paths) -> tuple[float, float]:
    """Seconds of communication per step of a period, and the seconds that it adds to a step: those beyond the steps
    that it overlaps, and the slowdown of those steps.
    """
    costs, name = paths.costs, averaging.compression
    overlapped = averaging.overlap_steps * plan.accumulate_steps * compute.total
    communication = exposed = 0.0
    for part in range(len(averaging.parts)):
        nbytes = averaging.bytes_of(part)
        coding = costs.of(name).codec + (costs.of(name).waiting if overlapped else 0.0)
        seconds = _seconds(plan, averaging.collectives_of(part), paths) + coding * nbytes
        hidden = min(seconds, overlapped)
        taken = costs.of(name).taken * nbytes * (hidden / seconds if seconds else 0.0)
        communication += seconds
        exposed += seconds - hidden + taken + costs.averaging_seconds_per_byte * nbytes
    return communication / averaging.period, exposed / averaging.period


def _buckets(plan: CommPlan, compute: Compute, paths: Paths) -> tuple[float, float]:
    """Seconds of the gradients' communication, and those exposed after the backward pass, with the computing thread's
    work for it and its slowdown.

    Exchanges during the backward pass make it longer, so that more exchanges overlap it: found by iteration.
    """
    costs = paths.costs
    alone = [_bucket_phases(plan, bucket, paths, 0.0) for bucket in plan.buckets]
    communication = fsum(phase.seconds for phases in alone for phase in phases)
    handing = fsum(_handing(bucket, costs) for bucket in plan.buckets)
    if plan.waits_for_each:
        return communication, communication + handing
    computed = compute.forward + compute.backward
    shares, taken, ends = [0.0] * len(plan.buckets), 0.0, [0.0]
    for _ in range(_TURNS if costs.share_processors else 1):
        ready = _ready_times(plan, replace(compute, backward=compute.backward + taken), costs)
        ends = finish_times(
            [
                PricedTask(bucket.communicator, tuple(_bucket_phases(plan, bucket, paths, share)), start)
                for bucket, share, start in zip(plan.buckets, shares, ready, strict=True)
            ]
        )
        shares = _shares_before(computed + taken + handing, plan, ready, ends)
        taken = fsum(
            costs.of(bucket.compression).taken * bucket.handled_bytes * share
            for bucket, share in zip(plan.buckets, shares, strict=True)
        )
    if plan.overlaps_next_step:
        return communication, handing + taken + _waited_in_next(plan, compute, paths, shares, handing + taken)
    return communication, max(handing + taken, max(ends, default=0.0) - computed)


def _waited_in_next(plan: CommPlan, compute: Compute, paths: Paths, shares: Sequence[float], more: float) -> float:
    """Seconds that the next forward pass waits for buckets, which it needs in the reverse order, linearly in bytes.
    ``more``: seconds that communication adds to the backward pass."""
    total = max(1, sum(bucket.handled_bytes for bucket in plan.buckets))
    launched, needed, left = [], [], 1.0
    for bucket in plan.buckets:
        left -= bucket.handled_bytes / total
        needed.append(compute.update + compute.forward * left)
        launched.append(compute.update + compute.forward + (compute.backward + more) * (1 - left))
    buckets = [
        QueuedBucket(bucket.communicator, tuple(_bucket_phases(plan, bucket, paths, share)), bucket.handled_bytes)
        for bucket, share in zip(plan.buckets, shares, strict=True)
    ]
    times = BucketTimes(tuple(needed), tuple(launched))
    return step_seconds(buckets, times, postponed(buckets, times)) - launched[-1]


def _shares_before(end: float, plan: CommPlan, ready: Sequence[float], ends: Sequence[float]) -> list[float]:
    """The share of each bucket's exchange that overlaps the computing, which ends then."""
    free: dict[int, float] = defaultdict(float)
    shares = []
    for bucket, start, finish in zip(plan.buckets, ready, ends, strict=True):
        start = max(start, free[bucket.communicator])
        free[bucket.communicator] = finish
        shares.append(min(1.0, max(0.0, (end - start) / (finish - start))) if finish > start else 1.0)
    return shares


def _bucket_phases(plan: CommPlan, bucket: Bucket, paths: Paths, share: float) -> list[TaskPhase]:
    """``share``: of the exchange that overlaps computing. Communicators share the remaining processors."""
    name, costs = bucket.compression, paths.costs
    codec = (costs.of(name).codec + share * costs.of(name).waiting) * bucket.handled_bytes
    return [
        TaskPhase("processors" if costs.share_processors else "", codec),
        *(phase for sent in (*bucket.sent, *bucket.updated) for phase in paths.of(plan, sent)),
    ]


def _ready_times(plan: CommPlan, compute: Compute, costs: Costs) -> list[float]:
    """Seconds from the start of the step to the last gradient of each bucket."""
    done, handed, times = 0, 0.0, []
    total = sum(bucket.handled_bytes for bucket in plan.buckets)
    for bucket in plan.buckets:
        done += bucket.handled_bytes
        handed += _handing(bucket, costs)
        times.append(compute.forward + compute.backward * done / max(total, 1) + handed)
    return times


def _handing(bucket: Bucket, costs: Costs) -> float:
    """Seconds on the computing thread for a bucket."""
    return costs.bucket_seconds + costs.of(bucket.compression).handing * bucket.handled_bytes


def _seconds(plan: CommPlan, exchanges: Sequence[CollectiveSpec], paths: Paths) -> float:
    """Seconds of exchanges one after the other, overlapping nothing."""
    return fsum(phase.seconds for sent in exchanges for phase in paths.of(plan, sent))


def with_given_link(network: Network, cluster: Cluster, profile: Profile) -> Network:
    """``network`` with ``link_gigabits`` and ``link_latency_ms`` as the job's link, if given."""
    several = cluster.node_num > 1
    known = network.between if several else network.inside
    link = Link(
        profile.link_latency_ms / 1e3 or known.latency_seconds,
        profile.link_gigabits * 1e9 / 8 or known.bytes_per_second,
    )
    return Network(link, network.inside) if several else Network(network.between, link)
