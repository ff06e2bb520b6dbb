"""What this machine has: addresses, processors, Paddle's build and its devices. Nothing here imports Paddle."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fleet_train import __version__
from fleet_train.cluster import network
from fleet_train.cluster.advice import is_amd_processor, usable_processors
from fleet_train.cluster.hosts import is_number


@dataclass(frozen=True)
class Machine:
    """Facts that decide how a job is started here. ``gpus`` is None for a build of Paddle without GPU code."""

    interfaces: dict[str, tuple[str, ...]]
    processors: int
    is_amd: bool
    gpus: tuple[str, ...] | None
    versions: dict[str, str]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for group in self.interfaces.values() for address in group)


def look_around(environ: Mapping[str, str]) -> Machine:
    distribution, paddle_version = installed_paddle()
    return Machine(
        interfaces=network.interface_addresses(),
        processors=usable_processors(),
        is_amd=is_amd_processor(),
        gpus=visible_gpus(environ) if distribution == "paddlepaddle-gpu" else None,
        versions={
            "python": platform.python_version(),
            "fleet_train": __version__,
            "paddle": f"{paddle_version} ({distribution})" if distribution else "not installed",
        },
    )


def installed_paddle() -> tuple[str, str]:
    """(distribution, version) of the installed Paddle; empty strings if there is none."""
    for distribution in ("paddlepaddle-gpu", "paddlepaddle"):
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that processes may use, by number: CUDA_VISIBLE_DEVICES, else /dev, else (WSL) nvidia-smi."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen != "all":
        return tuple(part.strip() for part in chosen.split(",") if part.strip())
    numbers = [entry.name.removeprefix("nvidia") for entry in devices.glob("nvidia[0-9]*")]
    return tuple(sorted((n for n in numbers if is_number(n)), key=int)) or _gpus_of_nvidia_smi()


def _gpus_of_nvidia_smi() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if is_number(line.strip()))
