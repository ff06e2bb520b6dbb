"""Time stamps of one rank's start, on the machine-wide monotonic clock. Standard library only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

# 64 -> 8 layers of 640 -> 10: the network of the other benchmarks, with a batch of 64 per rank.
SIZES = (64, *[640] * 8, 10)
BATCH = 64


class Stamps:
    """When each phase of this process ended, in seconds since boot, by name."""

    def __init__(self) -> None:
        self.ends: dict[str, float] = {"interpreter": now()}

    def stamp(self, phase: str) -> None:
        self.ends[phase] = now()

    def write(self, folder: str, rank: int) -> None:
        """Write ``rank<N>.json``, with this process and its ancestors."""
        record = {"ends": self.ends, "processes": processes_above(os.getpid())}
        beside = Path(folder, f"rank{rank}.part")
        beside.write_text(json.dumps(record), encoding="utf-8")
        os.replace(beside, Path(folder, f"rank{rank}.json"))


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def processes_above(pid: int) -> list[tuple[int, float, float]]:
    """(pid, start time, CPU seconds so far) of this process, its parent, and so on.

    To a hundredth of a second, including children that have ended.
    """
    found = []
    ticks = os.sysconf("SC_CLK_TCK")
    while pid > 1:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found.append((pid, int(fields[19]) / ticks, sum(map(int, fields[11:15])) / ticks))
        pid = int(fields[1])
    return found
