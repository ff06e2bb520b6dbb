"""Doctors in network namespaces that play machines, each with its own host name, hosts file and folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Ended, Job, clean_environ, python
from tools.lab import Lab, Node

Two = Sequence[Node]

WHOLE_SECONDS = 60.0
"""What the doctor promises."""
PORT = 6170


@dataclass(frozen=True)
class Patient:
    """How one machine differs. ``shell``: run as root in its namespaces, before the doctor; may end with ``;``."""

    shell: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    before: Sequence[str] = ()
    """What the doctor's command is put behind: ``prlimit ...``."""
    hosts: str = ""
    """Its /etc/hosts; empty: its name means its address."""


HEALTHY = Patient()


@pytest.fixture
def two() -> Iterator[Two]:
    with Lab(2, "none") as lab:
        yield lab.nodes


@dataclass(frozen=True)
class Told:
    """What one doctor has printed."""

    ended: Ended
    made: dict[str, Any]

    def findings(self, id: str, *levels: str) -> list[dict[str, Any]]:
        return [one for one in self.made["findings"] if one["id"] == id and (not levels or one["level"] in levels)]

    def hosts(self, id: str, *levels: str) -> list[tuple[str, ...]]:
        return [tuple(one["hosts"]) for one in self.findings(id, *levels)]

    @property
    def alarms(self) -> list[str]:
        """Every WARN and FAIL, but that the processors of the machine that plays all nodes are busy."""
        return [f"{one['id']} {one['hosts']}" for one in self.made["findings"] if self._is_alarm(one)]

    @staticmethod
    def _is_alarm(one: Mapping[str, Any]) -> bool:
        return bool(one["level"] != "PASS" and one["id"] != "busy")


def host(node: int, machines: Sequence[Node]) -> str:
    return f"node {node} ({machines[node].address})"


def command(machine: Node, node: int, patient: Patient, folder: Path, flags: Sequence[str]) -> list[str]:
    """The doctor in the machine's namespaces; mounts and the host name are of this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts = folder / "hosts"
    hosts.write_text(patient.hosts or f"127.0.0.1 localhost\n{machine.address} node{node}\n")
    shell = f"hostname node{node}; mount --bind {shlex.quote(str(hosts))} /etc/hosts; {patient.shell}\n" + 'exec "$@"'
    doctor = [*patient.before, *python("-m", "fleet_train", "doctor", *flags, *patient.arguments)]
    return [*machine.prefix, "unshare", "--mount", "--uts", "sh", "-ec", shell, "sh", *doctor]


def examine(
    folder: Path,
    machines: Sequence[Node],
    patients: Sequence[Patient],
    *flags: str,
    names: Sequence[str] = (),
    start: Sequence[int] | None = None,
) -> list[Told]:
    """Run the same command on every machine (or on those of ``start``) to its end, which comes in time."""
    ips = ",".join(names or [machine.address for machine in machines])
    chosen = list(range(len(machines)) if start is None else start)
    with Job(folder) as job:
        for node in chosen:
            here = folder / f"node{node}"
            own = names[node] if names else machines[node].address
            flags_here = ("--ips", ips, "--node_ip", own, "--json", *flags)
            doctor = command(machines[node], node, patients[node], here, flags_here)
            environ = clean_environ({"PYTHONDONTWRITEBYTECODE": "1"}) | dict(patients[node].environ)
            job.start(f"node{node}", ["sh", "-c", '"$@" > printed.json', "sh", *doctor], environ, cwd=here)
        ended = job.wait(timeout_seconds=WHOLE_SECONDS)
        assert [one.name for one in ended if one.killed] == [], job.report()
        assert job.orphans() == []
    return [_told(one, folder / f"node{node}" / "printed.json") for node, one in zip(chosen, ended, strict=True)]


def _told(ended: Ended, printed: Path) -> Told:
    text = printed.read_text()
    assert text, ended.output
    return Told(ended, json.loads(text))
