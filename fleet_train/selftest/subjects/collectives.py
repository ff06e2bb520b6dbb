"""Check 1: every kind of collective that fleet_train uses, and every dtype, against exact integers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.engines.stages import Collective, Stage, Stages
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.paddle_compat.modes import dynamic_mode
from fleet_train.collectives.paddle_compat.paddle_check import backend_name
from fleet_train.selftest.options import Options
from fleet_train.selftest.results import FAIL, OK, SKIP, Result

ELEMENTS = 1031
"""Per rank: odd, so that no backend's vector width or chunk fits."""
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
KINDS = {
    "all_reduce sum": ("all_reduce", "sum"),
    "all_reduce max": ("all_reduce", "max"),
    "all_reduce min": ("all_reduce", "min"),
    "reduce": ("reduce", "sum"),
    "broadcast": ("broadcast", "sum"),
    "all_gather": ("all_gather", "sum"),
    "gather": ("gather", "sum"),
    "scatter": ("scatter", "sum"),
}
UNSUPPORTED: dict[tuple[str, str], tuple[str, ...]] = {
    ("gloo", "all_reduce sum"): ("float16",),
    ("gloo", "reduce"): ("float16",),
}
"""(backend, kind) -> dtypes that the backend adds wrongly: Gloo's float16 sums are inf on Paddle 3.3.1. fleet_train
sends none of these through it."""
_TIMEOUT_SECONDS = 30.0

Array = np.ndarray[Any, Any]


def check(job: Job, options: Options) -> Iterator[Result]:
    del options
    if job.world_size == 1:
        yield Result("collectives", "collectives", SKIP, "one rank has no peer to communicate with")
        return
    for name in KINDS:
        yield _check_kind(job, name)


def _check_kind(job: Job, name: str) -> Result:
    """One kind with all dtypes; the last rank is the root, so that an ignored root is detected."""
    began = time.perf_counter()
    unsupported = UNSUPPORTED.get((backend_name(), name), ())
    dtypes = [dtype for dtype in DTYPES if dtype not in unsupported]
    wrong = [fault for dtype in dtypes if (fault := _try(job, name, dtype))]
    everybody = job.all_gather(f"selftest {name}", wrong)
    told = [f"{job.cluster.describe(rank)}: {fault}" for rank, faults in everybody.items() for fault in faults]
    seconds = time.perf_counter() - began
    figures = {"dtypes": dtypes, "unsupported": list(unsupported), "wrong": told}
    if told:
        words = f"{told[0]}{f' (and {len(told) - 1} more)' if len(told) > 1 else ''}; do not train on this cluster"
        return Result("collectives", name, FAIL, words, seconds, figures)
    left_out = f"; left out: {', '.join(unsupported)}, which {backend_name()} adds wrongly" if unsupported else ""
    return Result("collectives", name, OK, f"{', '.join(dtypes)}: exact{left_out}", seconds, figures)


def values_of(rank: int, world_size: int) -> Array:
    """A rank's input: integers so small that their sum over all ranks is exact in every dtype."""
    largest = max(2, min(7, 255 // world_size + 1))
    return (np.arange(ELEMENTS) + rank) % largest


def expected_of(name: str, rank: int, world_size: int) -> Array | None:
    """The rank's expected result; None if it gets none."""
    kind, op = KINDS[name]
    brought = [values_of(other, world_size) for other in range(world_size)]
    root = world_size - 1
    if kind == "all_reduce":
        return {"sum": np.sum, "max": np.max, "min": np.min}[op](brought, axis=0)  # type: ignore[no-any-return, operator]
    if kind == "broadcast":
        return brought[root]
    if kind == "all_gather":
        return np.concatenate(brought)
    if kind == "scatter":
        return brought[(rank + 1) % world_size]
    if rank != root:
        return None
    return np.asarray(np.sum(brought, axis=0)) if kind == "reduce" else np.concatenate(brought)


def _try(job: Job, name: str, dtype: str) -> str:
    """Run one collective through the job's engine; returns the error in its result, or nothing."""
    place = Place(f"selftest {name} {dtype}", f"{name} of {dtype}", _TIMEOUT_SECONDS)
    group = job.communicators(1)[0]
    found = job.engine.start(_stages(job, group, name, dtype), place).result()
    expected = expected_of(name, job.cluster.rank, job.world_size)
    if expected is None:
        return ""
    with dynamic_mode():
        held = np.concatenate([tensor.cast("float64").numpy().reshape(-1) for tensor in found])
    return difference(dtype, held, expected)


def difference(dtype: str, held: Array, expected: Array) -> str:
    """The error in a rank's values, or nothing."""
    if held.shape != expected.shape:
        return f"{dtype}: {held.size} values instead of {expected.size}"
    differing = np.flatnonzero(held != expected)
    if not differing.size:
        return ""
    first = int(differing[0])
    return (
        f"{dtype}: {differing.size} of {expected.size} values are wrong, the first at {first}: "
        f"{held[first]:g} instead of {expected[first]:g}"
    )


def _stages(job: Job, group: Any, name: str, dtype: str) -> Stages[list[Any]]:
    kind, op = KINDS[name]
    rank, world, root = job.cluster.rank, job.world_size, job.world_size - 1
    tensor = _tensor(values_of(rank, world), dtype, job.place)
    if kind in ("all_reduce", "reduce", "broadcast"):
        yield Stage((Collective(kind, group, tensor, root if kind != "all_reduce" else -1, op),))
        return [tensor]
    if kind == "all_gather":
        output = paddle.empty([world * ELEMENTS], dtype).to(job.place)
        yield Stage((Collective(kind, group, tensor, output=output),))
        return [output]
    if kind == "gather":
        outputs: list[Any] = []
        yield Stage((Collective(kind, group, tensor, root, output=outputs),))
        return outputs
    parts = [_tensor(values_of((to + 1) % world, world), dtype, job.place) for to in range(world)]
    yield Stage((Collective(kind, group, tensor, root, parts=parts if rank == root else None),))
    return [tensor]


def _tensor(values: Array, dtype: str, place: Any) -> Any:
    return paddle.to_tensor(values.astype("int64"), place=place).cast(dtype)
