"""The line that a launcher adds to the report of a failed job: the finding on its node that is most likely the cause.

Cheap: files of /proc, two file systems, one connection to each other node. Clocks are left to the doctor itself:
comparing them needs a doctor on the other node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fleet_train.doctor.facts import Folder
from fleet_train.doctor.judge import machine as judge
from fleet_train.doctor.judge.finding import FAIL, Finding
from fleet_train.doctor.measure import folders, machine
from fleet_train.doctor.measure.network import own_address
from fleet_train.doctor.peers.channel import connect, outcome_of
from fleet_train.launch.spec.node import Node

_DIAL_SECONDS = 1.5
_MOST_DIALLED = 64
_SHM_FULL = 0.05
"""Share of /dev/shm that is free: a small but empty one is not the cause."""
_VMSTAT = Path("/proc/vmstat")


class AfterFailure:
    """Created before the job starts, so that conditions from before are not attributed to it."""

    def __init__(self, node: Node, log_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._node = node
        self._log_dir = log_dir
        self._has_interface = node.interface is not None or "GLOO_SOCKET_IFNAME" in environ
        self._kills = oom_kills()

    def line(self) -> str:
        """At most one line; empty if nothing is found. Takes at most a few seconds, and raises nothing."""
        try:
            found = next((one for one in self._findings() if one.level == FAIL), None)
        except (OSError, ValueError, RuntimeError):
            return ""
        if found is None:
            return ""
        ips = ",".join(self._node.addresses)
        more = f"python -m fleet_train doctor{f' --ips {ips}' if len(self._node.addresses) > 1 else ''}"
        return f"doctor: {found.line}; more: {more}"

    def _findings(self) -> Iterator[Finding]:
        host = self._node.describe()
        memory = machine.memory()
        kills = oom_kills() - self._kills
        if kills > 0:
            seen = judge.memory(host, replace(memory, oom_kills=kills), self._node.processes)
            yield replace(seen, level=FAIL)
        folder = folders.nearest(self._log_dir)
        yield judge.space(host, Folder("logs", str(folder), machine.space_of(folder)[1]))
        if memory.shm_free < _SHM_FULL * memory.shm_total:
            yield judge.shared_memory(host, memory, self._node.processes)
        yield from self._unreachable(host)
        if len(self._node.addresses) > 1 and not self._has_interface:
            yield from _name(host, self._node.address)

    def _unreachable(self, host: str) -> Iterator[Finding]:
        """Nodes that do not even refuse a connection: off, cut off, or behind a firewall."""
        others = [index for index in range(len(self._node.addresses)) if index != self._node.index][:_MOST_DIALLED]
        for index, outcome in zip(others, self._dialled(others), strict=True):
            if outcome:
                there = self._node.describe(index)
                told, fix = (
                    f"a connection to port {self._node.store_port}: {outcome}",
                    f"ping {there.split('(')[-1][:-1]}",
                )
                yield Finding("network", "port", FAIL, (host, there), told, "answered or refused", fix)

    def _dialled(self, others: Sequence[int]) -> list[str]:
        if not others:
            return []
        with ThreadPoolExecutor(len(others), "doctor dials") as pool:
            return list(pool.map(self._dial, others))

    def _dial(self, index: int) -> str:
        try:
            connect(self._node.addresses[index], self._node.store_port, self._node.address, _DIAL_SECONDS).close()
        except ConnectionRefusedError:
            return ""
        except OSError as error:
            return outcome_of(error)
        return ""


def _name(host: str, address: str) -> Iterator[Finding]:
    found = own_address(os.uname().nodename)
    if found.startswith("127.") and not address.startswith("127."):
        told = f"its own name resolves to {found}, and GLOO_SOCKET_IFNAME is not set: Gloo cannot be reached"
        fix = "export GLOO_SOCKET_IFNAME=IFACE on every node"
        yield Finding("network", "own_name", FAIL, (host,), told, "an address that the other nodes reach", fix)


def oom_kills(path: Path = _VMSTAT) -> int:
    """Processes that the kernel's OOM killer has ended since the machine started, in any control group."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
