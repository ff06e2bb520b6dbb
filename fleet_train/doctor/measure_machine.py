"""This machine: memory, processors and limits, what control groups leave of them, NVIDIA GPUs, the software."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import fleet_train
from fleet_train import timeouts
from fleet_train.cluster import installed
from fleet_train.cluster.at_import import usable_processors
from fleet_train.cluster.installed import (
    CGROUPS,
    OWN_CGROUPS,
    control_groups,
    core_limits,
    installed_paddle,
    memory_limit,
    processor,
    text_of,
)
from fleet_train.doctor.facts import UNLIMITED, Gpu, Gpus, Limits, Memory, Processors, Software
from fleet_train.doctor.measure_apart import run_apart
from fleet_train.errors import FleetTrainError

_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def memory() -> Memory:
    """This machine's memory, from /proc and the control groups: without psutil."""
    system = installed.memory()
    total, available = system.get("total_bytes", 0), system.get("available_bytes", 0)
    limit, left, kills = memory_quota()
    if limit != UNLIMITED and limit < total:
        available = min(available, left)
    else:
        limit = UNLIMITED
    shm_total, shm_free = space_of(_SHM)
    return Memory(total, available, limit, kills, shm_total, shm_free)


def space_of(folder: Path) -> tuple[int, int]:
    """The space of a folder's file system: (size, free bytes); zeros if there is none."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0, 0
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


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
    """This machine's processors, with the speed of one of them."""
    gflops, share = 0.0, 1.0
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):  # a finding says that it is not known
        gflops, share = run_apart(timeouts.DOCTOR_SPEED_PROCESS_SECONDS, "speed")
    return Processors(processor(), usable_processors(), processor_quota(), gflops, share)


def memory_quota(mounted: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> tuple[int, int, int]:
    """The quota of memory: (limit, bytes left below it, processes ended by the OOM killer); (UNLIMITED, UNLIMITED, n)
    without a limit."""
    limit, left, kills = UNLIMITED, UNLIMITED, 0
    for index, folder in enumerate(control_groups("memory", mounted, groups)):
        most = memory_limit(folder)
        if index == 0:
            kills = _field(folder, "oom_kill", "memory.events", "memory.oom_control")
        if most is None:
            continue
        used = _whole((text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")).strip())
        # The page cache in it is reclaimed on demand.
        cached = _field(folder, "inactive_file", "memory.stat") or _field(folder, "total_inactive_file", "memory.stat")
        free = max(0, most - used + cached)
        limit = most if limit == UNLIMITED else min(limit, most)
        left = free if left == UNLIMITED else min(left, free)
    return limit, left, kills


def processor_quota(mounted: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> float:
    """Number of processors; UNLIMITED without a quota."""
    return min(core_limits(mounted, groups), default=float(UNLIMITED))


def _field(folder: Path, field: str, *names: str) -> int:
    for name in names:
        for line in text_of(folder / name).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == field and words[1].isdigit():
                return int(words[1])
    return 0


# Never run on a GPU so far: the formats are those of nvidia-smi's manual.
_FIELDS = "index,name,driver_version,ecc.errors.uncorrected.volatile.total,memory.used"
_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_LINKS = ("nvidia-smi", "nvlink", "--status")


def gpus(devices: Path = Path("/dev")) -> Gpus | None:
    """This machine's NVIDIA GPUs; None if it has none."""
    if not any(devices.glob("nvidia[0-9]*")):
        return None
    table, error = _ask(_QUERY)
    links, _ = _ask(_LINKS)
    return Gpus(parse_table(table, parse_links(links)), nccl_version(), error)


def _ask(command: Iterable[str]) -> tuple[str, str]:
    """Ask nvidia-smi: (its output, why there is none)."""
    try:
        done = subprocess.run(
            [*command], capture_output=True, text=True, timeout=timeouts.DOCTOR_NVIDIA_SMI_SECONDS, check=False
        )
    except FileNotFoundError:
        return "", "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError):
        return "", f"nvidia-smi did not answer within {timeouts.DOCTOR_NVIDIA_SMI_SECONDS:g} s"
    if done.returncode:
        return "", f"nvidia-smi: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
    return done.stdout, ""


def parse_table(table: str, links_down: dict[int, int]) -> tuple[Gpu, ...]:
    """Read the table of ``--query-gpu``; what a GPU lacks is ``[N/A]`` or ``[Not Supported]`` there, and 0 here."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(table))]
    gpus = []
    for row in rows:
        if len(row) == 5 and row[0].isdigit():
            index = int(row[0])
            gpus.append(Gpu(index, row[1], row[2], _whole(row[3]), _whole(row[4]) << 20, links_down.get(index, 0)))
    return tuple(gpus)


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


def parse_links(status: str) -> dict[int, int]:
    """GPU -> inactive links of ``nvlink --status``, for those that also have active ones."""
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    index = -1
    for line in status.splitlines():
        head = re.match(r"GPU (\d+):", line)
        if head:
            index = int(head[1])
        elif re.match(r"\s+Link \d+:", line):
            counts = down if "inactive" in line.lower() else up
            counts[index] = counts.get(index, 0) + 1
    return {gpu: number for gpu, number in down.items() if up.get(gpu)}


def nccl_version() -> str:
    """The version of the NCCL package that Paddle's GPU build installs with it; empty: unknown."""
    names = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11")
    return next(filter(None, map(installed.version_of, names)), "")


_DIGITS = 16


def software(strategy: str | None, script: str | None) -> Software:
    distribution, paddle = installed_paddle()
    errors: list[str] = []
    profile = _profile(strategy, errors) if strategy else ""
    return Software(
        python=platform.python_version(),
        paddle=f"{paddle} ({distribution})" if distribution else "",
        fleet_train=fleet_train.__version__,
        numpy=metadata.version("numpy"),
        package_digest=package_digest(Path(fleet_train.__file__).parent),
        profile=profile,
        script=_script(Path(script), errors) if script else "",
        errors=tuple(errors),
    )


def package_digest(package: Path) -> str:
    """A digest of every Python file of the package, with its name."""
    return digest_of((str(path.relative_to(package)), path) for path in sorted(package.rglob("*.py")))


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


def _profile(strategy: str, errors: list[str]) -> str:
    from fleet_train.profile import load_profile

    try:
        return load_profile(strategy).digest()[:_DIGITS]
    except FleetTrainError as error:
        errors.append(f"--strategy: {str(error).splitlines()[0][:200]}")
        return ""


def _script(script: Path, errors: list[str]) -> str:
    try:
        return digest_of([("", script)])
    except OSError as error:
        errors.append(f"--script {script.name}: {error.strerror or 'cannot be read'}")
        return ""
