"""Exchanges, their sequence of collectives, and the bytes that those send on Gloo, edge by edge: pure arithmetic.

Source of the bytes: Gloo's allreduce.cc, reduce.cc, broadcast.cc, allgather.cc in the version of Paddle 3.3.1, and a
count of the bytes that each socket sent, for 2, 3 and 4 ranks with separate interfaces. Payload and message counts
equal the measured ones, without retransmissions (docs/planning.md has the table). NCCL's rings send the same for an
allreduce; its reduce and broadcast are chains, with other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.profile.methods.quantised import QuantisedLayout


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


def phases_of(world_size: int, group_size: int, payload: CollectiveSpec) -> list[CollectivePhase]:
    """The phases of an exchange: itself, in one or several groups, or with local groups (0 = none) the three phases of
    a hierarchical allreduce."""

    def phase(kind: str, groups: Sequence[Sequence[int]], item_bytes: int = payload.item_bytes) -> CollectivePhase:
        nbytes = payload.nbytes // payload.item_bytes * item_bytes
        return CollectivePhase(kind, tuple(tuple(group) for group in groups), nbytes, item_bytes)

    if payload.owners:
        groups = local_groups(world_size, payload.owners)
        return [phase(payload.kind, [*zip(*groups, strict=True)] if payload.copies else groups)]
    if not group_size or payload.flat or payload.kind == "allgather":
        ranks = range(world_size)
        return _quantised(payload, ranks) if payload.quantised else [phase(payload.kind, [ranks])]
    members = local_groups(world_size, group_size)
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


def local_groups(world_size: int, ranks_per_group: int) -> list[list[int]]:
    """Neighbouring ranks in local groups of ``ranks_per_group``; the last local group gets the rest."""
    return [
        list(range(first, min(first + ranks_per_group, world_size))) for first in range(0, world_size, ranks_per_group)
    ]


def leaders_of(members: Sequence[Sequence[int]]) -> list[int]:
    """The first rank of each local group."""
    return [local_group[0] for local_group in members]


SEGMENT_BYTES = 2**20
"""Gloo's largest piece of a chunk."""
SENDER_BYTES_PER_MESSAGE = 96
"""Gloo's notification and header, 48 bytes each, from the sender."""
RECEIVER_BYTES_PER_MESSAGE = 48
"""Gloo's "ready" of the receiver, against the direction of the payload."""


@dataclass(frozen=True)
class Flow:
    """What one rank sends to another in a collective: payload bytes, and the number of messages."""

    nbytes: float
    messages: float

    def plus(self, other: Flow, times: float = 1.0) -> Flow:
        return Flow(self.nbytes + times * other.nbytes, self.messages + times * other.messages)


Edge = tuple[int, int]
"""Sending and receiving rank."""


def flows(kind: str, ranks: Sequence[int], nbytes: int, item_bytes: int = 4) -> dict[Edge, Flow]:
    """Every edge of one collective over ``ranks``; the root, if there is one, is the first.

    ``kind``: allreduce, reduce, broadcast, allgather, alltoall. ``nbytes``: the buffer of one rank (allgather: its
    contribution; alltoall: what it sends to each other rank).
    """
    if len(ranks) < 2 or nbytes == 0:
        return {}
    by_position = _FLOWS[kind](len(ranks), nbytes, item_bytes)
    return {(ranks[sender], ranks[receiver]): flow for (sender, receiver), flow in by_position.items()}


