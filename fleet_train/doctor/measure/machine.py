"""Memory, processors and limits of this machine."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from fleet_train.cluster.advice import usable_processors
from fleet_train.doctor.facts import UNLIMITED, Limits, Memory, Processors
from fleet_train.doctor.measure import quota
from fleet_train.launch.spec.hardware import processor

_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_SPEED_SECONDS = 8.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def memory() -> Memory:
    """Without psutil: from /proc and the control groups."""
    system = meminfo()
    total, available = system.get("MemTotal", 0), system.get("MemAvailable", 0)
    limit, left, kills = quota.memory()
    if limit != UNLIMITED and limit < total:
        available = min(available, left)
    else:
        limit = UNLIMITED
    shm_total, shm_free = space_of(_SHM)
    return Memory(total, available, limit, kills, shm_total, shm_free)


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Bytes by name; empty if the system does not report them."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs if len(words) == 3}


def space_of(folder: Path) -> tuple[int, int]:
    """(size, free bytes) of the file system; zeros if there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def limits() -> Limits:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        has_infiniband = any(_INFINIBAND.iterdir())
    except OSError:
        has_infiniband = False
    return Limits(_or_unlimited(files), _or_unlimited(locked), has_infiniband)


def _or_unlimited(number: int) -> int:
    return UNLIMITED if number == resource.RLIM_INFINITY else number


def processors() -> Processors:
    """With the speed of one of them, measured by a separate process: numpy reads the number of threads at import."""
    gflops, share = 0.0, 1.0
    command = [sys.executable, "-m", "fleet_train.doctor.measure.speed"]
    environ = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        asked = subprocess.run(command, env=environ, capture_output=True, timeout=_SPEED_SECONDS, check=True)
        gflops, share = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        pass  # the finding says that it could not be measured
    return Processors(processor(), usable_processors(), quota.processors(), gflops, share)
