"""Check 1: the device of each rank, the backend, the versions; every kind of collective that fleet_train uses, and
every dtype, against exact integers."""

from __future__ import annotations

import csv
import io
import os
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import paddle

import fleet_train
from fleet_train import timeouts
from fleet_train.cluster.network import output_of
from fleet_train.collectives.engine import CallContext, Collective, Stage, Stages
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import backend_name, dynamic_mode, installed_version
from fleet_train.selftest.options import FAIL, OK, SKIP, Result, SelftestOptions
from fleet_train.selftest.training import BATCH_NORM, SmallProgram

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

Array = np.ndarray[Any, Any]


def check_collectives(job: Job, _: SelftestOptions) -> Iterator[Result]:
    if job.world_size == 1:
        yield Result("collectives", "collectives", SKIP, "one rank has no peer to communicate with")
        return
    for name in KINDS:
        yield check_kind(job, name)


def check_kind(job: Job, name: str) -> Result:
    """One kind with all dtypes; the last rank is the root, so that an ignored root is detected."""
    began = time.perf_counter()
    unsupported = UNSUPPORTED.get((backend_name(), name), ())
    dtypes = [dtype for dtype in DTYPES if dtype not in unsupported]
    wrong = [fault for dtype in dtypes if (fault := _try(job, name, dtype))]
    everybody = job.all_gather(f"selftest {name}", wrong)
    described = [f"{job.cluster.describe(rank)}: {fault}" for rank, faults in everybody.items() for fault in faults]
    seconds = time.perf_counter() - began
    figures = {"dtypes": dtypes, "unsupported": list(unsupported), "wrong": described}
    if described:
        more = f" (and {len(described) - 1} more)" if len(described) > 1 else ""
        words = f"{described[0]}{more}; do not train on this cluster"
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
    inputs = [values_of(other, world_size) for other in range(world_size)]
    root = world_size - 1
    if kind == "all_reduce":
        return {"sum": np.sum, "max": np.max, "min": np.min}[op](inputs, axis=0)  # type: ignore[no-any-return, operator]
    if kind == "broadcast":
        return inputs[root]
    if kind == "all_gather":
        return np.concatenate(inputs)
    if kind == "scatter":
        return inputs[(rank + 1) % world_size]
    if rank != root:
        return None
    return np.asarray(np.sum(inputs, axis=0)) if kind == "reduce" else np.concatenate(inputs)


def _try(job: Job, name: str, dtype: str) -> str:
    """Run one collective through the job's engine; returns the error in its result, or nothing."""
    context = CallContext(f"selftest {name} {dtype}", f"{name} of {dtype}", timeouts.SELFTEST_COLLECTIVE_SECONDS)
    group = job.communicators(1)[0]
    tensors = job.engine.start(_stages(job, group, name, dtype), context).result()
    expected = expected_of(name, job.cluster.rank, job.world_size)
    if expected is None:
        return ""
    with dynamic_mode():
        actual = np.concatenate([tensor.cast("float64").numpy().reshape(-1) for tensor in tensors])
    return difference(dtype, actual, expected)


