"""Exchanges and their sequence of collectives: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet_train.plan.backend_bytes import Edge, Flow, flows
from fleet_train.plan.hierarchy import leaders_of, local_groups
from fleet_train.plan.quantised import QuantisedLayout, QuantisedSettings


@dataclass(frozen=True)
class CollectiveSpec:
    """One exchange over all ranks, the bytes of one rank's buffer and of one item.

    ``kind``: ``allreduce``, ``allgather``, or ``quantised``, a sum of float32 that is sent as described by
    ``quantised``.
    """

    kind: str
    nbytes: int
    item_bytes: int
    between_item_bytes: int = 0
    """Bytes of an item between the leaders of a hierarchical allreduce; 0 = item_bytes."""
    flat: bool = False
    """Over all ranks at once, even if the plan has local groups."""
    quantised: QuantisedSettings | None = None


@dataclass(frozen=True)
class CollectivePhase:
    """Collectives of one kind that run at the same time, one in each of ``groups`` (root first)."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: int
    item_bytes: int

    def flows(self) -> dict[Edge, Flow]:
        """Every edge that this phase uses; a rank is in only one group, so edges are distinct."""
        return {
            edge: flow
            for group in self.groups
            for edge, flow in flows(self.kind, group, self.nbytes, self.item_bytes).items()
        }


def phases_of(world_size: int, team_size: int, payload: CollectiveSpec) -> list[CollectivePhase]:
    """The phases of an exchange: itself, or with local groups (0 = none) the three phases of a hierarchical
    allreduce."""

    def phase(kind: str, groups: Sequence[Sequence[int]], item_bytes: int = payload.item_bytes) -> CollectivePhase:
        nbytes = payload.nbytes // payload.item_bytes * item_bytes
        return CollectivePhase(kind, tuple(tuple(group) for group in groups), nbytes, item_bytes)

    if not team_size or payload.flat or payload.kind == "allgather":
        everybody = range(world_size)
        return _quantised(payload, everybody) if payload.quantised else [phase(payload.kind, [everybody])]
    members = local_groups(world_size, team_size)
    leaders = leaders_of(members)
    between = [phase("allreduce", [leaders], payload.between_item_bytes or payload.item_bytes)]
    if payload.quantised:
        between = _quantised(payload, leaders)
    return [phase("reduce", members), *between, phase("broadcast", members)]


def _quantised(payload: CollectiveSpec, ranks: Sequence[int]) -> list[CollectivePhase]:
    """An all-to-all of the parts, if there are parts, and an all-gather."""
    assert payload.quantised is not None
    layout = QuantisedLayout(payload.nbytes // payload.item_bytes, len(ranks), payload.quantised)
    kinds = ("alltoall", "allgather") if layout.parts > 1 else ("allgather",)
    return [CollectivePhase(kind, (tuple(ranks),), layout.part_bytes, 1) for kind in kinds]


def sent_by_rank(phases: Iterable[CollectivePhase], world_size: int) -> tuple[float, ...]:
    """Payload bytes that each rank sends in these phases, to any rank."""
    sent = [0.0] * world_size
    for phase in phases:
        for (sender, _), flow in phase.flows().items():
            sent[sender] += flow.nbytes
    return tuple(sent)
