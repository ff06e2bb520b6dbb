"""All findings of an examination, in the order in which they are printed."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

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
    level_below,
    size,
)
from fleet_train.doctor.judge_network import absent, network_findings

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
"""Shares of the median speed of all nodes: synchronous training runs at the speed of the slowest."""
SHARE_WARN = 0.75
"""The share of a processor that a busy thread gets. The cause may be temporary: never more than suspicious."""
GPU_MEMORY_WARN = 1 << 30
"""Memory in use of a GPU before a job: another process computes on it."""


def judge(examined: Examination, groups: Sequence[str]) -> list[Finding]:
    findings: list[Finding] = []
    findings += started_differently(examined)
    if "network" not in groups and len(examined.addresses) > 1:
        findings += absent(examined)
    for group, read in _READERS.items():
        if group in groups:
            findings += read(examined)
    return findings


def started_differently(examined: Examination) -> Iterator[Finding]:
    """Doctors with other flags than this one, and nodes that have met although their numbers of processes differ."""
    rule, fix = "the same flags on every node", "start it with the same flags on every node, except --node_ip"
    if examined.difference:
        missing = (i for i in range(len(examined.addresses)) if i not in examined.reports)
        hosts = tuple(examined.host(index) for index in missing)
        yield Finding("network", "flags", FAIL, hosts, examined.difference.partition("; start every")[0], rule, fix)
    numbers = {index: report.facts.processes for index, report in examined.reports.items()}
    expected = dict(enumerate(examined.counts)) or dict.fromkeys(numbers, max(numbers.values(), default=0))
    if any(number != expected[index] for index, number in numbers.items()):
        said = ", ".join(f"{number} on {examined.host(index)}" for index, number in numbers.items())
        hosts = tuple(examined.host(index) for index in numbers)
        yield Finding("network", "flags", FAIL, hosts, f"processes per node (--nproc): {said}", rule, fix)


_machine = partial(Finding, "machine")


def machine_findings(examined: Examination) -> Iterator[Finding]:
    """Memory, processors, limits, folders of each node; and which node is slower than the others."""
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
            yield sharing(host, folder, set(examined.reports) - {index})
    yield from speeds(examined)


def memory(host: str, memory: Memory, processes: int) -> Finding:
    limit = f", limit of the control group {size(memory.limit)}" if memory.limit != UNLIMITED else ""
    killed = f"; {memory.oom_kills} processes were killed for lack of memory" if memory.oom_kills else ""
    level = level_below(memory.available / processes, MEMORY_FAIL, MEMORY_WARN)
    return _machine(
        "memory", WARN if killed and level == PASS else level, (host,),
        f"{size(memory.available)} available for {_processes(processes)}{limit}{killed}",
        f"{size(MEMORY_WARN)} per process",
        "ps aux --sort=-rss | head, and end unneeded processes; in a container raise its limit: docker run --memory",
    )  # fmt: skip


def shared_memory(host: str, memory: Memory, processes: int) -> Finding:
    # A remount sets the size: never to less than it has, and beside what is in it.
    needed = max(memory.shm_total, memory.shm_total - memory.shm_free + SHM_WARN * processes)
    gibibytes = max(1, -(-needed // (1 << 30)))
    return _machine(
        "shm", level_below(memory.shm_free / processes, SHM_FAIL, SHM_WARN), (host,),
        f"/dev/shm has {size(memory.shm_free)} free of {size(memory.shm_total)}", f"{size(SHM_WARN)} per process",
        f"ls -l /dev/shm shows leftovers; sudo mount -o remount,size={gibibytes}G /dev/shm; in a container: docker run "
        "--shm-size",
    )  # fmt: skip


def open_files(host: str, limits: Limits, world: int) -> Finding:
    need, files = FILES_BASE + FILES_PER_RANK * world, limits.open_files
    enough = max(need, FILES_WARN)
    return _machine(
        "open_files", PASS if files == UNLIMITED else level_below(files, need, enough), (host,),
        f"ulimit -n: {'no limit' if files == UNLIMITED else files}", f"{enough} for {world} ranks",
        f"ulimit -Sn {max(2 * need, 65536)} in the shell that starts the job; above ulimit -Hn: nofile in "
        "/etc/security/limits.conf",
    )  # fmt: skip


def locked_memory(host: str, limits: Limits) -> Finding:
    """The finding about locked memory, which matters only to InfiniBand: it registers the memory that it sends from."""
    is_unlimited = limits.locked_memory == UNLIMITED
    limit = "unlimited" if is_unlimited else size(limits.locked_memory)
    why = "" if limits.has_infiniband else "; only InfiniBand needs it, and there is none here"
    return _machine(
        "locked_memory", FAIL if limits.has_infiniband and not is_unlimited else PASS, (host,),
        f"ulimit -l: {limit}{why}", "unlimited for InfiniBand",
        "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1",
    )  # fmt: skip


def quota(host: str, processors: Processors, processes: int) -> Finding:
    has_quota = processors.quota != UNLIMITED
    allowed = min(float(processors.usable), processors.quota) if has_quota else float(processors.usable)
    limit = f", the control group allows {processors.quota:.1f}" if has_quota else ""
    return _machine(
        "processors", level_below(allowed / processes, 0.5, 1.0), (host,),
        f"{processors.usable} processors{limit}, for {_processes(processes)}", "one per process",
        f"start fewer processes: --nproc {max(1, int(allowed))}; in a container: docker run --cpus",
    )  # fmt: skip


def share(host: str, processors: Processors) -> Finding:
    is_busy = processors.share < SHARE_WARN
    why = "other programs, a quota or the host take the rest" if is_busy else "nothing else uses it"
    return _machine(
        "busy", WARN if is_busy else PASS, (host,),
        f"a busy thread gets {processors.share:.0%} of a processor: {why}", f"{SHARE_WARN:.0%}",
        "top -o %CPU, and end other programs; on virtual machines look at %st: the host is overcommitted",
    )  # fmt: skip


def disk(host: str, folder: Folder) -> Finding:
    where, path = f"{folder.path} ({folder.purpose})", shlex.quote(folder.path)
    if folder.error:
        fix = f"ls -ld {path}; df -h {path}; or choose another folder"
        return _machine("disk", FAIL, (host,), f"{where} {folder.error}", "can be written to", fix)
    of_files = PASS
    if folder.free_files != UNLIMITED:
        of_files = level_below(folder.free_files, DISK_FILES_FAIL, DISK_FILES_WARN)
    of_space = level_below(folder.free, DISK_FAIL, DISK_WARN)
    of_speed = level_below(folder.bytes_per_second, WRITING_FAIL, WRITING_WARN)
    files = f", {folder.free_files} files free" if of_files != PASS else ""
    return _machine(
        "disk", max(of_files, of_space, of_speed, key=(PASS, WARN, FAIL).index), (host,),
        f"{where}: {size(folder.free)} free{files}, writes {size(folder.bytes_per_second)}/s",
        f"{size(DISK_WARN)} free, {size(WRITING_WARN)}/s", f"df -h {path}, and free space; or choose another folder",
    )  # fmt: skip


def space(host: str, folder: Folder) -> Finding:
    """The finding for a folder that was not written to."""
    return _machine(
        "disk", level_below(folder.free, DISK_FAIL, DISK_WARN), (host,),
        f"{folder.path} ({folder.purpose}): {size(folder.free)} free", size(DISK_FAIL),
        f"df -h {shlex.quote(folder.path)}, and free space; or choose another folder",
    )  # fmt: skip


def sharing(host: str, folder: Folder, others: set[int]) -> Finding:
    """The finding about who shares a folder, which matters for checkpoints: all or none; some are suspicious."""
    both = sorted(others.intersection(folder.shared_with))
    is_partial = 0 < len(both) < len(others)
    named = f"shared with {', '.join(f'node {other}' for other in both)}" if is_partial else "seen by all nodes"
    return _machine(
        "shared_folder", WARN if is_partial else PASS, (host,),
        f"{folder.path} ({folder.purpose}) is {named if both else 'seen by this node only'}",
        "by all or by none", "findmnt -T . on each node, and mount the same folder on all",
    )  # fmt: skip


def speeds(examined: Examination) -> Iterator[Finding]:
    """Each node's processor compared with the others'."""
    of_nodes = {i: report.facts.processors for i, report in examined.reports.items() if report.facts.processors}
    known = [processors.gflops for processors in of_nodes.values() if processors.gflops > 0]
    median = statistics.median_high(known) if known else 0.0  # of two: the faster one
    for index, processors in of_nodes.items():
        host, gflops = (examined.host(index),), processors.gflops
        if not gflops:
            yield _machine("speed", WARN, host, "numpy could not be timed", "ends within 8 s", "top -o %CPU")
            continue
        yield _machine(
            "speed", level_below(gflops / median, SPEED_FAIL, SPEED_WARN), host,
            f"one processor does {gflops:.0f} Gflop/s ({processors.name}), {gflops / median:.0%} of the median",
            f"{SPEED_WARN:.0%}",
            "cpupower frequency-info; sudo cpupower frequency-set -g performance; for a slower model, launch with "
            "--set batch_shares=auto",
        )  # fmt: skip


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


# What must be the same on all nodes: how it is read, the level of a node that differs, and the fix.
_SAME_SOFTWARE: tuple[tuple[str, str, Callable[[Software], str], str, str], ...] = (
    (
        "python", "Python", lambda software: ".".join(software.python.split(".")[:2]), FAIL,
        "python -m venv with the same Python as on the other nodes",
    ),
    (
        "paddle", "Paddle", lambda software: software.paddle, FAIL,
        "install that version there, with pip of the environment that runs the job, and the same package: "
        "paddlepaddle and paddlepaddle-gpu overwrite each other",
    ),
    (
        "fleet_train", "fleet_train", lambda software: software.fleet_train, FAIL,
        "pip install the same version everywhere",
    ),
    ("numpy", "numpy", lambda software: software.numpy, WARN, "pip install the same numpy on every node"),
    (
        "package", "the files of fleet_train (digest)", lambda software: software.package_digest, FAIL,
        "git status in the checkout; or install the same wheel on every node: pip install --force-reinstall --no-deps",
    ),
    ("profile", "the profile (digest)", lambda software: software.profile, FAIL, "copy the profile to every node"),
    ("script", "the script (digest)", lambda software: software.script, FAIL, "copy the script to every node"),
)  # fmt: skip
_SAME_GPUS: tuple[tuple[str, str, Callable[[Gpus], str], str, str], ...] = (
    (
        "gpu_driver", "driver", lambda gpus: ", ".join(sorted({gpu.driver for gpu in gpus.found})), FAIL,
        "install the same driver on every node, with the package manager that has installed it",
    ),
    ("nccl", "NCCL", lambda gpus: gpus.nccl, FAIL, "pip install the same paddlepaddle-gpu everywhere"),
    ("gpu_models", "GPUs", lambda gpus: _models(gpus), FAIL, "nvidia-smi -L; start with --selected_gpus"),
)  # fmt: skip


def software_findings(examined: Examination) -> Iterator[Finding]:
    of_nodes = {i: report.facts.software for i, report in examined.reports.items() if report.facts.software}
    for index, software in of_nodes.items():
        host = (examined.host(index),)
        for error in software.errors:
            yield Finding("software", "profile_or_script", FAIL, host, error, "can be read", "ls -l")
        if not software.paddle:
            fix = "pip install paddlepaddle==3.3.1 on a machine without GPU, else as requirements-gpu.txt says"
            yield Finding("software", "paddle", FAIL, host, "Paddle is not installed", "3.3", fix)
    for id, name, read, level, fix in _SAME_SOFTWARE:
        values = {index: read(software) for index, software in of_nodes.items()}
        yield from _compared(examined, partial(Finding, "software", id), name, values, level, fix)


def gpu_findings(examined: Examination) -> Iterator[Finding]:
    of_nodes = {i: report.facts.gpus for i, report in examined.reports.items() if report.facts.gpus}
    for index, gpus in of_nodes.items():
        yield from _of_gpus(examined.host(index), gpus)
    for id, name, read, level, fix in _SAME_GPUS:
        values = {index: read(gpus) for index, gpus in of_nodes.items()}
        yield from _compared(examined, partial(Finding, "gpus", id), name, values, level, fix)


def _compared(
    examined: Examination,
    finding: Callable[..., Finding],
    name: str,
    values: Mapping[int, str],
    level: str,
    fix: str,
) -> Iterator[Finding]:
    """``values`` of the nodes that have one: ``level`` for each that is not that of the majority; of equally many, the
    lowest node's value counts."""
    values = {index: value for index, value in values.items() if value}
    if not values:
        return
    usual = Counter(dict(sorted(values.items())).values()).most_common(1)[0][0]
    first = next(index for index, value in values.items() if value == usual)
    for index, value in values.items():
        host, measured, rule = (examined.host(index),), f"{name}: {value}", "the same on all nodes"
        if value == usual:
            yield finding(PASS, host, measured, rule)
        else:
            yield finding(level, host, f"{measured}, but {usual} on {examined.host(first)}", rule, fix)


