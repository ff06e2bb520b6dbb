"""Buckets that operators of the program itself sum: ``collective_stream: graph``.

A bucket's gradients are concatenated, summed by ``_C_ops.all_reduce_`` on one stream of its own, and split again where
they are needed: the executor orders the streams by events (source: Paddle 3.3.1, ``auto_parallel/sharding.py`` does the
same; ``instruction_util.cc``). It keeps operators that have a ``ring_id`` in the program's order, on every rank. Python
runs at two places of a step: the gate before the first sum, where ranks wait for one another and a missing one is
named, and its end, from which on the watchdog counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.groups import ring_of
from fleet_train.collectives.host_ops import emit_link
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import flatten, unflatten
from fleet_train.collectives.paddle_compat import scaled
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, CommPlan

STREAM = "fleet_train"
"""One ring for each execution stream: a stream's context keeps the first communicator that it gets."""
MEAN_MARK = "fleet_train_mean"
"""An attribute of the operator that makes a bucket's mean."""
_ON_GLOO = ("float32", "float64")


class GraphSums:
    """The launches and waits of one program's buckets."""

    def __init__(self, exchange: GradientExchange, job: Job, plan: CommPlan) -> None:
        self._exchange = exchange
        self._plan = plan
        self._scales_first = job.engine.averages
        for bucket in plan.buckets if job.engine.side_by_side else ():
            dtype = bucket.gradients[0].dtype
            if dtype not in _ON_GLOO:
                raise ConversionError(
                    f"collective_stream: graph: the gradient of '{bucket.gradients[0].name}' is {dtype}, which Gloo's "
                    "operator does not sum; leave collective_stream out"
                )
        self._ring = ring_of(job)
        self._means: dict[int, Any] = {}
        self._are_finite: list[Any] = []

    def launch(self, bucket: Bucket, gradients: Sequence[Any], chain: Any, boundary: Any = None) -> tuple[Any, Any]:
        """Append the operators that sum a bucket; returns the next token and the value of the last operator."""
        del boundary  # every run is an update
        flat = flatten(gradients)
        if bucket.index == 0:
            name = f"gate_{self._exchange.number}_0"
            chain, flat = emit_link(name, self._gate, chain, [flat], [(flat.shape, flat.dtype)])
        if self._exchange.finite.is_asked_for:
            self._are_finite.append(paddle.isfinite(flat).all())
        divide_by, stream = 1.0 / self._plan.world_size, STREAM if not self._plan.waits_for_each else ""
        if self._scales_first:
            mean = emit_sum(scaled(flat, divide_by), self._ring, stream)
        else:
            mean = scaled(emit_sum(flat, self._ring, stream), divide_by)
        mean.get_defining_op().set_bool_attr(MEAN_MARK, True)
        self._means[bucket.index] = mean
        return chain, mean

    def wait(self, bucket: Bucket, dtypes: Sequence[Any], chain: Any) -> tuple[Any, list[Any]]:
        """Append what splits a bucket's mean; returns the next token and the averaged gradients."""
        del dtypes
        mean = self._means.pop(bucket.index)
        averages = unflatten(mean, [gradient.shape for gradient in bucket.gradients])
        if bucket.index == len(self._plan.buckets) - 1:
            found, self._are_finite = self._are_finite, []
            passed = lambda _, *flags: self._exchange.end_in_graph(flags)  # noqa: E731
            chain = emit_link("passed", passed, chain, [mean, *found])[0]
        return chain, averages

    def _gate(self, flat: Any) -> list[Any]:
        self._exchange.begin_in_graph(flat)
        return [flat.view(flat.shape)]  # the executor empties its own tensor objects after their last use


def emit_sum(flat: Any, ring: int, stream: str) -> Any:
    """Append the operator that sums ``flat`` ([elements]) over all ranks, in place; ``stream``: "" for the calculation
    stream."""
    operators: Any = _C_ops
    total = operators.all_reduce_(flat, ring, paddle.distributed.ReduceOp.SUM)
    if stream:
        total.get_defining_op().set_execution_stream(stream)
    return total
