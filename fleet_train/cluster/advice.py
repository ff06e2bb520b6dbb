"""Variables that make ranks compute faster, which must be set before Paddle is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping, MutableMapping
from pathlib import Path

from fleet_train.cluster.cluster import is_number
from fleet_train.cluster.engines import detect
from fleet_train.cluster.started import Started
from fleet_train.errors import ClusterError


def usable_processors() -> int:
    """Processors that this process may run on: fewer than the machine has under taskset, Slurm or a cpuset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_amd_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        return "AuthenticAMD" in cpuinfo.read_text(errors="replace")
    except OSError:
        return False


def advice_for_rank(threads: int, computes_on_cpu: bool, is_amd: bool) -> dict[str, str]:
    """For a rank with this many processors of its own."""
    advice = {"OMP_NUM_THREADS": str(max(1, threads))}
    if computes_on_cpu:
        # One interpreter thread: as fast or faster on CPU. In program order: buckets then start as they become ready.
        advice |= {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
        if is_amd:
            # Intel MKL, which Paddle's wheel uses, chooses its slow path on AMD: 1.8 times slower.
            advice["MKL_DEBUG_CPU_TYPE"] = "5"
    return advice


def threads_of_rank(environ: Mapping[str, str], started: Started, usable: int, total: int) -> int:
    """The processors that Slurm or a binding assigned to this rank, else its share of the machine."""
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    if is_number(text):
        return int(text)
    return usable if usable < total else usable // (started.local_count or 1)


def advise_this_process(environ: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> None:
    """Set what ``launch`` would set, for a rank that an engine started; variables that are set stay. Call it before
    Paddle is imported."""
    if "paddle" in loaded:  # it has already read them
        return
    try:
        started = detect(environ)
    except ClusterError:  # fleet.init reports it
        return
    if started is None or started.count < 2:
        return
    threads = threads_of_rank(environ, started, usable_processors(), os.cpu_count() or 1)
    for name, value in advice_for_rank(threads, _computes_on_cpu(), is_amd_processor()).items():
        environ.setdefault(name, value)


def _computes_on_cpu() -> bool:
    from importlib import metadata  # 20 ms, for ranks of engines only

    try:
        metadata.version("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return True
    return False
