"""Values of a program that are taken over the batches of all ranks, inside the program: means over ranks.

A count is known as soon as the batch is fed. Its exchange is started there and waited for where it is read, hidden
behind the forward pass. A value that depends on parameters is exchanged where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.collectives.engine import CallContext, Collective, Stage, Stages
from fleet_train.collectives.groups import new_group
from fleet_train.collectives.host_ops import emit_link, token
from fleet_train.collectives.job import Job
from fleet_train.profile.methods.base import ITEM_BYTES, CollectiveSpec

_OWN_THREAD = -1
"""Communicators of gradients are numbered from 0. Which of their buckets are under way when a value is exchanged is
not the same on every rank."""


class JointValues:
    """Emits the exchanges of one program. All ranks call ``connect`` at the same point before the program runs.

    In a run that does not train (a copy of the program for an evaluation, which one rank may run alone), a rank keeps
    its own values.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: Any = None
        self._running: dict[str, Any] = {}
        self._moment = f"values of program {job.count('joint values')}"
        self.exchanges: list[CollectiveSpec] = []
        """The exchanges of one pass, in order: for the plan."""
        self.chain: Any = None
        """The token of the last exchange."""

    def connect(self) -> None:
        """Form the group. Not done while emitting: planning without a cluster emits as well."""
        job = self._job
        alone = job.engine.side_by_side
        self._group = new_group(job, list(range(job.world_size))) if alone else job.communicators(1)[0]

    def start_means(self, what: str, values: Sequence[Any]) -> None:
        """Insert the operator that starts the exchange of ``values``, named ``what``, once they are computed."""

        def start(*tensors: Any) -> None:
            if self._job.trains:
                self._running[what] = self._start(what, self._means(tensors))
            else:
                self._running[what] = _Own(tensors)

        self._count(values)
        (self.chain,) = emit_link("counts", start, self._token(), values)

    def means(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Insert the operator that waits for the exchange ``what``; returns the means over ranks of its ``values``."""
        shapes = [(value.shape, value.dtype) for value in values]
        self.chain, *results = emit_link(
            "joint", lambda *_: self._running.pop(what).result(), self._token(), values, shapes
        )
        return results

    def _token(self) -> Any:
        return token() if self.chain is None else self.chain

    def _start(self, what: str, stages: Stages[Any]) -> Any:
        job = self._job
        name = f"{self._moment} {job.count(self._moment)}"
        barrier = job.engine.run_in_background(lambda: job.step_barrier(name, job.timeout_seconds))
        return job.engine.start(stages, CallContext(name, what, job.timeout_seconds), _OWN_THREAD, barrier)

    def _means(self, tensors: Sequence[Any]) -> Stages[list[Any]]:
        """Of ranks with equal values, a rank's own bits."""
        own = paddle.concat([tensor.reshape([-1]).cast("float64") for tensor in tensors])
        rows = paddle.empty([self._job.world_size * own.shape[0]], own.dtype)
        yield Stage((Collective("all_gather", self._group, own, output=rows),))
        rows = rows.reshape([self._job.world_size, -1])
        means = paddle.where((rows == own).all(0), own, rows.mean(0))
        parts = paddle.split(means, [tensor.size for tensor in tensors])
        return [part.reshape(tensor.shape).cast(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def _count(self, values: Sequence[Any]) -> None:
        item_bytes = ITEM_BYTES["float64"]
        elements = sum(math.prod(value.shape) for value in values)
        self.exchanges.append(CollectiveSpec("allgather", elements * item_bytes, item_bytes, flat=True))


class _Own:
    """The values of a rank alone."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._copies = [tensor.clone() for tensor in tensors]

    def result(self) -> list[Any]:
        return self._copies
