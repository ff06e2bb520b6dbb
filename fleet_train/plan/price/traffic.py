"""Bytes per rank and per link of one step, from a plan and a cluster: pure arithmetic; all numbers are predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.plan.backend_bytes import RECEIVER_BYTES_PER_MESSAGE, SENDER_BYTES_PER_MESSAGE
from fleet_train.plan.phases import CollectivePhase, phases_of, sent_by_rank
from fleet_train.plan.plan import CommPlan


@dataclass(frozen=True)
class Traffic:
    """Predicted bytes of one step: payload, and separately Gloo's headers. Those of TCP and Ethernet come on top."""

    sent: tuple[float, ...]
    """Payload that each rank sends, to any rank."""
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
    """The mean update of training; with ``warm_up``, an update of LocalSGD's warm-up, in which gradients are sent.

    LocalSGD: the bytes of an averaging over the updates of a period (for doubling and adaptive schedules: of
    ``local_sgd_steps``, the period that doubling ends with and adapting starts with).
    """
    share = 1 / plan.averaging.period if plan.averaging is not None and not warm_up else 1.0
    return _counted(plan.phases(warm_up), cluster, share)


def averaging_bytes(plan: CommPlan) -> list[tuple[float, ...]]:
    """Payload bytes that each rank sends in the averaging of each fragment; empty without LocalSGD."""
    if plan.averaging is None:
        return []
    return [
        sent_by_rank(
            [
                phase
                for sent in plan.averaging.collectives_of(part)
                for phase in phases_of(plan.world_size, plan.team_size, sent)
            ],
            plan.world_size,
        )
        for part in range(len(plan.averaging.parts))
    ]


def _counted(phases: Sequence[CollectivePhase], cluster: Cluster, share: float) -> Traffic:
    node = [rank.node_index for rank in cluster.ranks]
    sent = [0.0] * cluster.world_size
    leaving, entering, inside, protocol = ([0.0] * cluster.node_num for _ in range(4))
    for phase in phases:
        for (sender, receiver), flow in phase.flows().items():
            sent[sender] += flow.nbytes * share
            if node[sender] == node[receiver]:
                inside[node[sender]] += flow.nbytes * share
                continue
            leaving[node[sender]] += flow.nbytes * share
            entering[node[receiver]] += flow.nbytes * share
            protocol[node[sender]] += SENDER_BYTES_PER_MESSAGE * flow.messages * share
            protocol[node[receiver]] += RECEIVER_BYTES_PER_MESSAGE * flow.messages * share
    return Traffic(tuple(sent), tuple(leaving), tuple(entering), tuple(inside), tuple(protocol))
