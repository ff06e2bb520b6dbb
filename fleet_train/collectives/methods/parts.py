"""How the members of a quantised sum exchange bytes: an all-to-all over one group, or over pairs where the backend has
none (Gloo)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Protocol

import paddle

from fleet_train.collectives.engines.stages import Collective, Stage, Stages
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.process_groups import new_group
from fleet_train.collectives.paddle_compat.paddle_check import backend_name


class Links(Protocol):
    """The members of a sum, this rank among them. Tensors are flat uint8, of one size on all members."""

    members: int
    position: int

    def gather(self, wire: Any, more: bool = False) -> Stages[list[Any]]:
        """Every member's ``wire``, in the order of members, on every member."""

    def exchange(self, wires: Sequence[Any]) -> Stages[list[Any]]:
        """Send ``wires[i]`` to member i; returns what the members sent to this one, in their order."""


class GroupLinks:
    """One group whose backend offers an all-to-all (NCCL)."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int) -> None:
        self.members = len(ranks)
        self.position = list(ranks).index(rank) if rank in ranks else -1
        self._group = group

    def gather(self, wire: Any, more: bool = False) -> Stages[list[Any]]:
        gathered = paddle.empty([self.members * wire.shape[0]], "uint8")
        yield Stage((Collective("all_gather", self._group, wire, output=gathered),), more)
        return list(paddle.split(gathered, self.members))

    def exchange(self, wires: Sequence[Any]) -> Stages[list[Any]]:
        sent = paddle.concat(list(wires))
        received = paddle.empty(sent.shape, "uint8")
        yield Stage((Collective("all_to_all", self._group, sent, output=received),), more=True)
        parts = paddle.split(received, self.members)
        return [part for index, part in enumerate(parts) if index != self.position]


class PairLinks(GroupLinks):
    """One extra group per pair: two members exchange by an all-gather in it.

    Paddle's Gloo has no all-to-all, and it numbers messages between two of several ranks wrongly.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, pairs: dict[int, Any]) -> None:
        """``pairs``: by the other member's position."""
        super().__init__(group, ranks, rank)
        self._pairs = pairs

    def exchange(self, wires: Sequence[Any]) -> Stages[list[Any]]:
        received: dict[int, Any] = {}
        for partners in rounds(self.members):
            other = partners.get(self.position)
            if other is None:
                yield Stage(more=True)
                continue
            wire = wires[other]
            both = paddle.empty([2 * wire.shape[0]], "uint8")
            yield Stage((Collective("all_gather", self._pairs[other], wire, output=both),), more=True)
            received[other] = paddle.split(both, 2)[int(other > self.position)]
        return [received[other] for other in sorted(received)]


def rounds(members: int) -> list[dict[int, int]]:
    """Rounds of a round-robin tournament: each member has at most one partner per round, and all pairs occur."""
    size = members + members % 2
    table = []
    for turn in range(size - 1):
        seats = [size - 1, *((turn + i) % (size - 1) for i in range(size - 1))]
        pairs = [(seats[i], seats[size - 1 - i]) for i in range(size // 2)]
        there = [pair for pair in pairs if max(pair) < members]
        table.append(dict(there) | {second: first for first, second in there})
    return table


def make_links(job: Job, group: Any, ranks: Sequence[int]) -> Links:
    """How ``ranks`` exchange parts over ``group`` and, on Gloo, over pair groups created here.

    All ranks of the job call it in the same order, including those outside ``ranks``, which must not use the result.
    """
    rank, has_all_to_all = job.cluster.rank, backend_name() != "gloo"
    pairs = {}
    if len(ranks) > 2 and not has_all_to_all:
        pairs = {pair: new_group(job, pair) for pair in combinations(ranks, 2)}
    if has_all_to_all:
        return GroupLinks(group, ranks, rank)
    own = {pair[1 - pair.index(rank)]: made for pair, made in pairs.items() if rank in pair}
    return PairLinks(group, ranks, rank, {ranks.index(other): made for other, made in own.items()})
