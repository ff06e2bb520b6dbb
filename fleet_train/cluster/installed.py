"""What is installed here, and this machine's hardware and limits; for ``--version``, records and the doctor.

This package and its commit, Python, Paddle and its build; system, processor, memory, limits of the control group and
GPUs from files of Linux, where ``root`` stands for ``/``, so that tests can give another one. No import of Paddle.
"""

from __future__ import annotations

import ast
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import fleet_train
from fleet_train import timeouts
from fleet_train.cluster.at_import import usable_processors
from fleet_train.cluster.network import output_of

# Packages that results and errors depend on, besides Paddle; also optional ones, whose absence is reported.
_PACKAGES = ("numpy", "visualdl", "numba", "pillow", "safetensors", "protobuf", "scikit-learn", "click", "psutil")
_DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda110")


def package_versions() -> dict[str, str]:
    """Package -> version, ``absent`` if it is not installed; DALI only if it is installed."""
    versions = {name: version_of(name) or "absent" for name in _PACKAGES}
    return versions | {name: version for name in _DALI if (version := version_of(name))}


def version_of(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def own_version() -> dict[str, Any]:
    """What is known of this package: its version, whether it is a checkout or installed, and a checkout's commit."""
    return {"version": fleet_train.__version__, "from": "a checkout" if _checkout() else "installed", **commit()}


def commit() -> dict[str, Any]:
    """The commit of the checkout that contains this package; empty if it is installed, or without git."""
    root = _checkout()
    digest = "" if root is None else git(root, "rev-parse", "HEAD")
    if root is None or not digest:
        return {}
    changes = git(root, "status", "--porcelain", "--", "fleet_train", "strategies")
    return {"commit": digest, "uncommitted_changes": bool(changes)}


def _checkout() -> Path | None:
    root = Path(fleet_train.__file__).resolve().parents[1]
    return root if (root / ".git").exists() else None


def git(root: Path, *arguments: str) -> str:
    """The output of git in a checkout; empty if there is none."""
    return output_of(["git", "-C", str(root), *arguments], timeouts.TOOL_SECONDS).strip()


def installed_paddle() -> tuple[str, str]:
    """The installed Paddle: (distribution, version); empty strings if there is none."""
    for distribution in ("paddlepaddle-gpu", "paddlepaddle"):
        if version := version_of(distribution):
            return distribution, version
    return "", ""


def paddle_build() -> dict[str, str]:
    """Paddle's distribution, version, kind of build and commit, from its own file; empty if it is not installed."""
    distribution, version = installed_paddle()
    facts = _facts_of_paddle()
    if not distribution and not facts:
        return {}
    cuda = str(facts.get("cuda_version", "unknown"))
    known = {
        "distribution": distribution or "unknown",
        "version": version or str(facts.get("full_version", "unknown")),
        "build": "CPU" if cuda == "False" else "unknown" if cuda == "unknown" else "GPU",
        "commit": str(facts.get("commit", "unknown")),
    }
    if known["build"] != "GPU":
        return known
    return known | {name: str(facts.get(f"{name}_version", "unknown")) for name in ("cuda", "cudnn", "nccl")}


def _facts_of_paddle() -> dict[str, Any]:
    """The constants of ``paddle/version/__init__.py``, read as text: importing it would import Paddle."""
    spec = util.find_spec("paddle")
    places = None if spec is None else spec.submodule_search_locations
    try:
        text = (Path(next(iter(places or ()))) / "version" / "__init__.py").read_text()
        body = ast.parse(text).body
    except (OSError, StopIteration, SyntaxError):
        return {}
    return {
        line.targets[0].id: line.value.value
        for line in body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }


def one_line() -> str:
    """The line of ``--version``: ``fleet_train 0.1.0 (commit 04a8bfa63d), Python 3.11.2, paddlepaddle 3.3.1``."""
    own, (distribution, version) = own_version(), installed_paddle()
    of = f" (commit {own['commit'][:10]})" if "commit" in own else ""
    paddle = f"{distribution} {version}" if distribution else "no Paddle"
    return f"fleet_train {own['version']}{of}, Python {platform.python_version()}, {paddle}"


_ROOT = Path("/")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Bytes from which on there is no limit: version 1 of control groups writes about 2**63 then."""
_CONTAINERS = re.compile(r"docker|kubepods|containerd|crio|libpod|lxc", re.IGNORECASE)


def system(root: Path = _ROOT) -> str:
    """The operating system in words: ``Debian GNU/Linux 12 (bookworm), Linux 6.1.0, x86_64, glibc 2.36``."""
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', text_of(root / "etc/os-release"), re.MULTILINE)
    libc = " ".join(part for part in platform.libc_ver() if part)
    kernel = f"{platform.system()} {platform.release()}"
    return ", ".join(part for part in (named[1] if named else "", kernel, platform.machine(), libc) if part)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; the architecture if the system does not report it."""
    lines = text_of(cpuinfo).splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def cores() -> dict[str, int]:
    """Cores that this process may use (fewer under taskset, Slurm or a cpuset), and all cores."""
    return {"usable": usable_processors(), "total": os.cpu_count() or 1}


def memory(root: Path = _ROOT) -> dict[str, int]:
    """Bytes of the machine, and those available to a new program; empty if the system does not report them."""
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB$", text_of(root / "proc/meminfo"), re.MULTILINE))
    names = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    return {names[name]: 1024 * int(sizes[name]) for name in names if name in sizes}


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes available to new processes of this control group; None if the system does not report them."""
    here = [memory(root)["available_bytes"]] if "available_bytes" in memory(root) else []
    for group in control_groups("memory", root / "sys/fs/cgroup", root / "proc/self/cgroup"):
        used = text_of(group / "memory.current") or text_of(group / "memory.usage_in_bytes")
        kept = re.search(r"^(?:total_)?inactive_file (\d+)$", text_of(group / "memory.stat"), re.MULTILINE)
        if (most := memory_limit(group)) is not None and used.strip().isdigit():
            here.append(most - int(used) + (int(kept[1]) if kept else 0))
    return min(here, default=None)


def limits(root: Path = _ROOT) -> dict[str, float]:
    """Limits of this process's control group that are below the machine's: ``cores``, ``memory_bytes``.

    A group's limit is the smallest of its own and those above it.
    """
    mounted, groups = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    most = [limit for group in control_groups("memory", mounted, groups) if (limit := memory_limit(group)) is not None]
    values_of: dict[str, Sequence[float]] = {"cores": core_limits(mounted, groups), "memory_bytes": most}
    return {name: min(values) for name, values in values_of.items() if values}


def control_groups(controller: str, mounted: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> Iterator[Path]:
    """The control groups of this process for ``memory`` or ``cpu``, the innermost first: each may limit it.

    In a container the path in /proc may be the host's, which does not exist: the root is then its own.
    """
    for line in text_of(groups).splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        tops = (mounted / names, mounted / controller) if names else (mounted, mounted / "unified")
        for top in tops:
            if not top.is_dir():
                continue
            inner = top / path.lstrip("/")
            yield from (
                group for group in (inner, *inner.parents) if group == top or (top in group.parents and group.is_dir())
            )
            break


def core_limits(mounted: Path = CGROUPS, groups: Path = OWN_CGROUPS) -> list[float]:
    """The limits of this process's control groups in processors, one for each group that has one."""
    limits = []
    for group in control_groups("cpu", mounted, groups):
        quota, _, period = text_of(group / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = text_of(group / "cpu.cfs_quota_us").strip(), text_of(group / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return limits


def memory_limit(group: Path) -> int | None:
    """The limit of a control group's memory in bytes; None if it has none."""
    most = (text_of(group / "memory.max") or text_of(group / "memory.limit_in_bytes")).strip()
    return int(most) if most.isdigit() and int(most) < _UNLIMITED else None


def container(environ: Mapping[str, str], root: Path = _ROOT) -> str:
    """The kind of container that this process runs in; empty: none was detected."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "Kubernetes"
    if (root / "run/.containerenv").exists():
        return "Podman"
    if (root / ".dockerenv").exists():
        return "Docker"
    named = re.search(r"(?:^|\0)container=([\w-]+)", text_of(root / "proc/1/environ"))
    group = _CONTAINERS.search(text_of(root / "proc/1/cgroup"))
    return named[1] if named else group[0].lower() if group else ""


def gpus(root: Path = _ROOT) -> dict[str, object]:
    """Models and driver from NVIDIA's files in /proc; empty if there are none (WSL has none either)."""
    folder = root / "proc/driver/nvidia"
    models = [
        model[1].strip()
        for each in sorted(folder.glob("gpus/*/information"))
        if (model := re.search(r"^Model:(.*)$", text_of(each), re.MULTILINE))
    ]
    driver = re.search(r"Kernel Module.*?  (\d+[\d.]+)", text_of(folder / "version"))
    facts: dict[str, object] = {"models": models} if models else {}
    return facts | ({"driver": driver[1]} if driver else {})


def text_of(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
