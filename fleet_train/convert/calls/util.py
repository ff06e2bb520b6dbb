"""``fleet.util``: small helpers of Fleet 2.x that communicate between ranks or split work."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_train.collectives.job.job import Array
from fleet_train.convert.session import current
from fleet_train.errors import ConversionError

_COLLECTIONS = ("worker", "all")
_OPERATIONS = ("sum", "max", "min", "mean")


class UtilBase:
    """All ranks call ``all_reduce``, ``barrier`` and ``all_gather``, in the same order.

    ``comm_world``: ``worker`` and ``all`` are the same here; ``server`` is refused, there are none.
    """

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Array:
        """``sum``, ``min``, ``max`` or ``mean`` of an array over all ranks, on every rank, same shape and dtype."""
        _refuse_servers("all_reduce", comm_world)
        return reduce("fleet.util.all_reduce()", np.asarray(input), mode)

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait for all ranks."""
        _refuse_servers("barrier", comm_world)
        meet("fleet.util.barrier()")

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[Any]:
        """The number, or other JSON value, of every rank, by rank."""
        _refuse_servers("all_gather", comm_world)
        value = input.item() if isinstance(input, (np.generic, np.ndarray)) else input
        return values_of_all("fleet.util.all_gather()", value)

    def get_file_shard(self, files: list[str]) -> list[str]:
        """This rank's part of a list: contiguous; the first ranks get one more item if it does not divide evenly."""
        if not isinstance(files, list):
            raise ConversionError(f"get_file_shard was given a {type(files).__name__}; it takes a list of file names")
        cluster = current().job.cluster
        size, odd = divmod(len(files), cluster.world_size)
        first = cluster.rank * size + min(cluster.rank, odd)
        return files[first : first + size + (cluster.rank < odd)]

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print on one rank."""
        if current().job.cluster.rank == rank_id:
            print(message, flush=True)


def meet(call: str, timeout_seconds: float | None = None) -> None:
    """Wait for all ranks. Here and below, ``call`` is the call that errors name."""
    job = current().job
    with job.inside(call):
        job.barrier(f"barrier {job.count('barrier')}", timeout_seconds)


def values_of_all(call: str, value: Any) -> list[Any]:
    """The JSON value of every rank, by rank."""
    job = current().job
    with job.inside(call):
        values = job.all_gather(f"gather {job.count('gather')}", value)
    return [values[rank] for rank in range(job.world_size)]


def reduce(call: str, values: Array, op: str) -> Array:
    """``values`` reduced over all ranks; ``mean`` for floating point only."""
    job = current().job
    if op not in _OPERATIONS:
        raise ConversionError(f"all_reduce: op={op!r} is unknown; it takes {', '.join(_OPERATIONS)}")
    if op == "mean" and values.dtype.kind != "f":
        raise ConversionError(
            f"all_reduce: the mean of {values.dtype} is no {values.dtype}; give a floating point array"
        )
    with job.inside(call):
        total = job.reduce(values, "sum" if op == "mean" else op)
    return (total / job.world_size).astype(values.dtype) if op == "mean" else total


def _refuse_servers(name: str, comm_world: str) -> None:
    if comm_world not in _COLLECTIONS:
        raise ConversionError(
            f"fleet.util.{name}: comm_world={comm_world!r}: parameter servers are not supported; leave it out"
        )
