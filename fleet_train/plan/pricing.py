"""Traffic and predictions of a plan, as readable text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.plan.phases import (
    RECEIVER_BYTES_PER_MESSAGE,
    SENDER_BYTES_PER_MESSAGE,
    phases_of,
    sent_by_rank,
)
from fleet_train.plan.plan import MEGABYTE, CommPlan
from fleet_train.plan.price import Compute, Network, Prediction, predict

_WORTH_TELLING = 0.98


@dataclass(frozen=True)
class Conditions:
    """The basis of a price. ``assumed``: the values that were not given, for the reader."""

    network: Network
    compute: Compute
    batch_size: int = 0
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pricing:
    """All predictions for one plan; the ``warm_up`` fields are None without LocalSGD's warm-up."""

    plan: CommPlan
    conditions: Conditions
    traffic: Traffic
    prediction: Prediction
    warm_up_traffic: Traffic | None
    warm_up: Prediction | None
    in_next_step: Prediction | None
    """With ``overlap_next_step``, where it is not on and would hide communication; else None."""

    @property
    def steps_between_synchronisations(self) -> int:
        return self.plan.averaging.period if self.plan.averaging else 1

    def to_json(self) -> dict[str, Any]:
        """The pricing as JSON: bytes, seconds and bytes per second; everything is predicted."""
        return {
            "steps_between_synchronisations": self.steps_between_synchronisations,
            "conditions": asdict(self.conditions),
            "traffic_per_step": self.traffic.to_json(),
            "prediction": asdict(self.prediction),
            "warm_up_traffic_per_step": self.warm_up_traffic.to_json() if self.warm_up_traffic else None,
            "warm_up_prediction": asdict(self.warm_up) if self.warm_up else None,
            "overlap_next_step_prediction": asdict(self.in_next_step) if self.in_next_step else None,
        }


def price(plan: CommPlan, cluster: Cluster, conditions: Conditions) -> Pricing:
    """Price ``plan`` on ``cluster``."""
    network, compute, batch = conditions.network, conditions.compute, conditions.batch_size
    warms_up = plan.averaging is not None and plan.averaging.warm_steps > 0
    prediction = predict(plan, cluster, network, compute, batch)
    may_overlap = plan.averaging is None and not (plan.waits_for_each or plan.overlaps_next_step)
    later = predict(replace(plan, overlaps_next_step=True), cluster, network, compute, batch) if may_overlap else None
    return Pricing(
        plan,
        conditions,
        traffic(plan, cluster),
        prediction,
        traffic(plan, cluster, warm_up=True) if warms_up else None,
        predict(plan, cluster, network, compute, batch, warm_up=True) if warms_up else None,
        later if later is not None and later.step < _WORTH_TELLING * prediction.step else None,
    )


def describe(pricing: Pricing) -> str:
    """Traffic and prediction, as text."""
    averaging = pricing.plan.averaging
    period = pricing.steps_between_synchronisations
    mean = f", mean of a period of {period}" if averaging else ""
    lines = [
        f"steps between synchronisations: {period}"
        + (
            f" ({averaging.schedule}; {averaging.warm_steps} warm-up steps synchronise every step)" if averaging else ""
        ),
        "",
        *_traffic_lines(f"predicted traffic per step{mean}", pricing.traffic),
    ]
    if pricing.warm_up_traffic:
        lines += _traffic_lines("predicted traffic per warm-up step", pricing.warm_up_traffic)
    lines += ["", *_conditions_lines(pricing.conditions)]
    lines.append(_prediction_line(f"predicted step{mean}", pricing.prediction))
    if pricing.warm_up:
        lines.append(_prediction_line("predicted warm-up step", pricing.warm_up))
    if pricing.in_next_step:
        lines.append(_prediction_line("with overlap_next_step: true", pricing.in_next_step))
    return "\n".join(lines)


def _traffic_lines(title: str, figures: Traffic) -> list[str]:
    low, high = (f"{nbytes / MEGABYTE:.3f} MB" for nbytes in (min(figures.sent), figures.most_sent))
    return [
        f"{title} (payload; Gloo's and TCP's headers come on top):",
        f"  sent by a rank: {high}" + (f" (the least: {low})" if low != high else ""),
        f"  between nodes: {figures.most_leaving / MEGABYTE:.3f} MB leave a node, and "
        f"{max(figures.protocol):.0f} bytes of Gloo's headers",
        *([f"  inside a node: {max(figures.inside) / MEGABYTE:.3f} MB"] if max(figures.inside) else []),
    ]


def _conditions_lines(conditions: Conditions) -> list[str]:
    links = {"between nodes": conditions.network.between, "inside a node": conditions.network.inside}
    lines = [
        f"{where}: {link.latency_seconds * 1e6:g} us, {link.bytes_per_second * 8 / 1e6:g} Mb/s"
        for where, link in links.items()
    ]
    total = conditions.compute.total
    lines.append(f"computing: {total * 1e3:g} ms" if total else "computing: not given (--compute_ms, of one process)")
    assumed = f" (assumed, not given: {', '.join(conditions.assumed)})" if conditions.assumed else ""
    return ["; ".join(lines) + assumed]


def _prediction_line(title: str, prediction: Prediction) -> str:
    if not prediction.compute:
        return f"{title}: {prediction.communication * 1e3:.3f} ms of communication"
    rate = f"; {prediction.samples_per_second:.0f} samples/s" if prediction.samples_per_second else ""
    return (
        f"{title}: {prediction.step * 1e3:.3f} ms = {prediction.compute * 1e3:.3f} computing + "
        f"{prediction.exposed * 1e3:.3f} exposed of {prediction.communication * 1e3:.3f} communication{rate}"
    )


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

    def to_json(self) -> dict[str, Any]:
        return {name: list(values) for name, values in asdict(self).items()}


def traffic(plan: CommPlan, cluster: Cluster, warm_up: bool = False) -> Traffic:
    """The mean update of training; with ``warm_up``, an update of LocalSGD's warm-up, in which gradients are sent.

    LocalSGD: the bytes of an averaging over the updates of a period (for doubling and adaptive schedules: of
    ``local_sgd_steps``, the period that doubling ends with and adapting starts with).
    """
    share = 1 / plan.averaging.period if plan.averaging is not None and not warm_up else 1.0
    node = [rank.node_index for rank in cluster.ranks]
    sent = [0.0] * cluster.world_size
    leaving, entering, inside, protocol = ([0.0] * cluster.node_num for _ in range(4))
    for phase in plan.phases(warm_up):
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


def averaging_bytes(plan: CommPlan) -> list[tuple[float, ...]]:
    """Payload bytes that each rank sends in the averaging of each fragment; empty without LocalSGD."""
    if plan.averaging is None:
        return []
    return [
        sent_by_rank(
            [
                phase
                for sent in plan.averaging.collectives_of(part)
                for phase in phases_of(plan.world_size, plan.group_size, sent)
            ],
            plan.world_size,
        )
        for part in range(len(plan.averaging.parts))
    ]
