"""How a flat buffer is averaged over all ranks. Each reducer runs on one communicator's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import paddle

from fleet_train.collectives.groups import new_group
from fleet_train.collectives.job import Job
from fleet_train.plan.hierarchy import leaders_of, teams


class Reducer(Protocol):
    """Sums and means of flat eager tensors over all ranks, in place where the backend allows."""

    def sum(self, buffer: Any) -> Any:
        """The sum over all ranks of ``buffer`` ([elements], float32 or bfloat16), same shape and dtype."""


class FlatReducer:
    """One allreduce over a group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, buffer: Any) -> Any:
        paddle.distributed.all_reduce(buffer, group=self._group)
        return buffer


class CastReducer:
    """Another dtype on the wire. The sum itself is taken in that dtype, as the backend does it."""

    def __init__(self, inner: Reducer, wire_dtype: str) -> None:
        self.inner = inner
        self._wire_dtype = wire_dtype

    def sum(self, buffer: Any) -> Any:
        return self.inner.sum(buffer.cast(self._wire_dtype)).cast(buffer.dtype)


class HierarchicalReducer:
    """Reduce to the leader of this rank's team, allreduce between the leaders, broadcast inside the team.

    Between teams only the leaders' bytes travel. Source: Fleet 1.8's ``use_hierarchical_allreduce``.
    """

    def __init__(self, team: Any, leader: int, is_leader: bool, between: Reducer | None) -> None:
        self._team = team
        self._leader = leader
        self._is_leader = is_leader
        self._between = between

    def sum(self, buffer: Any) -> Any:
        if self._team is not None:
            paddle.distributed.reduce(buffer, dst=self._leader, group=self._team)
        if self._is_leader and self._between is not None:
            buffer = self._between.sum(buffer)
        if self._team is not None:
            paddle.distributed.broadcast(buffer, src=self._leader, group=self._team)
        return buffer

    def without_cast(self) -> HierarchicalReducer:
        """The same groups, with the buffer's own dtype between the leaders, too."""
        between = self._between.inner if isinstance(self._between, CastReducer) else self._between
        return HierarchicalReducer(self._team, self._leader, self._is_leader, between)


def without_cast(reducer: Reducer) -> Reducer:
    """For parameters: what compresses gradients between leaders must not round them."""
    return reducer.without_cast() if isinstance(reducer, HierarchicalReducer) else reducer


def make_reducers(job: Job, number: int, hierarchical_ranks: int, between_dtype: str = "float32") -> list[Reducer]:
    """One reducer per communicator; called by all ranks in the same order.

    ``hierarchical_ranks``: ranks per team, 0 = flat. ``between_dtype``: the dtype between teams.
    """
    if not hierarchical_ranks:
        return [FlatReducer(group) for group in job.communicators(number)]
    return [_hierarchical(job, teams(job.world_size, hierarchical_ranks), between_dtype) for _ in range(number)]


def _hierarchical(job: Job, members: Sequence[Sequence[int]], between_dtype: str) -> Reducer:
    mine = next(team for team in members if job.cluster.rank in team)
    groups = {team[0]: new_group(job, team) if len(team) > 1 else None for team in members}
    leaders = leaders_of(members)
    between: Reducer | None = FlatReducer(new_group(job, leaders)) if len(leaders) > 1 else None
    if between is not None and between_dtype != "float32":
        between = CastReducer(between, between_dtype)
    return HierarchicalReducer(groups[mine[0]], mine[0], job.cluster.rank == mine[0], between)
