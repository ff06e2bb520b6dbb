"""Seconds per step on a network given by latency and bandwidth: a model, every result of it a prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet_train.cluster import Cluster
from fleet_train.errors import ConversionError
from fleet_train.plan.backend_bytes import rounds
from fleet_train.plan.legs import Leg, Sent, legs_of
from fleet_train.plan.plan import Averaging, CommPlan
from fleet_train.plan.schedule import Phase, Task, finish_times

BACKWARD_SHARE = 2 / 3
"""Of the computing time, where nothing else was measured: the backward pass costs about two forward passes."""
LOCAL_SGD_STEPS = 8
"""Period of the LocalSGD that a plan without it is compared with."""


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
    """Of one step, in seconds; LocalSGD: the mean of a period."""

    compute: float
    communication: float
    """From a collective's start to its end, added up over the step, each as if alone on the link."""
    exposed: float
    """What the step takes longer for communication."""
    step: float
    samples_per_second: float
    """Of all ranks together; 0 when no batch size was given."""


def predict(
    plan: CommPlan, cluster: Cluster, network: Network, compute: Compute, batch_size: int = 0, warm_up: bool = False
) -> Prediction:
    """Price one update. ``batch_size``: samples per rank and micro-batch. ``compute``: of one micro-batch. ``warm_up``:
    an update of LocalSGD's synchronous warm-up.

    Buckets become ready linearly in bytes during the (last) backward pass; each communicator takes its buckets in turn;
    communicators share the link. An averaging of LocalSGD hides behind its overlap's steps, the statistics of batch
    norm behind nothing.
    """
    if plan.averaging is not None and not warm_up:
        alone = _seconds(plan, plan.averaging.sent, cluster, network)
        hidden = plan.averaging.overlap_steps * plan.accumulate_steps * compute.total
        communication, exposed = (seconds / plan.averaging.period for seconds in (alone, max(0.0, alone - hidden)))
    else:
        statistics = plan.accumulate_steps * _seconds(plan, plan.statistics, cluster, network)
        communication, exposed = _buckets(plan, cluster, network, compute)
        communication, exposed = communication + statistics, exposed + statistics
    computing = compute.total * plan.accumulate_steps
    step = computing + exposed
    samples = batch_size * plan.accumulate_steps * cluster.world_size / step if step else 0.0
    return Prediction(computing, communication, exposed, step, samples)


def _buckets(plan: CommPlan, cluster: Cluster, network: Network, compute: Compute) -> tuple[float, float]:
    """Seconds of the gradients' communication, and how many of them end after the backward pass."""
    ready = _ready_times(plan, compute)
    tasks = [
        Task(bucket.communicator, tuple(_phases(plan, bucket.sent, cluster, network)), seconds)
        for bucket, seconds in zip(plan.buckets, ready, strict=True)
    ]
    communication = sum(phase.seconds for task in tasks for phase in task.phases)
    if plan.waits_for_each:
        return communication, communication
    start_of_update = compute.forward + compute.backward
    return communication, max(0.0, max(finish_times(tasks), default=0.0) - start_of_update)


def _ready_times(plan: CommPlan, compute: Compute) -> list[float]:
    """Seconds from the start of the step to the last gradient of each bucket."""
    done, times = 0, []
    for bucket in plan.buckets:
        done += bucket.nbytes
        times.append(compute.forward + compute.backward * done / max(plan.gradient_bytes, 1))
    return times


def _seconds(plan: CommPlan, exchanges: Sequence[Sent], cluster: Cluster, network: Network) -> float:
    """One after the other, with nothing beside them."""
    return sum(phase.seconds for phase in _phases(plan, exchanges, cluster, network))


def _phases(plan: CommPlan, exchanges: Sequence[Sent], cluster: Cluster, network: Network) -> list[Phase]:
    legs = [leg for sent in exchanges for leg in legs_of(plan.world_size, plan.team_size, sent)]
    return [phase for leg in legs for phase in _leg_phases(leg, cluster, network)]


def _leg_phases(leg: Leg, cluster: Cluster, network: Network) -> list[Phase]:
    """Waiting, then moving the bytes of the busiest port: a node's towards other nodes, or a rank's inside a node."""
    edges = leg.flows()
    if not edges:
        return []
    ports: dict[tuple[str, int, str], float] = defaultdict(float)
    for (sender, receiver), flow in edges.items():
        nodes = cluster.ranks[sender].node_index, cluster.ranks[receiver].node_index
        between = nodes[0] != nodes[1]
        one, other = nodes if between else (sender, receiver)
        for direction, place in (("out", one), ("in", other)):
            ports["between" if between else "inside", place, direction] += flow.nbytes
    seconds = max(
        nbytes / (network.between if kind == "between" else network.inside).bytes_per_second
        for (kind, _, _), nbytes in ports.items()
    )
    resource = "between" if any(kind == "between" for kind, _, _ in ports) else "inside"
    latency = (network.between if resource == "between" else network.inside).latency_seconds
    waiting = latency * rounds(leg.kind, max(len(group) for group in leg.groups))
    return [Phase("", waiting), Phase(resource, seconds)]


def on_paper(plan: CommPlan, nodes: int, ranks_per_node: int) -> tuple[CommPlan, Cluster]:
    """The same buckets and strategy on another number of nodes."""
    cluster = Cluster.imagined(nodes, ranks_per_node)
    if cluster.world_size < 2:
        raise ConversionError("one rank communicates nothing: plan for more nodes or ranks per node")
    if plan.team_size and cluster.world_size % plan.team_size:
        raise ConversionError(
            f"{nodes} nodes of {ranks_per_node} ranks are {cluster.world_size}, which teams of {plan.team_size} do not "
            "divide: choose other --nodes_on_paper or hierarchical_allreduce_inter_nranks"
        )
    return replace(plan, world_size=cluster.world_size, node_num=nodes), cluster


def alternatives(plan: CommPlan, ranks_per_node: int) -> dict[str, CommPlan]:
    """The plan beside what else could be done with its buckets: flat, hierarchical by node, LocalSGD."""
    flat = replace(plan, team_size=0, averaging=None)
    found = {"as planned": plan, "flat": flat}
    if 1 < ranks_per_node < plan.world_size:
        found["hierarchical"] = replace(flat, team_size=ranks_per_node)
    values = tuple(gradient for bucket in plan.buckets for gradient in bucket.gradients)
    averaging = plan.averaging or Averaging(values, (), 0, 0, LOCAL_SGD_STEPS, "constant", "float32", "none")
    found[f"local_sgd ({averaging.period} steps)"] = replace(flat, averaging=averaging)
    return found
