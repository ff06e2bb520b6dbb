"""Bytes per rank and per link of one step, from a plan and a cluster: pure arithmetic on predicted figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.plan.backend_bytes import (
    RECEIVER_BYTES_PER_MESSAGE,
    SENDER_BYTES_PER_MESSAGE,
    Edge,
    Flow,
    flows,
)
from fleet_train.plan.hierarchy import leaders_of, teams
from fleet_train.plan.plan import ITEM_BYTES, Bucket, CommPlan, Sent


@dataclass(frozen=True)
class Leg:
    """Collectives of one kind that run at the same time, one in each of ``groups`` (root first)."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: int
    item_bytes: int

    def flows(self) -> dict[Edge, Flow]:
        """Every edge that this leg uses; a rank is in one group only, so edges do not meet."""
        return {
            edge: flow
            for group in self.groups
            for edge, flow in flows(self.kind, group, self.nbytes, self.item_bytes).items()
        }


def bucket_legs(plan: CommPlan, bucket: Bucket) -> list[Leg]:
    """What one bucket's exchange consists of, one leg after the other."""
    return [leg for sent in bucket.sent for leg in legs_of(plan, sent)]


def averaging_legs(plan: CommPlan) -> list[Leg]:
    """What one averaging of LocalSGD consists of: all values in one buffer."""
    if plan.averaging is None:
        return []
    item_bytes = ITEM_BYTES[plan.averaging.wire_dtype]
    return legs_of(plan, Sent("allreduce", plan.averaging.wire_bytes, item_bytes))


def legs_of(plan: CommPlan, payload: Sent) -> list[Leg]:
    """What one collective over all ranks consists of: itself, or the three steps of a hierarchical allreduce."""
    everyone = tuple(range(plan.world_size))

    def leg(kind: str, groups: Sequence[Sequence[int]], item_bytes: int = payload.item_bytes) -> Leg:
        nbytes = payload.nbytes // payload.item_bytes * item_bytes
        return Leg(kind, tuple(tuple(group) for group in groups), nbytes, item_bytes)

    if not plan.team_size or payload.kind != "allreduce":
        return [leg(payload.kind, [everyone])]
    members = teams(plan.world_size, plan.team_size)
    between = leg("allreduce", [leaders_of(members)], payload.between_item_bytes or payload.item_bytes)
    return [leg("reduce", members), between, leg("broadcast", members)]


@dataclass(frozen=True)
class Traffic:
    """Predicted bytes of one step: payload, and apart from it what Gloo adds. TCP and Ethernet add theirs to both."""

    sent: tuple[float, ...]
    """Payload that each rank sends, to wherever."""
    leaving: tuple[float, ...]
    """Payload that each node sends to other nodes."""
    entering: tuple[float, ...]
    """Payload that each node gets from other nodes."""
    inside: tuple[float, ...]
    """Payload that the ranks of each node send one another."""
    protocol: tuple[float, ...]
    """Bytes of Gloo's headers that each node sends to other nodes."""

    @property
    def most_sent(self) -> float:
        return max(self.sent)

    @property
    def most_leaving(self) -> float:
        return max(self.leaving)

    @property
    def most_inside(self) -> float:
        return max(self.inside)

    def to_json(self) -> dict[str, Any]:
        return {name: list(values) for name, values in asdict(self).items()}


def traffic(plan: CommPlan, cluster: Cluster, warm_up: bool = False) -> Traffic:
    """The mean step of training; with ``warm_up`` a step of LocalSGD's warm-up, in which gradients are sent.

    LocalSGD: the bytes of an averaging over the steps of a period (for doubling and adaptive schedules: of
    ``local_sgd_steps``, the period that doubling ends with and adapting starts with).
    """
    if plan.averaging is not None and not warm_up:
        return _counted(averaging_legs(plan), cluster, 1 / plan.averaging.period)
    return _counted([leg for bucket in plan.buckets for leg in bucket_legs(plan, bucket)], cluster, 1.0)


def _counted(legs: Sequence[Leg], cluster: Cluster, share: float) -> Traffic:
    node = [rank.node_index for rank in cluster.ranks]
    sent = [0.0] * cluster.world_size
    leaving, entering, inside, protocol = ([0.0] * cluster.node_num for _ in range(4))
    for leg in legs:
        for (sender, receiver), flow in leg.flows().items():
            sent[sender] += flow.nbytes * share
            if node[sender] == node[receiver]:
                inside[node[sender]] += flow.nbytes * share
                continue
            leaving[node[sender]] += flow.nbytes * share
            entering[node[receiver]] += flow.nbytes * share
            protocol[node[sender]] += SENDER_BYTES_PER_MESSAGE * flow.messages * share
            protocol[node[receiver]] += RECEIVER_BYTES_PER_MESSAGE * flow.messages * share
    return Traffic(tuple(sent), tuple(leaving), tuple(entering), tuple(inside), tuple(protocol))