def _models(gpus: Gpus) -> str:
    names = ", ".join(sorted({gpu.name for gpu in gpus.found})) or "nothing"
    return f"{len(gpus.found)} x {names}"


def _of_gpus(host: str, gpus: Gpus) -> Iterator[Finding]:
    finding = partial(Finding, "gpus")
    if gpus.error:
        fix = "sudo dmesg | grep -i nvrm; reboot if the driver hangs"
        yield finding("gpu", FAIL, (host,), gpus.error, "nvidia-smi answers", fix)
        return
    for gpu in gpus.found:
        place = (f"{host} GPU {gpu.index}",)
        if gpu.ecc_errors:
            measured, fix = (
                f"{gpu.ecc_errors} uncorrected ECC errors",
                f"end what runs on it, then sudo nvidia-smi --gpu-reset -i {gpu.index}",
            )
            yield finding("ecc", FAIL, place, measured, "none", fix)
        if gpu.links_down:
            measured, fix = f"{gpu.links_down} NVLinks are inactive", f"nvidia-smi nvlink --status -i {gpu.index}"
            yield finding("nvlink", WARN, place, measured, "none", fix)
        if gpu.memory_used > GPU_MEMORY_WARN:
            measured, fix = f"{size(gpu.memory_used)} are in use already", "nvidia-smi, and end the processes there"
            yield finding("gpu_memory", WARN, place, measured, size(GPU_MEMORY_WARN), fix)
    yield finding("gpu", PASS, (host,), _models(gpus), "nvidia-smi answers")


def data_findings(examined: Examination) -> Iterator[Finding]:
    for index, report in examined.reports.items():
        yield from (replace(found, hosts=(examined.host(index),)) for found in report.facts.data)


def group_findings(examined: Examination) -> Iterator[Finding]:
    fix = "the logs of the group are beside the job's (doctor.N.log); fleet_train selftest says more"
    for index, result in examined.groups.items():
        host = (examined.host(index),)
        if result.skipped:
            yield Finding("group", "group", WARN, host, f"not formed: {result.skipped}", "formed", fix)
        else:
            measured = f"{result.words} ({result.seconds:.0f} s)"
            yield Finding("group", "group", PASS if result.ok else FAIL, host, measured, "exact sums", fix)


_READERS = {
    "machine": machine_findings,
    "software": software_findings,
    "network": network_findings,
    "gpus": gpu_findings,
    "data": data_findings,
    "group": group_findings,
}
