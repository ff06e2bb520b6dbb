"""All findings of an examination, in the order in which they are printed."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from fleet_train.doctor import judge_network
from fleet_train.doctor.facts import (
    FAIL,
    PASS,
    UNLIMITED,
    WARN,
    Examination,
    Finding,
    Folder,
    Gpus,
    Limits,
    Memory,
    Processors,
    Software,
    size,
)

# Findings of one machine: memory, processors, limits, folders; and which node is slower than the others.


MEMORY_FAIL, MEMORY_WARN = 512 << 20, 1 << 30
"""Bytes available per process: Paddle imported and a small network take the first."""
SHM_FAIL, SHM_WARN = 32 << 20, 256 << 20
"""Free bytes of /dev/shm per process; a container has 64 MB in total by default."""
FILES_BASE, FILES_PER_RANK, FILES_WARN = 256, 4, 1024
"""Open files: Paddle, logs and data take the first; four process groups connect each rank with every other one."""
DISK_FAIL, DISK_WARN = 100 << 20, 2 << 30
DISK_FILES_FAIL, DISK_FILES_WARN = 100, 10_000
WRITING_FAIL, WRITING_WARN = 1e6, 10e6
"""Bytes per second: a checkpoint of 100 MB would take 100 s, 10 s."""
SPEED_FAIL, SPEED_WARN = 0.5, 0.8
"""Of the median of all nodes: synchronous training runs at the speed of the slowest."""
SHARE_WARN = 0.75
"""The share of a processor that a busy thread gets. The cause may be temporary: never more than suspicious."""


def machine_findings(examined: Examination) -> Iterator[Finding]:
    world = sum(report.facts.processes for report in examined.reports.values())
    for index, report in examined.reports.items():
        host, facts = examined.host(index), report.facts
        if facts.memory is not None:
            yield memory(host, facts.memory, facts.processes)
            yield shared_memory(host, facts.memory, facts.processes)
        if facts.limits is not None:
            yield open_files(host, facts.limits, max(world, facts.processes))
            yield locked_memory(host, facts.limits)
        if facts.processors is not None:
            yield quota(host, facts.processors, facts.processes)
            yield share(host, facts.processors)
        for folder in facts.folders:
            yield disk(host, folder)
            yield sharing(examined, index, folder)
    yield from speeds(examined)


def _level(value: float, fail_below: float, warn_below: float) -> str:
    return FAIL if value < fail_below else WARN if value < warn_below else PASS


def memory(host: str, found: Memory, processes: int) -> Finding:
    each = found.available / processes
    limit = f", limit of the control group {size(found.limit)}" if found.limit != UNLIMITED else ""
    killed = f"; {found.oom_kills} processes were killed for lack of memory" if found.oom_kills else ""
    level = _level(each, MEMORY_FAIL, MEMORY_WARN)
    return Finding(
        "machine", "memory", WARN if killed and level == PASS else level, (host,),
        f"{size(found.available)} available for {_processes(processes)}{limit}{killed}",
        f"{size(MEMORY_WARN)} per process",
        "ps aux --sort=-rss | head, and end unneeded processes; in a container raise its limit: docker run --memory",
    )  # fmt: skip


def shared_memory(host: str, found: Memory, processes: int) -> Finding:
    need = SHM_WARN * processes
    return Finding(
        "machine", "shm", _level(found.shm_free / processes, SHM_FAIL, SHM_WARN), (host,),
        f"/dev/shm has {size(found.shm_free)} free of {size(found.shm_total)}", f"{size(SHM_WARN)} per process",
        f"sudo mount -o remount,size={max(1, -(-need // (1 << 30)))}G /dev/shm; in a container: docker run --shm-size",
    )  # fmt: skip


def open_files(host: str, found: Limits, world: int) -> Finding:
    need = FILES_BASE + FILES_PER_RANK * world
    files = found.open_files
    level = PASS if files == UNLIMITED else _level(files, need, max(need, FILES_WARN))
    told = "no limit" if files == UNLIMITED else str(files)
    want = max(2 * need, 65536)
    return Finding(
        "machine", "open_files", level, (host,), f"ulimit -n: {told}", f"{max(need, FILES_WARN)} for {world} ranks",
        f"ulimit -n {want}",
    )  # fmt: skip


def locked_memory(host: str, found: Limits) -> Finding:
    """It matters only to InfiniBand, which registers the memory that it sends from."""
    is_short = found.has_infiniband and found.locked_memory != UNLIMITED
    told = "unlimited" if found.locked_memory == UNLIMITED else size(found.locked_memory)
    why = "" if found.has_infiniband else "; only InfiniBand needs it, and there is none here"
    return Finding(
        "machine", "locked_memory", FAIL if is_short else PASS, (host,), f"ulimit -l: {told}{why}",
        "unlimited for InfiniBand", "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1",
    )  # fmt: skip


def quota(host: str, found: Processors, processes: int) -> Finding:
    has_quota = found.quota != UNLIMITED
    processors = min(float(found.usable), found.quota) if has_quota else float(found.usable)
    limit = f", the control group allows {found.quota:.1f}" if has_quota else ""
    return Finding(
        "machine", "processors", _level(processors / processes, 0.5, 1.0), (host,),
        f"{found.usable} processors{limit}, for {_processes(processes)}", "one per process",
        f"start fewer processes: --nproc {max(1, int(processors))}; in a container: docker run --cpus",
    )  # fmt: skip


def share(host: str, found: Processors) -> Finding:
    return Finding(
        "machine", "busy", WARN if found.share < SHARE_WARN else PASS, (host,),
        f"a busy thread gets {found.share:.0%} of a processor: {_others(found)}", f"{SHARE_WARN:.0%}",
        "top -o %CPU, and end other programs; on virtual machines look at %st: the host is overcommitted",
    )  # fmt: skip


def _others(found: Processors) -> str:
    return "nothing else uses it" if found.share >= SHARE_WARN else "other programs, a quota or the host take the rest"


def disk(host: str, found: Folder) -> Finding:
    where = f"{found.path} ({found.purpose})"
    if found.error:
        fix = f"ls -ld {shlex.quote(found.path)}; df -h {shlex.quote(found.path)}; or choose another folder"
        return Finding("machine", "disk", FAIL, (host,), f"{where} {found.error}", "can be written to", fix)
    levels = [_level(found.free, DISK_FAIL, DISK_WARN), _level(found.bytes_per_second, WRITING_FAIL, WRITING_WARN)]
    if found.free_files != UNLIMITED:
        levels.append(_level(found.free_files, DISK_FILES_FAIL, DISK_FILES_WARN))
    files = f", {found.free_files} files free" if levels[-1] != PASS and len(levels) == 3 else ""
    return Finding(
        "machine", "disk", max(levels, key=(PASS, WARN, FAIL).index), (host,),
        f"{where}: {size(found.free)} free{files}, writes {size(found.bytes_per_second)}/s",
        f"{size(DISK_WARN)} free, {size(WRITING_WARN)}/s",
        f"df -h {shlex.quote(found.path)}, and free space; or choose another folder",
    )  # fmt: skip


def space(host: str, found: Folder) -> Finding:
    """For a folder that was not written to."""
    told = f"{found.path} ({found.purpose}): {size(found.free)} free"
    fix = f"df -h {shlex.quote(found.path)}, and free space; or choose another folder"
    return Finding("machine", "disk", _level(found.free, DISK_FAIL, DISK_WARN), (host,), told, size(DISK_FAIL), fix)


def sharing(examined: Examination, index: int, folder: Folder) -> Finding:
    """Either is valid, and matters for checkpoints; a folder that only some nodes share is suspicious."""
    others = set(examined.reports) - {index}
    both = {other for other in folder.shared_with if other in others}
    named = ", ".join(f"node {other}" for other in sorted(both))
    told = "seen by this node only" if not both else "seen by all nodes" if both == others else f"shared with {named}"
    level = WARN if both and both != others else PASS
    return Finding(
        "machine", "shared_folder", level, (examined.host(index),), f"{folder.path} ({folder.purpose}) is {told}",
        "by all or by none", "findmnt -T . on each node, and mount the same folder on all",
    )  # fmt: skip


def speeds(examined: Examination) -> Iterator[Finding]:
    """Each node's processor compared with the others'."""
    found = {
        index: report.facts.processors
        for index, report in examined.reports.items()
        if report.facts.processors is not None
    }
    known = [one.gflops for one in found.values() if one.gflops > 0]
    median = statistics.median_high(known) if known else 0.0  # of two: the faster one
    for index, one in found.items():
        host = (examined.host(index),)
        if not one.gflops:
            yield Finding("machine", "speed", WARN, host, "numpy could not be timed", "ends within 8 s", "top -o %CPU")
            continue
        yield Finding(
            "machine", "speed", _level(one.gflops / median, SPEED_FAIL, SPEED_WARN), host,
            f"one processor does {one.gflops:.0f} Gflop/s ({one.name}), {one.gflops / median:.0%} of the median",
            f"{SPEED_WARN:.0%}", "cpupower frequency-info; sudo cpupower frequency-set -g performance",
        )  # fmt: skip


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def judge(examined: Examination, groups: Sequence[str]) -> list[Finding]:
    findings: list[Finding] = []
    if "network" not in groups and len(examined.addresses) > 1:
        findings += judge_network.absent(examined)
    for group, read in _READERS.items():
        if group in groups:
            findings += read(examined)
    return findings


def group(examined: Examination) -> Iterator[Finding]:
    fix = "the logs of the group are beside the job's (doctor.N.log); python -m fleet_train selftest says more"
    for index, result in examined.groups.items():
        host = (examined.host(index),)
        if result.skipped:
            yield Finding("group", "group", WARN, host, f"not formed: {result.skipped}", "formed", fix)
        else:
            measured = f"{result.words} ({result.seconds:.0f} s)"
            yield Finding("group", "group", PASS if result.ok else FAIL, host, measured, "exact sums", fix)


# Of the software: what must be the same on all nodes, how it is read, the level of a node that differs, and the fix.
_SAME: tuple[tuple[str, str, Callable[[Software], str], str, str], ...] = (
    (
        "python", "Python", lambda software: ".".join(software.python.split(".")[:2]), FAIL,
        "python -m venv with the same Python as on the other nodes",
    ),
    ("paddle", "Paddle", lambda software: software.paddle, FAIL, "pip install paddlepaddle==3.3.1 on every node"),
    (
        "fleet_train", "fleet_train", lambda software: software.fleet_train, FAIL,
        "pip install the same version everywhere",
    ),
    ("numpy", "numpy", lambda software: software.numpy, WARN, "pip install the same numpy on every node"),
    (
        "package", "the files of fleet_train (digest)", lambda software: software.package_digest, FAIL,
        "git status in the checkout, or pip install --force-reinstall the same package on every node",
    ),
    ("profile", "the profile (digest)", lambda software: software.profile, FAIL, "copy the profile to every node"),
    ("script", "the script (digest)", lambda software: software.script, FAIL, "copy the script to every node"),
)  # fmt: skip


def _software(examined: Examination) -> Iterator[Finding]:
    of_nodes = {i: report.facts.software for i, report in examined.reports.items() if report.facts.software is not None}
    for index, software in of_nodes.items():
        for error in software.errors:
            yield Finding("software", "profile_or_script", FAIL, (examined.host(index),), error, "can be read", "ls -l")
        if not software.paddle:
            fix = "pip install paddlepaddle==3.3.1 (CPU), or see requirements-gpu.txt"
            yield Finding("software", "paddle", FAIL, (examined.host(index),), "Paddle is not installed", "3.3", fix)
    for id, name, read, level, fix in _SAME:
        values = {index: read(software) for index, software in of_nodes.items()}
        yield from _compared(examined, "software", id, name, values, fix, level)


def _compared(
    examined: Examination, group: str, id: str, name: str, values: Mapping[int, str], fix: str, level: str = FAIL
) -> Iterator[Finding]:
    """``values`` of the nodes that have one: ``level`` for each that is not that of the majority; of equally many, the
    lowest node's value counts."""
    values = {index: value for index, value in values.items() if value}
    if not values:
        return
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: (counts[value], -min(i for i, v in values.items() if v == value)))
    first = next(index for index, value in values.items() if value == usual)
    for index, value in values.items():
        host, measured = (examined.host(index),), f"{name}: {value}"
        if value == usual:
            yield Finding(group, id, PASS, host, measured, "the same on all nodes")
        else:
            different = f"{measured}, but {usual} on {examined.host(first)}"
            yield Finding(group, id, level, host, different, "the same on all nodes", fix)


