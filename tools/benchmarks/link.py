"""Bytes that a node has sent, by the kernel's counters of its interface. Linux."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
_SENT = re.compile(r"Sent ([0-9]+) bytes ([0-9]+) pkt")


@dataclass(frozen=True)
class CollectiveSpec:
    """``interface`` counts one header per piece that TCP hands over (up to 64 KiB), as the kernel's counter does.

    ``wire`` counts one per packet of the link's size, as the rate limit does; 0 where there is no limit.
    """

    interface: int = 0
    wire: int = 0

    def __add__(self, other: CollectiveSpec) -> CollectiveSpec:
        return CollectiveSpec(self.interface + other.interface, self.wire + other.wire)

    def __sub__(self, other: CollectiveSpec) -> CollectiveSpec:
        return CollectiveSpec(self.interface - other.interface, self.wire - other.wire)


def interface_bytes() -> int:
    """Bytes sent since the interface is up, by its counter: fast enough to be read in every step."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def sent_so_far() -> CollectiveSpec:
    """By both counters; takes milliseconds."""
    shown = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", INTERFACE], capture_output=True, text=True, check=False, timeout=30
    )
    return CollectiveSpec(interface_bytes(), limiter_bytes(shown.stdout))


def limiter_bytes(shown: str) -> int:
    """The bytes in the output of ``tc -s qdisc show``; 0 without a limiter."""
    found = _SENT.search(shown) if "qdisc tbf" in shown else None
    return int(found[1]) if found else 0
