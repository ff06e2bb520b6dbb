"""Sums of flat buffers over all ranks, as stages of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fleet_train.collectives.engines.stages import Collective, Stage, Stages
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.process_groups import new_group
from fleet_train.collectives.methods.host_casts import Cast, cast_for
from fleet_train.plan.hierarchy import leaders_of, local_groups


class Allreduce(Protocol):
    """Sums of flat eager tensors over all ranks, in place where the backend allows."""

    def sum(self, buffers: Sequence[Any], more: bool = False) -> Stages[list[Any]]:
        """The sums over all ranks of ``buffers`` ([elements] each, any dtype that the backend sums), in that order.

        ``more``: the caller has further collectives after these.
        """


class FlatAllreduce:
    """One allreduce per buffer over a group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def sum(self, buffers: Sequence[Any], more: bool = False) -> Stages[list[Any]]:
        yield Stage(tuple(Collective("all_reduce", self.group, buffer) for buffer in buffers), more)
        return list(buffers)


class CastAllreduce:
    """Another dtype on the wire. The backend computes the sum in that dtype, too."""

    def __init__(self, inner: Allreduce, wire_dtype: str, cast: Cast) -> None:
        self.inner = inner
        self._wire_dtype = wire_dtype
        self._cast = cast

    def sum(self, buffers: Sequence[Any], more: bool = False) -> Stages[list[Any]]:
        sums = yield from self.inner.sum([self._cast(buffer, self._wire_dtype) for buffer in buffers], more)
        return [
            self._cast(total, str(buffer.dtype).rpartition(".")[2], buffer)
            for total, buffer in zip(sums, buffers, strict=True)
        ]


class HierarchicalAllreduce:
    """Reduce to the leader of this rank's local group, allreduce between the leaders, broadcast inside the local group.

    Between local groups, only leaders send. Source: Fleet 1.8's ``use_hierarchical_allreduce``.
    """

    def __init__(self, local_group: Any, leader: int, is_leader: bool, between: Allreduce | None) -> None:
        self._local_group = local_group
        self._leader = leader
        self._is_leader = is_leader
        self._between = between

    def sum(self, buffers: Sequence[Any], more: bool = False) -> Stages[list[Any]]:
        yield self._inside("reduce", buffers, more=True)
        if self._is_leader and self._between is not None:
            buffers = yield from self._between.sum(buffers, more=True)
        else:
            yield Stage(more=True)
        yield self._inside("broadcast", buffers, more)
        return list(buffers)

    def without_cast(self) -> HierarchicalAllreduce:
        """The same groups, with the buffer's own dtype between the leaders as well."""
        between = self._between.inner if isinstance(self._between, CastAllreduce) else self._between
        return self.with_between(between)

    def with_between(self, between: Allreduce | None) -> HierarchicalAllreduce:
        """The same local groups, with another allreduce between the leaders."""
        return HierarchicalAllreduce(self._local_group, self._leader, self._is_leader, between)

    def _inside(self, kind: str, buffers: Sequence[Any], more: bool) -> Stage:
        if self._local_group is None:
            return Stage(more=more)
        return Stage(tuple(Collective(kind, self._local_group, buffer, self._leader) for buffer in buffers), more)

    @property
    def leaders_group(self) -> Any:
        """The leaders' group; None if there is only one local group."""
        plain = self.without_cast()._between
        return plain.group if isinstance(plain, FlatAllreduce) else None


def without_cast(allreduce: Allreduce) -> Allreduce:
    """For parameters: compression of gradients between leaders must not round them."""
    return allreduce.without_cast() if isinstance(allreduce, HierarchicalAllreduce) else allreduce


def make_allreduces(job: Job, number: int, hierarchical_ranks: int, between_dtype: str = "float32") -> list[Allreduce]:
    """One allreduce per communicator; called by all ranks in the same order.

    ``hierarchical_ranks``: ranks per local group, 0 = flat. ``between_dtype``: the dtype between local groups.
    """
    if not hierarchical_ranks:
        return [FlatAllreduce(group) for group in job.communicators(number)]
    return [_hierarchical(job, local_groups(job.world_size, hierarchical_ranks), between_dtype) for _ in range(number)]


def _hierarchical(job: Job, members: Sequence[Sequence[int]], between_dtype: str) -> Allreduce:
    mine = next(local_group for local_group in members if job.cluster.rank in local_group)
    groups = {local_group[0]: new_group(job, local_group) if len(local_group) > 1 else None for local_group in members}
    leaders = leaders_of(members)
    between: Allreduce | None = FlatAllreduce(new_group(job, leaders)) if len(leaders) > 1 else None
    if between is not None and between_dtype != "float32":
        between = CastAllreduce(between, between_dtype, cast_for(job.engine.reads_values))
    return HierarchicalAllreduce(groups[mine[0]], mine[0], job.cluster.rank == mine[0], between)
