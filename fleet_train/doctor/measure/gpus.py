"""NVIDIA GPUs, from nvidia-smi with a timeout. Never run on a GPU so far: the formats are those of its manual."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from fleet_train.doctor.facts import Gpu, Gpus

_SECONDS = 10.0
_FIELDS = "index,name,driver_version,ecc.errors.uncorrected.volatile.total,memory.used"
_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_LINKS = ("nvidia-smi", "nvlink", "--status")


def gpus(devices: Path = Path("/dev")) -> Gpus | None:
    """None if the machine has none."""
    if not any(devices.glob("nvidia[0-9]*")):
        return None
    table, error = _ask(_QUERY)
    links, _ = _ask(_LINKS)
    return Gpus(parse_table(table, parse_links(links)), nccl_version(), error)


def _ask(command: Iterable[str]) -> tuple[str, str]:
    """(its output, why there is none)."""
    try:
        done = subprocess.run([*command], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        return "", "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError):
        return "", f"nvidia-smi did not answer within {_SECONDS:g} s"
    if done.returncode:
        return "", f"nvidia-smi: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
    return done.stdout, ""


def parse_table(table: str, links_down: dict[int, int]) -> tuple[Gpu, ...]:
    """From ``--query-gpu``; values that a GPU lacks are ``[N/A]`` or ``[Not Supported]`` there, and 0 here."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(table))]
    found = []
    for row in rows:
        if len(row) == 5 and row[0].isdigit():
            index = int(row[0])
            found.append(Gpu(index, row[1], row[2], _whole(row[3]), _whole(row[4]) << 20, links_down.get(index, 0)))
    return tuple(found)


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
    """Of the package that Paddle's GPU build installs with it; empty: unknown."""
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
