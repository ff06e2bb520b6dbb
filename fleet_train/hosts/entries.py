"""The hosts of ``--hosts`` and ``--hosts_file``; pure text processing, nothing is looked up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_train.cluster.cluster import refuse_repeated
from fleet_train.errors import ClusterError

_ENTRY = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))"
    r"(?::(?P<processes>[1-9][0-9]{0,3}))?"
)
_SLOTS = re.compile(r"(\S+)\s+slots\s*=\s*([0-9]+)")
_FORM = "write HOST, USER@HOST or HOST:N for N processes there, and [fd00::1]:N for an IPv6 address"


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it. ``processes``: None: as many as ``--nproc_per_node`` says."""

    name: str
    user: str = ""
    processes: int | None = None

    @property
    def destination(self) -> str:
        """What ssh connects to."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read_hosts(text: str) -> tuple[Host, ...]:
    """``"pc1,me@pc2:2"`` -> its hosts, in their order. Raises ClusterError for another form, or a repetition."""
    return _hosts([part.strip() for part in text.split(",")], f"--hosts={text}")


def read_hosts_file(text: str, name: str) -> tuple[Host, ...]:
    """A file's hosts: one a line, as in ``--hosts`` or as ``pc2 slots=2``; ``#`` begins a comment."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    entries = [f"{slots[1]}:{slots[2]}" if (slots := _SLOTS.fullmatch(line)) else line for line in lines if line]
    if not entries:
        raise ClusterError(f"--hosts_file={name} names no host; {_FORM}, one a line")
    return _hosts(entries, f"--hosts_file={name}")


def _hosts(entries: Sequence[str], given: str) -> tuple[Host, ...]:
    hosts = []
    for entry in entries:
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ClusterError(f"{given}: {entry!r} is no host; {_FORM}")
        number = found["processes"]
        hosts.append(Host(found["v6"] or found["name"], found["user"] or "", int(number) if number else None))
    rule = "each host is listed once; HOST:2 starts two processes there"
    refuse_repeated(tuple(host.name for host in hosts), given, rule)
    return tuple(hosts)


def node_flags(hosts: Sequence[Host], addresses: Sequence[str], index: int) -> list[str]:
    """The flags with which the launcher of this host joins the job. A job of one host has no list."""
    numbers = {host.processes for host in hosts}
    same = numbers.pop() if len(numbers) == 1 else None
    flags = [] if same is None else [f"--nproc_per_node={same}"]
    if len(hosts) == 1:
        return flags
    nodes = [
        address if same is not None or host.processes is None else f"{address}:{host.processes}"
        for host, address in zip(hosts, addresses, strict=True)
    ]
    return [f"--cluster_node_ips={','.join(nodes)}", f"--node_ip={addresses[index]}", *flags]
