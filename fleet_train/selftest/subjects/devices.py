"""Check 1: the device of each rank, the backend, and the versions."""

from __future__ import annotations

import csv
import io
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

import fleet_train
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.paddle_compat.paddle_check import backend_name, installed_version
from fleet_train.selftest.options import Options
from fleet_train.selftest.results import FAIL, OK, SKIP, Result


def check(job: Job, options: Options) -> Iterator[Result]:
    del options
    began = time.perf_counter()
    versions = _versions()
    yield Result("devices", "backend", OK, _backend_words(job, versions), time.perf_counter() - began, versions)
    if backend_name() == "gloo":
        yield Result("devices", "devices", SKIP, "the ranks compute on CPUs")
        return
    found = job.all_gather("selftest devices", _device(job.place.get_device_id()))
    yield judge_devices(job, found, time.perf_counter() - began)


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
    return {
        "name": str(properties.name),
        "memory_bytes": int(properties.total_memory),
        "capability": f"{properties.major}.{properties.minor}",
        "uuid": str(getattr(properties, "uuid", "") or uuid_of(index, os.environ, _ask_nvidia_smi())),
    }


def _ask_nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


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


def judge_devices(job: Job, found: Mapping[int, Mapping[str, Any]], seconds: float) -> Result:
    """Distinct UUIDs per node; a rank whose UUID is unknown is named."""
    holders: dict[tuple[int, str], int] = {}
    for rank, device in found.items():
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
    names = sorted({str(device["name"]) for device in found.values()})
    figures = {"names": names, "memory_bytes": sorted({device["memory_bytes"] for device in found.values()})}
    return Result("devices", "devices", OK, f"{len(found)} distinct: {', '.join(names)}", seconds, figures)
