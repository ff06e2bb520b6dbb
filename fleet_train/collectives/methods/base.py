"""The interface of methods that average one bucket's gradients, and the dense one; the others are in sibling
modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle
from paddle import _C_ops

from fleet_train.collectives.engines.stages import HAND_OVER, Stages
from fleet_train.collectives.methods.allreduce import Allreduce
from fleet_train.plan import Bucket


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
        """From local gradients (eager tensors, the bucket's shapes and dtype) to their averages, in the same order.

        Before its ``HAND_OVER`` it runs while the backward pass waits for it; after that it must no longer read
        ``gradients``. Every rank gets the same bits.
        """


class DenseMethod:
    """Copies the gradients into one buffer, averages it, and splits it again."""

    kind = "dense"
    own_state: tuple[str, ...] = ()

    def __init__(self, bucket: Bucket, allreduce: Allreduce, world_size: int, cut: Cut | None = None) -> None:
        self._bucket = bucket
        self._allreduce = allreduce
        self._scale = 1.0 / world_size
        self._cut = cut or unflatten

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        flat = flatten(gradients)
        yield HAND_OVER
        (total,) = yield from self._allreduce.sum([flat])
        return self._cut(total.scale_(self._scale), [g.shape for g in self._bucket.gradients])

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        del state


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
        return [buffer.reshape(list(shapes[0]))]
    sizes = [math.prod(shape) for shape in shapes]
    return [part.reshape(list(shape)) for part, shape in zip(paddle.split(buffer, sizes), shapes, strict=True)]
