"""The communication of synchronised batch norm: immediate, on its own process group.

The arithmetic of an exchange, such as Chan's formula, runs in its host operator: an eager call on small tensors
costs half as much as a program operator with its constants' operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.engine import CallContext, Collective, Stage, Stages
from fleet_train.collectives.groups import all_gathered, group_inside_program
from fleet_train.collectives.host_ops import emit_barrier, emit_link, token
from fleet_train.collectives.job import Job
from fleet_train.profile.methods.base import ITEM_BYTES, CollectiveSpec

# An allreduce on a ring takes twice as many messages one after the other as an allgather, and sums here are a few
# kilobytes: on two ranks over loopback 340 us, not 150. With more ranks the allgather's bytes outweigh that.
_MOST_RANKS_THAT_GATHER = 4


@dataclass(frozen=True)
class LocalNorm:
    """A layer on this rank: its ``values``, whose shape gives the count, and their mean and variance [channels]."""

    values: Any
    mean: Any
    variance: Any
    unread: tuple[Any, ...] = ()
    """Further operands of the exchange, which it does not read: the layer's other inputs, for a program that is
    written without the exchange."""


@dataclass(frozen=True)
class Statistics:
    """A layer on all ranks: number of values per channel [1], their mean and variance [channels]."""

    count: Any
    mean: Any
    variance: Any


class RankStatistics:
    """Emits the exchanges of one program. All ranks call ``connect`` at the same point before the program runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: Any = None
        self.exchanges: list[CollectiveSpec] = []
        """The exchanges of one forward and backward pass, in order: for the plan."""
        self._moment = f"statistics of program {job.count('statistics')}"

    def connect(self) -> None:
        """Form the group. Not done while emitting: planning without a cluster emits as well."""
        self._group = group_inside_program(self._job)

    def start(self) -> Any:
        """A token after a barrier of all ranks: Gloo would wait for a busy rank for only 30 s and not name it."""
        return emit_barrier(self._job, self._moment, token(), in_steps=True)

    def combine(self, what: str, local: Sequence[LocalNorm], chain: Any) -> tuple[list[Statistics], Any]:
        """The statistics of all ranks' values, for each of the layers that share the exchange; and the next token."""
        layers = len(local)

        def run(*tensors: Any) -> Stages[list[Any]]:
            values, rest = tensors[:layers], tensors[layers : 3 * layers]
            rows = yield from all_gathered(self._job, self._group, packed(values, rest[:layers], rest[layers:]))
            return combined(rows, [mean.shape[0] for mean in rest[:layers]])

        means = [each.mean for each in local]
        self._count("allgather", [1 + 2 * int(mean.shape[0]) for mean in means], means[0].dtype)
        shapes = [(shape, mean.dtype) for mean in means for shape in ([1], mean.shape, mean.shape)]
        inputs = [*(each.values for each in local), *means, *(each.variance for each in local)]
        inputs += [value for each in local for value in each.unread]
        link, *results = self._emit("gather", what, shapes, run, chain, inputs)
        return [Statistics(*results[first : first + 3]) for first in range(0, len(results), 3)], link

    def average(
        self,
        what: str,
        sums: Sequence[tuple[Any, Any]],
        counts: Sequence[Any],
        chain: Any,
        unread: Sequence[Any] = (),
    ) -> tuple[list[tuple[Any, Any]], Any]:
        """Each pair of ``sums`` ([channels]) summed over the ranks and divided by its layer's count; the next token.
        ``unread``: as of ``LocalNorm``."""

        def run(*tensors: Any) -> Stages[list[Any]]:
            parts = tensors[: 2 * len(sums)]
            total = yield from self._summed(paddle.concat(list(parts)))
            split = paddle.split(total, [part.shape[0] for part in parts])
            return [part / tensors[len(parts) + i // 2] for i, part in enumerate(split)]

        parts = [part for pair in sums for part in pair]
        kind = "allgather" if self._gathers_sums else "allreduce"
        self._count(kind, [int(part.shape[0]) for part in parts], parts[0].dtype)
        shapes = [(part.shape, part.dtype) for part in parts]
        link, *means = self._emit("total", what, shapes, run, chain, [*parts, *counts, *unread])
        return list(zip(means[::2], means[1::2], strict=True)), link

    @property
    def _gathers_sums(self) -> bool:
        return self._job.world_size <= _MOST_RANKS_THAT_GATHER

    def _summed(self, row: Any) -> Stages[Any]:
        """The sum of ``row`` [n] over the ranks: the same bits on each. May overwrite ``row``."""
        if self._gathers_sums:
            return (yield from all_gathered(self._job, self._group, row)).sum(0)
        yield Stage((Collective("all_reduce", self._group, row),))
        return row

    def _count(self, kind: str, elements: Sequence[int], dtype: Any) -> None:
        item_bytes = ITEM_BYTES["float64" if dtype == paddle.float64 else "float32"]
        self.exchanges.append(CollectiveSpec(kind, sum(elements) * item_bytes, item_bytes, flat=True))

    def _emit(
        self, name: str, what: str, outputs: Sequence[Any], run: Callable[..., Stages[Any]], chain: Any, inputs: Any
    ) -> Any:
        def carry_out(*tensors: Any) -> Any:
            return self._job.engine.run_here(
                run(*tensors), CallContext(self._moment, what, self._job.step_timeout_seconds)
            )

        return emit_link(name, carry_out, chain, inputs, outputs)


def packed(values: Sequence[Any], means: Sequence[Any], variances: Sequence[Any]) -> Any:
    """One row of a rank: for each layer the number of values per channel, the means and the variances."""
    parts = []
    for each, mean, variance in zip(values, means, variances, strict=True):
        count = math.prod(each.shape) // mean.shape[0]
        own = (mean, variance) if count else (paddle.zeros_like(mean), paddle.zeros_like(variance))  # they are NaN
        parts += [paddle.full([1], count, mean.dtype), *own]
    return paddle.concat(parts)


def combined(rows: Any, channels: Sequence[int]) -> list[Any]:
    """Count, mean and variance of all values, layer after layer, from the ranks' ``packed`` rows [ranks, n].

    Chan, Golub and LeVeque's formula: unlike mean(x * x) - mean * mean, it does not cancel.
    """
    results = []
    parts = paddle.split(rows, [size for each in channels for size in (1, each, each)], axis=1)
    for counts, means, variances in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        total = counts.sum(0)
        shares = counts / total
        mean = (shares * means).sum(0)
        results += [total, mean, (shares * (variances + (means - mean).square())).sum(0)]
    return results
