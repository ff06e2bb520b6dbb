"""Memory and processors that control groups (v1 and v2) leave to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fleet_train.doctor.facts import UNLIMITED

_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = Path("/proc/self/cgroup")
# Version 1 has no value for "no limit": it shows the largest number of whole pages.
_NO_LIMIT_OF_V1 = 1 << 60


def folders(controller: str, root: Path = _ROOT, cgroups: Path = _CGROUPS) -> Iterator[Path]:
    """The control groups of this process for ``memory`` or ``cpu``, the innermost first: each may limit it.

    In a container the path in /proc may be the host's, which does not exist: the root is then its own.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        tops = (root / names, root / controller) if names else (root, root / "unified")
        for top in tops:
            if not top.is_dir():
                continue
            inner = top / path.lstrip("/")
            yield from (one for one in (inner, *inner.parents) if one == top or (top in one.parents and one.is_dir()))
            break


def memory(root: Path = _ROOT, cgroups: Path = _CGROUPS) -> tuple[int, int, int]:
    """(limit, bytes left below it, processes ended by the OOM killer); (UNLIMITED, UNLIMITED, n) without a limit."""
    limit, left, kills = UNLIMITED, UNLIMITED, 0
    for index, folder in enumerate(folders("memory", root, cgroups)):
        most = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        if index == 0:
            kills = _field(folder, "oom_kill", "memory.events", "memory.oom_control")
        if most is None or most >= _NO_LIMIT_OF_V1:
            continue
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
        # The page cache in it is reclaimed on demand.
        cached = _field(folder, "inactive_file", "memory.stat") or _field(folder, "total_inactive_file", "memory.stat")
        free = max(0, most - used + cached)
        limit = most if limit == UNLIMITED else min(limit, most)
        left = free if left == UNLIMITED else min(left, free)
    return limit, left, kills


def processors(root: Path = _ROOT, cgroups: Path = _CGROUPS) -> float:
    """Number of processors; UNLIMITED without a quota."""
    found = [quota for folder in folders("cpu", root, cgroups) if (quota := _quota(folder)) is not None]
    return min(found, default=float(UNLIMITED))


def _quota(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _first_number(folder, "cpu.cfs_quota_us"), _first_number(folder, "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _first_number(folder: Path, *names: str) -> int | None:
    for name in names:
        text = _text(folder / name).strip()
        if text.lstrip("-").isdigit():
            return int(text)
    return None


def _field(folder: Path, field: str, *names: str) -> int:
    for name in names:
        for line in _text(folder / name).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == field and words[1].isdigit():
                return int(words[1])
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
