"""The facade's calls that all ranks make together, in the same order: barriers, reductions, values of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_train.convert.calls.util import meet, reduce, values_of_all
from fleet_train.convert.program import consistency
from fleet_train.convert.session import current
from fleet_train.convert.settings.keywords import needed, one_of


def barrier_worker(timeout_seconds: float | None = None) -> None:
    """Wait for all ranks, at most ``timeout_seconds`` (default: the join timeout).

    Raises WorkerFailed naming the ranks that did not arrive, died or left.
    """
    meet("fleet.barrier_worker()", timeout_seconds)


def all_reduce(array: Any = None, op: str | None = None, *, input: Any = None, mode: str | None = None) -> Any:
    """Reduce a numpy array over all ranks; every rank gets the result, same shape and dtype.

    ``op`` (Fleet's ``mode``): ``sum`` (the default), ``max``, ``min`` or ``mean``. dtypes: float32, float64, int32,
    int64. All ranks call it in the same order. Raises ConversionError when the ranks pass different shapes, dtypes or
    operations.
    """
    values = np.asarray(needed("all_reduce", input=input, array=array))
    operation = one_of("all_reduce", mode=mode, op=op) or "sum"
    return reduce("fleet.all_reduce()", values, operation)


def all_reduce_worker(input: Any, output: Any) -> None:
    """The sum of ``input`` over all ranks, written into ``output`` (Fleet 1.8)."""
    output[:] = reduce("fleet.all_reduce_worker()", np.asarray(input), "sum")


def agree(name: str, value: Any) -> None:
    """Stop every rank with ScheduleMismatch unless all pass the same JSON value: ``agree("steps", len(loader))``.

    For values that all ranks must share and fleet_train cannot see. All ranks call it in the same order.
    """
    with current().job.inside(f"fleet.agree({name!r})"):
        consistency.agree(current().job, name, value)


def gather(value: Any) -> list[Any]:
    """The JSON value of every rank, by rank, on every rank. For small values, not for tensors: it goes through the
    store.

    All ranks call it in the same order. Raises WorkerFailed naming the ranks that did not arrive, died or left.
    """
    return values_of_all("fleet.gather()", value)
