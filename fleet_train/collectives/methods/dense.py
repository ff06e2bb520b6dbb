"""The interface of methods that average one bucket's gradients, and the dense one; the others are in sibling
modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import _C_ops

from fleet_train.collectives.engine import HAND_OVER, Collective, Stage, Stages
from fleet_train.collectives.groups import new_group
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import Array, host_view
from fleet_train.plan import Bucket
from fleet_train.plan.phases import leaders_of, local_groups


class Remembers(Protocol):
    """Something whose state belongs to parameters."""

    @property
    def kind(self) -> str:
        """The name under which its state is saved."""

    @property
    def own_state(self) -> tuple[str, ...]:
        """Ends of the names in ``state`` that differ between ranks; everything else is equal on all of them."""

    def state(self) -> dict[str, Any]:
        """Eager tensors that must be saved for a bit-exact resume (error feedback, warm starts).

        Names are ``step`` and ``<parameter>.<what>``; every rank has the same ones.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what ``state`` gave. What is missing starts as new; what does not fit these settings is dropped."""


class BucketMethod(Remembers, Protocol):
    """Averages a bucket's gradients. ``average`` runs in dynamic mode; one bucket's calls never overlap."""

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        """Average local gradients (eager tensors, the bucket's shapes and dtype) over all ranks, in the same order.

        Before its ``HAND_OVER`` it runs while the backward pass waits for it; after that it must no longer read
        ``gradients``. Every rank gets the same bits.
        """


class Stateless:
    """A base of methods that keep nothing between steps."""

    kind = "stateless"
    own_state: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        del state


class DenseMethod(Stateless):
    """Copies the gradients into one buffer, averages it, and splits it again."""

    kind = "dense"

    def __init__(self, bucket: Bucket, allreduce: Allreduce, world_size: int, cut: Cut | None = None) -> None:
        self._bucket = bucket
        self._allreduce = allreduce
        self._world_size = world_size
        self._cut = cut or unflatten

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        flat = flatten(gradients)
        yield HAND_OVER
        (mean,) = yield from self._allreduce.sum([flat], divide_by=self._world_size)
        return self._cut(mean, [g.shape for g in self._bucket.gradients])


def flatten(tensors: Sequence[Any]) -> Any:
    """All elements in one [elements] tensor: a copy, also of a single tensor."""
    return _C_ops.concat([_C_ops.reshape(tensor, [-1]) for tensor in tensors], 0)


Cut = Callable[[Any, Sequence[Sequence[int]]], list[Any]]


def cut_for(on_host: bool) -> Cut:
    """Splits a buffer that is no longer needed into tensors: without a copy on a CPU. GPU kernels may need tensors that
    begin at an allocation."""
    return views if on_host else unflatten


def views(buffer: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Like ``unflatten``, but sharing the buffer's memory."""
    if len(shapes) == 1:
        return [_C_ops.reshape(buffer, list(shapes[0]))]
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        part = _C_ops.slice(buffer, [0], [start], [end], [1], [])
        parts.append(_C_ops.reshape(part, list(shape)))
        start = end
    return parts


def unflatten(buffer: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Split a flat tensor into tensors of these shapes."""
    if len(shapes) == 1:
        return [_C_ops.reshape(buffer, list(shapes[0]))]
    parts = _C_ops.split(buffer, [math.prod(shape) for shape in shapes], 0)
    return [_C_ops.reshape(part, list(shape)) for part, shape in zip(parts, shapes, strict=True)]


class Allreduce(Protocol):
    """Sums of flat eager tensors over all ranks, in place where the backend allows."""

    @property
    def stages(self) -> int:
        """The number of stages of a sum: what a rank yields that takes no part in it, too."""

    @property
    def averages(self) -> bool:
        """Whether a sum is divided before values are added, as an `Engine` may do."""

    def sum(self, buffers: Sequence[Any], more: bool = False, divide_by: int = 1) -> Stages[list[Any]]:
        """The sums over all ranks of ``buffers`` ([elements] each, any dtype that the backend sums), in that order.

        ``more``: the caller has further collectives after these. ``divide_by``: 1, or the number of all ranks, for
        means of floats: values are divided before the sum where the backend ``averages``, else after it.
        """


class FlatAllreduce:
    """One allreduce per buffer over a group."""

    stages = 1

    def __init__(self, group: Any, averages: bool = False) -> None:
        self.group = group
        self.averages = averages

    def sum(self, buffers: Sequence[Any], more: bool = False, divide_by: int = 1) -> Stages[list[Any]]:
        op = "avg" if self.averages and divide_by > 1 else "sum"
        yield Stage(tuple(Collective("all_reduce", self.group, buffer, op=op) for buffer in buffers), more)
        return list(buffers) if op == "avg" else divided(buffers, divide_by)


def divided(buffers: Sequence[Any], by: int) -> list[Any]:
    """Divide buffers in place by a number."""
    return [buffer if by == 1 else buffer.scale_(1.0 / by) for buffer in buffers]


class CastAllreduce:
    """An allreduce with another dtype on the wire. The backend computes the sum in that dtype, too."""

    def __init__(self, inner: Allreduce, wire_dtype: str, cast: Cast) -> None:
        self.inner = inner
        self._wire_dtype = wire_dtype
        self._cast = cast

    @property
    def stages(self) -> int:
        return self.inner.stages

    @property
    def averages(self) -> bool:
        return self.inner.averages

    def sum(self, buffers: Sequence[Any], more: bool = False, divide_by: int = 1) -> Stages[list[Any]]:
        first, then = (divide_by, 1) if self.averages else (1, divide_by)
        sent = [self._cast(buffer, self._wire_dtype) for buffer in buffers]
        sums = yield from self.inner.sum(sent, more, first)
        wide = [
            self._cast(total, str(buffer.dtype).rpartition(".")[2], buffer)
            for total, buffer in zip(sums, buffers, strict=True)
        ]
        return divided(wide, then)


class HierarchicalAllreduce:
    """An allreduce in three stages: reduce to the leader of this rank's local group, allreduce between the leaders,
    broadcast inside the local group.

    Between local groups, only leaders send. Source: Fleet 1.8's ``use_hierarchical_allreduce``.
    """

    def __init__(
        self, local_group: Any, leader: int, is_leader: bool, between: Allreduce, averages: bool = False
    ) -> None:
        self.averages = averages
        self._local_group = local_group
        self._leader = leader
        self._is_leader = is_leader
        self._between = between

    @property
    def stages(self) -> int:
        return 2 + self._between.stages

    def sum(self, buffers: Sequence[Any], more: bool = False, divide_by: int = 1) -> Stages[list[Any]]:
        if self.averages:
            buffers, divide_by = divided(buffers, divide_by), 1
        yield self._inside("reduce", buffers, more=True)
        if self._is_leader:
            buffers = yield from self._between.sum(buffers, more=True)
        else:
            for _ in range(self._between.stages):
                yield Stage(more=True)
        yield self._inside("broadcast", buffers, more)
        return divided(buffers, divide_by)

    def without_cast(self) -> HierarchicalAllreduce:
        """A copy over the same groups, with the buffer's own dtype between the leaders as well."""
        between = self._between.inner if isinstance(self._between, CastAllreduce) else self._between
        return self.with_between(between)

    def with_between(self, between: Allreduce) -> HierarchicalAllreduce:
        """A copy over the same local groups, with another allreduce between the leaders."""
        return HierarchicalAllreduce(self._local_group, self._leader, self._is_leader, between, self.averages)

    def _inside(self, kind: str, buffers: Sequence[Any], more: bool) -> Stage:
        if self._local_group is None:
            return Stage(more=more)
        return Stage(tuple(Collective(kind, self._local_group, buffer, self._leader) for buffer in buffers), more)

    @property
    def leaders_group(self) -> Any:
        """The leaders' group; None if they do not meet in one."""
        plain = self.without_cast()._between
        return plain.group if isinstance(plain, FlatAllreduce) else None


def without_cast(allreduce: Allreduce) -> Allreduce:
    """An allreduce for parameters: compression of gradients between leaders must not round them."""
    return allreduce.without_cast() if isinstance(allreduce, HierarchicalAllreduce) else allreduce


def make_allreduces(job: Job, number: int, group_size: int, between_dtype: str = "float32") -> list[Allreduce]:
    """One allreduce per communicator; called by all ranks in the same order.

    ``group_size``: ranks per local group, 0 = flat. ``between_dtype``: the dtype between local groups.
    """
    if not group_size:
        return [FlatAllreduce(group, job.engine.averages) for group in job.communicators(number)]
    return [_hierarchical(job, local_groups(job.world_size, group_size), between_dtype) for _ in range(number)]


def _hierarchical(job: Job, members: Sequence[Sequence[int]], between_dtype: str) -> Allreduce:
    mine = next(local_group for local_group in members if job.cluster.rank in local_group)
    groups = {local_group[0]: new_group(job, local_group) if len(local_group) > 1 else None for local_group in members}
    between: Allreduce = FlatAllreduce(new_group(job, leaders_of(members)))
    if between_dtype != "float32":
        between = CastAllreduce(between, between_dtype, cast_for(job.engine.reads_values))
    return HierarchicalAllreduce(groups[mine[0]], mine[0], job.cluster.rank == mine[0], between, job.engine.averages)


_PIECE = 1 << 16
"""Elements rounded at a time: they and their temporaries stay in the processor's cache."""
_NAN = np.uint16(0x7FFF)
"""The bits of Paddle's result for every NaN."""


class Cast(Protocol):
    """Casts tensors to another dtype."""

    def __call__(self, tensor: Any, dtype: str, into: Any = None) -> Any:
        """``tensor`` in ``dtype`` (by name). ``into``: a tensor of that dtype and shape that is no longer needed and
        whose memory may be used."""


def cast_for(on_host: bool) -> Cast:
    """The cast for the place of tensors. ``on_host``: they are in the host's memory, and the host may read them."""
    return cast_on_host if on_host else _cast


def _cast(tensor: Any, dtype: str, into: Any = None) -> Any:
    del into
    return tensor.cast(dtype)


def cast_on_host(tensor: Any, dtype: str, into: Any = None) -> Any:
    """Cast ``tensor`` [...], of any dtype, on the CPU, as `Cast` says. Between float32 and bfloat16: the bits of
    Paddle's ``cast``, in a fifth of its time."""
    if dtype == "bfloat16" and tensor.dtype == paddle.float32:
        narrow = paddle.empty(tensor.shape, dtype) if into is None else into
        _round(host_view(tensor.contiguous()), host_view(narrow))
        return narrow
    if dtype == "float32" and tensor.dtype == paddle.bfloat16:
        wide = paddle.empty(tensor.shape, dtype) if into is None else into
        bits = host_view(wide).view(np.uint32)
        np.left_shift(host_view(tensor.contiguous()), 16, out=bits, dtype=np.uint32)
        return wide
    return _cast(tensor, dtype)


def _round(values: Array, rounded: Array) -> None:
    """Round to the nearest bfloat16, ties to even. ``rounded``: its bits."""
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        bits = piece.view(np.uint32)
        up = bits >> 16
        up &= 1
        up += 0x7FFF
        up += bits
        up >>= 16
        target = rounded[start : start + _PIECE]
        target[:] = up
        unordered = np.isnan(piece)
        if unordered.any():
            target[unordered] = _NAN
