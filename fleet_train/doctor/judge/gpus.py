"""Findings of GPUs. Tested on recorded outputs only, never on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fleet_train.doctor.facts import Examination, Gpus
from fleet_train.doctor.judge.finding import FAIL, PASS, WARN, Finding, size

GROUP = "gpus"
MEMORY_USED_WARN = 1 << 30
"""Memory in use of a GPU before a job: another process computes on it."""


def findings(examined: Examination) -> Iterator[Finding]:
    found = {i: report.facts.gpus for i, report in examined.reports.items() if report.facts.gpus is not None}
    for index, one in found.items():
        yield from _of_node(examined.host(index), one)
    drivers = {index: ", ".join(sorted({gpu.driver for gpu in one.found})) for index, one in found.items()}
    yield from _same(
        examined, "gpu_driver", "driver", drivers, "sudo apt-get install the same nvidia-driver everywhere"
    )
    versions = {index: one.nccl for index, one in found.items()}
    yield from _same(examined, "nccl", "NCCL", versions, "pip install the same paddlepaddle-gpu everywhere")
    counts = {index: f"{len(one.found)} x {_models(one)}" for index, one in found.items()}
    yield from _same(examined, "gpu_models", "GPUs", counts, "nvidia-smi -L; start with --selected_gpus")


def _models(found: Gpus) -> str:
    return ", ".join(sorted({gpu.name for gpu in found.found})) or "nothing"


def _of_node(host: str, found: Gpus) -> Iterator[Finding]:
    if found.error:
        fix = "sudo dmesg | grep -i nvrm; reboot if the driver hangs"
        yield Finding(GROUP, "gpu", FAIL, (host,), found.error, "nvidia-smi answers", fix)
        return
    for gpu in found.found:
        place = (f"{host} GPU {gpu.index}",)
        if gpu.ecc_errors:
            told, fix = f"{gpu.ecc_errors} uncorrected ECC errors", f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            yield Finding(GROUP, "ecc", FAIL, place, told, "none", fix)
        if gpu.links_down:
            told, fix = f"{gpu.links_down} NVLinks are inactive", f"nvidia-smi nvlink --status -i {gpu.index}"
            yield Finding(GROUP, "nvlink", WARN, place, told, "none", fix)
        if gpu.memory_used > MEMORY_USED_WARN:
            told, fix = f"{size(gpu.memory_used)} are in use already", "nvidia-smi, and end the processes there"
            yield Finding(GROUP, "gpu_memory", WARN, place, told, size(MEMORY_USED_WARN), fix)
    yield Finding(GROUP, "gpu", PASS, (host,), f"{len(found.found)} x {_models(found)}", "nvidia-smi answers")


def _same(examined: Examination, id: str, name: str, values: dict[int, str], fix: str) -> Iterator[Finding]:
    values = {index: value for index, value in values.items() if value}
    usual = Counter(values.values()).most_common(1)[0][0] if values else ""
    for index, value in values.items():
        level = PASS if value == usual else FAIL
        host = (examined.host(index),)
        yield Finding(GROUP, id, level, host, f"{name}: {value}", f"{usual}, as on most nodes", fix)