def difference(dtype: str, actual: Array, expected: Array) -> str:
    """The error in a rank's values, or nothing."""
    if actual.shape != expected.shape:
        return f"{dtype}: {actual.size} values instead of {expected.size}"
    differing = np.flatnonzero(actual != expected)
    if not differing.size:
        return ""
    first = int(differing[0])
    return (
        f"{dtype}: {differing.size} of {expected.size} values are wrong, the first at {first}: "
        f"{actual[first]:g} instead of {expected[first]:g}"
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


def check_place(job: Job, _: SelftestOptions) -> Iterator[Result]:
    """A program of an executor on ``fleet.place()`` keeps its values on this rank's device."""
    began = time.perf_counter()
    program = SmallProgram(BATCH_NORM, lambda *_: None)
    places = sorted({str(value._place()) for value in program.main.state_dict("all", program.scope).values()})
    everybody = job.all_gather("selftest place", [places, str(job.place)])
    yield judge_places(job, everybody, time.perf_counter() - began)


def judge_places(job: Job, everybody: Mapping[int, tuple[list[str], str]], seconds: float) -> Result:
    """``everybody``: by rank, the places of its program's values, and its device."""
    for rank, (found, device) in everybody.items():
        if found != [device]:
            words = f"{job.cluster.describe(rank)}'s device is {device}, a program's values are on {', '.join(found)}"
            return Result("devices", "place", FAIL, words, seconds)
    return Result("devices", "place", OK, "a program's values are on each rank's device", seconds)


def check_devices(job: Job, _: SelftestOptions) -> Iterator[Result]:
    began = time.perf_counter()
    versions = _versions()
    yield Result("devices", "backend", OK, _backend_words(job, versions), time.perf_counter() - began, versions)
    if backend_name() == "gloo":
        yield Result("devices", "devices", SKIP, "the ranks compute on CPUs")
        return
    devices = job.all_gather("selftest devices", _device(job.place.get_device_id()))
    yield judge_devices(job, devices, time.perf_counter() - began)


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {
        "backend": backend_name(),
        "paddle": installed_version(),
        "fleet_train": fleet_train.__version__,
        "python": platform.python_version(),
    }
    if paddle.is_compiled_with_cuda():
        versions |= {
            "cuda": paddle.version.cuda(),
            "cudnn": paddle.version.cudnn(),
            "nccl": paddle.version.nccl(),
        }
    return versions


def _backend_words(job: Job, versions: Mapping[str, Any]) -> str:
    nodes, ranks = job.cluster.node_num, job.world_size
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "backend")
    return f"{versions['backend']}, {ranks} rank(s) on {nodes} node(s); {named}"


def _device(index: int) -> dict[str, Any]:
    properties = paddle.device.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", "")
    if not uuid:
        command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
        uuid = uuid_of(index, os.environ, output_of(command, timeouts.TOOL_SECONDS))
    return {
        "name": str(properties.name),
        "memory_bytes": int(properties.total_memory),
        "capability": f"{properties.major}.{properties.minor}",
        "uuid": str(uuid),
    }


def uuid_of(visible_index: int, environ: Mapping[str, str], table: str) -> str:
    """The UUID of a GPU that this process sees under a number; empty if it is unknown.

    ``table``: lines ``index, uuid`` of nvidia-smi, which numbers all GPUs of the machine.
    """
    uuids = {row[0].strip(): row[1].strip() for row in csv.reader(io.StringIO(table)) if len(row) == 2}
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all")
    names = list(uuids) if visible in ("all", "") else [part.strip() for part in visible.split(",")]
    if visible_index >= len(names):
        return ""
    name = names[visible_index]
    if name in uuids:
        return uuids[name]
    return next((uuid for uuid in uuids.values() if name and uuid.startswith(name)), "")


def judge_devices(job: Job, devices: Mapping[int, Mapping[str, Any]], seconds: float) -> Result:
    """Distinct UUIDs per node; a rank whose UUID is unknown is named."""
    holders: dict[tuple[int, str], int] = {}
    for rank, device in devices.items():
        where = (job.cluster.ranks[rank].node_index, str(device["uuid"]))
        if not device["uuid"]:
            words = f"the UUID of {job.cluster.describe(rank)}'s GPU is unknown (is nvidia-smi installed there?)"
            return Result("devices", "devices", FAIL, words, seconds)
        if where in holders:
            words = (
                f"{job.cluster.describe(holders[where])} and {job.cluster.describe(rank)} compute on one GPU; "
                "give each its own (--selected_gpus, CUDA_VISIBLE_DEVICES)"
            )
            return Result("devices", "devices", FAIL, words, seconds)
        holders[where] = rank
    names = sorted({str(device["name"]) for device in devices.values()})
    figures = {"names": names, "memory_bytes": sorted({device["memory_bytes"] for device in devices.values()})}
    return Result("devices", "devices", OK, f"{len(devices)} distinct: {', '.join(names)}", seconds, figures)
