"""The examination as text: a line per check, a matrix of the network; and the line after a failed job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fleet_train.cluster.installed import text_of
from fleet_train.doctor import judge, measure_apart, measure_machine
from fleet_train.doctor.facts import FAIL, PASS, WARN, Examination, Finding, Folder, exit_code, rate, verdict
from fleet_train.doctor.measure_network import own_address
from fleet_train.doctor.pairs import dial
from fleet_train.launch.node import Node
from fleet_train.log import columns

_DOCTOR_AFTER_FAILURE_SECONDS = 1.5
"""How long a connection to another node may take after a failed job: less, because the launcher waits for it."""

_MOST_SHOWN = 2


def lines(findings: Sequence[Finding], everything: bool) -> Iterator[str]:
    """The findings as lines: what is wrong first, then what was passed, in one line; with ``everything`` a line for
    each check, which the hosts that pass it share."""
    for level in (FAIL, WARN):
        yield from (finding.line for finding in findings if finding.level == level)
    passed: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.level == PASS:
            passed.setdefault(finding.id, []).append(finding)
    # What a folder of data holds, and how fast it is read, is what one asks for with --data.
    shown = [id for id, same in passed.items() if everything or same[0].group == "data"]
    yield from (_together(passed.pop(id)).line for id in shown)
    if passed:
        number = f"{len(passed)} checks" if len(passed) > 1 else "1 check"
        yield f"{PASS}  {number}: {', '.join(passed)} (--verbose: what was measured)"


def _together(same: Sequence[Finding]) -> Finding:
    if len(same) == 1:
        return same[0]
    texts = list(dict.fromkeys(finding.measured for finding in same))
    rest = f"; and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    first, hosts = same[0], list(dict.fromkeys(finding.hosts for finding in same))
    where = f"{len(hosts)} {'pairs' if len(first.hosts) == 2 else 'hosts'}"  # a host may have several folders
    of = first.hosts if len(hosts) == 1 else (where,)
    return Finding(first.group, first.id, PASS, of, "; ".join(texts[:_MOST_SHOWN]) + rest, first.threshold)


def matrix(examined: Examination) -> list[str]:
    """The network as a matrix: rows send, columns receive; below the bandwidth a small message's round trip."""
    speeds = {
        (stream.source, stream.target): stream.error or rate(stream.bytes_per_second)
        for report in examined.reports.values()
        for stream in report.streams
    }
    if not speeds:
        return []
    times = {}
    for index, report in examined.reports.items():
        for echo in report.echoes:
            times[index, echo.target] = times[echo.target, index] = f"{echo.median * 1e3:.2f} ms"
    nodes = sorted(examined.reports)
    rows = [["from \\ to", *(f"node {node}" for node in nodes)]]
    for source in nodes:
        rows.append([f"node {source}", *(_cell(speeds, source, target) for target in nodes)])
        rows.append(["", *(times.get((source, target), "") if source != target else "" for target in nodes)])
    return columns(rows)


def _cell(speeds: dict[tuple[int, int], str], source: int, target: int) -> str:
    return "-" if source == target else speeds.get((source, target), "not measured")


def as_json(examined: Examination, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """The complete result. It contains addresses and names of hosts, but no values of variables."""
    return {
        "verdict": verdict(findings, seconds),
        "exit_code": exit_code(findings),
        "seconds": round(seconds, 1),
        "nodes": list(examined.addresses),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(examined),
    }


_MOST_DIALLED = 64
_SHM_FULL = 0.05
"""Share of /dev/shm that is free: a small but empty one is not the cause."""
_VMSTAT = Path("/proc/vmstat")


class AfterFailure:
    """The line that a launcher adds to the report of a failed job: the finding that is most likely the cause.

    Created before the job starts, so that conditions from before are not attributed to it. Cheap: files of /proc, two
    file systems, one connection to each other node.
    """

    def __init__(self, node: Node, log_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._node = node
        self._log_dir = log_dir
        self._has_interface = node.interface is not None or "GLOO_SOCKET_IFNAME" in environ
        self._kills = oom_kills()

    def line(self) -> str:
        """The first finding that fails, as a line; empty for none. Takes a few seconds at most, and raises nothing."""
        try:
            finding = next((finding for finding in self._findings() if finding.level == FAIL), None)
        except (OSError, ValueError, RuntimeError):
            return ""
        if finding is None:
            return ""
        ips = ",".join(self._node.addresses)
        more = f"fleet_train doctor{f' --ips {ips}' if len(self._node.addresses) > 1 else ''}"
        return f"doctor: {finding.line}; more: {more}"

    def _findings(self) -> Iterator[Finding]:
        host = self._node.describe()
        memory = measure_machine.memory()
        kills = oom_kills() - self._kills
        if kills > 0:
            seen = judge.memory(host, replace(memory, oom_kills=kills), self._node.processes)
            yield replace(seen, level=FAIL)
        folder = measure_apart.nearest(self._log_dir)
        yield judge.space(host, Folder("logs", str(folder), measure_machine.space_of(folder)[1]))
        if memory.shm_free < _SHM_FULL * memory.shm_total:
            yield judge.shared_memory(host, memory, self._node.processes)
        yield from self._unreachable(host)
        if len(self._node.addresses) > 1 and not self._has_interface:
            yield from _name(host, self._node.address)

    def _unreachable(self, host: str) -> Iterator[Finding]:
        """Nodes that do not even refuse a connection: off, cut off, or behind a firewall."""
        port = self._node.store_port
        ports = dict.fromkeys(range(min(len(self._node.addresses), _MOST_DIALLED)), (port,))
        for attempt in dial(self._node, ports, _DOCTOR_AFTER_FAILURE_SECONDS):
            if attempt.outcome not in ("open", "refused"):
                there, measured = self._node.describe(attempt.target), f"a connection to port {port}: {attempt.outcome}"
                fix = f"ping {self._node.addresses[attempt.target]}"
                yield Finding("network", "port", FAIL, (host, there), measured, "answered or refused", fix)


def _name(host: str, address: str) -> Iterator[Finding]:
    resolved = own_address(os.uname().nodename)
    if resolved.startswith("127.") and not address.startswith("127."):
        measured = f"its own name resolves to {resolved}, and GLOO_SOCKET_IFNAME is not set: Gloo cannot be reached"
        fix = "export GLOO_SOCKET_IFNAME=IFACE on every node"
        yield Finding("network", "own_name", FAIL, (host,), measured, "an address that the other nodes reach", fix)


def oom_kills(path: Path = _VMSTAT) -> int:
    """Processes that the kernel's OOM killer has ended since the machine started, in any control group."""
    lines = text_of(path).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
