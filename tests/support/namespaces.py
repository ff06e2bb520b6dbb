"""Two machines on one: network namespaces joined by a veth pair. Needs root; always removed again."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Namespace:
    """One emulated machine: what to put before a command so that it runs there, and the address it has."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def set_link(self, state: str) -> None:
        """Pull the plug (``down``) or put it in again (``up``)."""
        _ip("-n", self.name, "link", "set", "eth0", state)


@functools.cache
def why_no_namespaces() -> str | None:
    """Why this process cannot make network namespaces, or None when it can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if shutil.which("ip") is None:
        return "needs the command 'ip' (Debian package iproute2)"
    name = f"ft-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Namespace, Namespace]]:
    """Namespaces 10.77.0.1 and 10.77.0.2 on one wire; the addresses exist inside them only."""
    tag = uuid.uuid4().hex[:6]
    machines = tuple(Namespace(f"ft-{tag}-{i}", f"10.77.0.{i}") for i in (1, 2))
    made: list[Namespace] = []
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
            made.append(machine)
        # Both ends are born inside the namespaces: nothing of it is ever visible on the host.
        one, two = machines
        _ip("-n", one.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", two.name)
        for machine in machines:
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", machine.name, "link", "set", "eth0", "up")
            _ip("-n", machine.name, "link", "set", "lo", "up")
        yield one, two
    finally:
        for machine in made:  # deleting a namespace deletes its end of the pair, and with it the other end
            _ip("netns", "delete", machine.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