def rounds(kind: str, size: int) -> int:
    """The number of sequential messages in a collective of ``size`` ranks, each of which costs the latency."""
    if size < 2:
        return 0
    depth = (size - 1).bit_length()
    at_once = 4  # of the pairs of a rank
    return {
        "allreduce": 2 * (size - 1),
        "reduce": size,
        "broadcast": depth,
        "allgather": size - 1,
        "alltoall": -(-(size - 1) // at_once),
    }[kind]


@dataclass(frozen=True)
class RingChunks:
    """How the ring splits a buffer: a chunk per rank, of at least two segments, the last ones shorter or empty."""

    size: int
    nbytes: int
    segment_bytes: int
    segments_per_rank: int

    @classmethod
    def even(cls, size: int, nbytes: int, item_bytes: int) -> RingChunks:
        """How the allreduce splits: as few segments as the maximum size allows, all of one length."""
        number = _round_up(max(_divide_up(nbytes, SEGMENT_BYTES), 2 * size), size)
        return cls(size, nbytes, _round_up(_divide_up(nbytes, number), item_bytes), number // size)

    @classmethod
    def uneven(cls, size: int, nbytes: int, item_bytes: int) -> RingChunks:
        """How the reduce splits: segments of the maximum size, so that the last chunk can be much shorter."""
        largest = SEGMENT_BYTES // item_bytes * item_bytes
        segment = _round_up(min(_divide_up(nbytes, 2 * size), largest), item_bytes)
        number = _round_up(max(_divide_up(nbytes, segment), 2 * size), size)
        return cls(size, nbytes, segment, number // size)

    def chunk(self, position: int) -> Flow:
        """The chunk of a position, segment by segment."""
        whole = self.segment_bytes * self.segments_per_rank
        length = max(0, min(whole, self.nbytes - position % self.size * whole))
        return Flow(length, _divide_up(length, self.segment_bytes))

    def segment(self, index: int) -> Flow:
        length = self.nbytes - index % (self.size * self.segments_per_rank) * self.segment_bytes
        length = max(0, min(self.segment_bytes, length))
        return Flow(length, 1 if length else 0)


@lru_cache(maxsize=4096)
def _allreduce(size: int, nbytes: int, item_bytes: int) -> dict[Edge, Flow]:
    """Reduce-scatter, then allgather, to the left neighbour: all chunks twice, except two. About 2 (N - 1) / N each."""
    chunks = RingChunks.even(size, nbytes, item_bytes)
    parts = [chunks.chunk(position) for position in range(size)]
    everything = Flow(0, 0)
    for part in parts:
        everything = everything.plus(part, 2)
    return {
        (position, (position - 1) % size): everything.plus(parts[position], -1).plus(parts[position - 1], -1)
        for position in range(size)
    }


@lru_cache(maxsize=4096)
def _reduce(size: int, nbytes: int, item_bytes: int) -> dict[Edge, Flow]:
    """Reduce-scatter around the ring, then every rank's chunk directly to the root: 1 each, the root (N - 1) / N.

    More from 2 N MB on: the ring omits its last two segments, not its last chunk, so most of the last chunk is sent
    needlessly (16 MB on 2 ranks: 1.375 and 0.875 instead of 1 and 0.5).
    """
    chunks = RingChunks.uneven(size, nbytes, item_bytes)
    result: dict[Edge, Flow] = {}
    for position in range(size):
        sent = Flow(0, 0)
        for index in range(size * chunks.segments_per_rank - 2):
            sent = sent.plus(chunks.segment((position + 1) * chunks.segments_per_rank + index))
        _add(result, position, (position - 1) % size, sent)
        own = chunks.chunk(position)
        if position and own.nbytes:
            _add(result, position, 0, Flow(own.nbytes, 1))
    return result


@lru_cache(maxsize=4096)
def _broadcast(size: int, nbytes: int, item_bytes: int) -> dict[Edge, Flow]:
    """A binomial tree of whole messages: the root sends to log2(N) ranks, which forward it."""
    del item_bytes
    edges = (
        (sender, sender | 1 << bit)
        for bit in range((size - 1).bit_length())
        for sender in range(1 << bit)
        if sender | 1 << bit < size
    )
    return dict.fromkeys(edges, Flow(nbytes, 1))


@lru_cache(maxsize=4096)
def _allgather(size: int, nbytes: int, item_bytes: int) -> dict[Edge, Flow]:
    """A ring to the right neighbour, each contribution in two segments."""
    del item_bytes
    flow = Flow((size - 1) * nbytes, 2 * (size - 1))
    return {(position, (position + 1) % size): flow for position in range(size)}


@lru_cache(maxsize=4096)
def _alltoall(size: int, nbytes: int, item_bytes: int) -> dict[Edge, Flow]:
    """A broadcast for each direction of each pair, since Paddle's Gloo has no other way between two of several
    ranks."""
    del item_bytes
    edges = ((sender, receiver) for sender in range(size) for receiver in range(size) if sender != receiver)
    return dict.fromkeys(edges, Flow(nbytes, 1))


_FLOWS = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
}


def _add(result: dict[Edge, Flow], sender: int, receiver: int, flow: Flow) -> None:
    if flow.nbytes:
        result[sender, receiver] = result.get((sender, receiver), Flow(0, 0)).plus(flow)


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _round_up(number: int, multiple: int) -> int:
    return _divide_up(number, multiple) * multiple