MEMORY_USED_WARN = 1 << 30
"""Memory in use of a GPU before a job: another process computes on it."""


def _gpus(examined: Examination) -> Iterator[Finding]:
    of_nodes = {i: report.facts.gpus for i, report in examined.reports.items() if report.facts.gpus is not None}
    for index, gpus in of_nodes.items():
        yield from _of_gpus(examined.host(index), gpus)
    drivers = {index: ", ".join(sorted({gpu.driver for gpu in gpus.found})) for index, gpus in of_nodes.items()}
    yield from _compared(
        examined, "gpus", "gpu_driver", "driver", drivers, "sudo apt-get install the same nvidia-driver everywhere"
    )
    versions = {index: gpus.nccl for index, gpus in of_nodes.items()}
    yield from _compared(examined, "gpus", "nccl", "NCCL", versions, "pip install the same paddlepaddle-gpu everywhere")
    counts = {index: f"{len(gpus.found)} x {_models(gpus)}" for index, gpus in of_nodes.items()}
    yield from _compared(examined, "gpus", "gpu_models", "GPUs", counts, "nvidia-smi -L; start with --selected_gpus")


def _models(gpus: Gpus) -> str:
    return ", ".join(sorted({gpu.name for gpu in gpus.found})) or "nothing"


def _of_gpus(host: str, gpus: Gpus) -> Iterator[Finding]:
    if gpus.error:
        fix = "sudo dmesg | grep -i nvrm; reboot if the driver hangs"
        yield Finding("gpus", "gpu", FAIL, (host,), gpus.error, "nvidia-smi answers", fix)
        return
    for gpu in gpus.found:
        place = (f"{host} GPU {gpu.index}",)
        if gpu.ecc_errors:
            measured, fix = f"{gpu.ecc_errors} uncorrected ECC errors", f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            yield Finding("gpus", "ecc", FAIL, place, measured, "none", fix)
        if gpu.links_down:
            measured, fix = f"{gpu.links_down} NVLinks are inactive", f"nvidia-smi nvlink --status -i {gpu.index}"
            yield Finding("gpus", "nvlink", WARN, place, measured, "none", fix)
        if gpu.memory_used > MEMORY_USED_WARN:
            measured, fix = f"{size(gpu.memory_used)} are in use already", "nvidia-smi, and end the processes there"
            yield Finding("gpus", "gpu_memory", WARN, place, measured, size(MEMORY_USED_WARN), fix)
    yield Finding("gpus", "gpu", PASS, (host,), f"{len(gpus.found)} x {_models(gpus)}", "nvidia-smi answers")


_READERS = {
    "machine": machine_findings,
    "software": _software,
    "network": judge_network.network_findings,
    "gpus": _gpus,
    "group": group,
}
