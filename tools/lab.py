"""A network lab on one machine: nodes are network namespaces on a bridge, each with a link of limited rate.

    python tools/lab.py up --nodes 4 --rate 1gbit
    python tools/lab.py up --name far --rate 100mbit --rtt 20     # sites far from each other: a ping takes 20 ms
    python tools/lab.py exec 0 -- ping -c 1 10.78.0.2
    python tools/lab.py down

The bridge is in a namespace too: nothing of a lab is visible on the host, and its addresses exist only inside it.
Tests and benchmarks use ``with Lab(nodes, rate) as lab``; docs/launching.md has the rest.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.processes import leaving_on_signals

PREFIX = "ftlab-"
DEFAULT_NAME = "lab"
MAX_NODES = 200
_SWITCH = "switch"
_RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[kmg]?bit")
_NETWORK = re.compile(r"(?P<rate>[^-]+)(?:-(?P<rtt>[0-9]+(?:\.[0-9]+)?)ms)?")
_NAME = re.compile(r"[a-z0-9][a-z0-9.]{0,30}")
_OWNED = re.compile(r"pid([0-9]+)\.[0-9a-f]+")
_STOP_SECONDS = 3.0
# netem is missing in some kernels; tbf is everywhere. What passes at once after an idle moment is small, so that 100 kB
# take 0.9 of their time at the rate or more; it must exceed the piece that TCP hands over at once.
_LIMIT, _PIECE = "burst 10kb latency 50ms", 8192
_DISTANCE = Path(__file__).with_name("distance.py")
_MOST_RTT = 2000.0


class LabError(click.ClickException):
    """Why the lab cannot be made, and what to do about it; exit code 1."""


@dataclass(frozen=True)
class Node:
    """One emulated machine: its address, and what to put before a command so that it runs there."""

    index: int
    namespace: str

    @property
    def address(self) -> str:
        return f"10.78.0.{self.index + 1}"

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]


class Lab:
    """Nodes 0 .. ``node_num`` - 1 on one switch; what a node sends is limited to ``rate`` (tc's spelling, or "none").
    ``rtt``: milliseconds that a ping takes from node to node, half of them on each way.

    As a context manager it is taken down on leaving, at exit and on SIGTERM, SIGINT, SIGHUP. What ``kill -9`` leaves
    behind is recognised by the process id in its name and removed by the next lab or by ``down``.
    """

    def __init__(self, nodes: int, rate: str = "1gbit", name: str | None = None, rtt: float = 0.0) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise LabError(f"nodes={nodes}: a lab has 1 to {MAX_NODES} nodes")
        if rate != "none" and not _RATE.fullmatch(rate):
            raise LabError(f"rate={rate!r} is not a rate of tc such as 1gbit, 100mbit, 2.5gbit; 'none' means no limit")
        if not 0 <= rtt <= _MOST_RTT:
            raise LabError(f"rtt={rtt:g}: a lab's round trip takes 0 to {_MOST_RTT:g} ms")
        self.name = checked_name(name or f"pid{os.getpid()}.{uuid.uuid4().hex[:6]}")
        self.rate, self.rtt = rate, rtt
        self._distance: subprocess.Popen[str] | None = None
        self.nodes = [Node(index, f"{PREFIX}{self.name}-{index}") for index in range(nodes)]

    def up(self) -> None:
        """Make everything. Raises LabError if it cannot be made, with nothing left behind."""
        if reason := why_no_lab():
            raise LabError(reason)
        if found := namespaces(self.name):
            raise LabError(f"a lab '{self.name}' is up already ({len(found)} namespaces): down --name {self.name}")
        try:
            _make_namespace(self.switch)
            (self._make_distance if self.rtt else self._make_switch)()
            for node in self.nodes:
                self._make_node(node)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        take_down(self.name)
        if self._distance is not None:
            self._distance.communicate(timeout=_STOP_SECONDS)
            self._distance = None

    def pids(self, node: int) -> list[int]:
        """The process ids on a node."""
        return _processes([self.nodes[node].namespace])

    def set_link(self, node: int, state: str) -> None:
        """Take a node's link to the switch ``down``, or bring it ``up``. Raises LabError where the lab has an rtt."""
        if self.rtt:
            raise LabError("the links of a lab with an rtt stay up: take a lab without one")
        _run("ip", "-n", self.switch, "link", "set", f"port{node}", state)

    def set_hearing(self, node: int, hears: bool) -> None:
        """Drop all that arrives at a node, which can still send; or end that."""
        # The table of local addresses comes first, unless it is moved behind the rule.
        before, after, change = ("100", "0", "del") if hears else ("0", "100", "add")
        for rule in (f"add pref {after} lookup local", f"del pref {before}", f"{change} pref 10 iif eth0 blackhole"):
            _run("ip", "-n", self.nodes[node].namespace, "rule", *rule.split())

    def end_processes(self) -> None:
        """Kill everything that runs on a node; the lab stays up."""
        _end_processes([node.namespace for node in self.nodes])

    def __enter__(self) -> Lab:
        take_down_leftovers()
        self.up()
        atexit.register(self.down)
        self._signals = leaving_on_signals()
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.down()
        finally:
            atexit.unregister(self.down)
            self._signals.__exit__(None, None, None)

    @property
    def switch(self) -> str:
        return f"{PREFIX}{self.name}-{_SWITCH}"

    def _make_distance(self) -> None:
        command = [sys.executable, str(_DISTANCE), f"{self.rtt / 2e3:g}", *(f"port{node.index}" for node in self.nodes)]
        within = ["ip", "netns", "exec", self.switch, *command]
        self._distance = started = subprocess.Popen(
            within, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert started.stdout is not None
        assert started.stderr is not None
        if started.stdout.readline() != "ready\n":
            raise LabError(f"the lab's rtt needs taps: {started.stderr.read().strip().splitlines()[-1:]}")
        os.setpriority(os.PRIO_PROCESS, started.pid, -20)

    def _make_switch(self) -> None:
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")

    def _make_node(self, node: Node) -> None:
        _make_namespace(node.namespace)
        port, inside = f"port{node.index}", ("-n", node.namespace)
        # Both ends are made inside namespaces: they never appear on the host's own network.
        if self.rtt:
            _run("ip", "-n", self.switch, "link", "set", port, "netns", node.namespace, "name", "eth0")
        else:
            peer = ("peer", "name", port, "netns", self.switch)
            _run("ip", *inside, "link", "add", "eth0", "type", "veth", *peer)
            _run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
        _run("ip", *inside, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _run("ip", *inside, "link", "set", "eth0", "up")
        if self.rate != "none":
            _run("ip", *inside, "link", "set", "eth0", "gso_max_size", str(_PIECE))
            _run("tc", *inside, *f"qdisc add dev eth0 root tbf rate {self.rate} {_LIMIT}".split())


def network_of(word: str) -> tuple[str, float]:
    """Rate and round trip of ``1gbit``, ``100mbit-20ms``, ``unlimited``. Raises LabError for another form."""
    found = _NETWORK.fullmatch(word)
    if found is None:
        raise LabError(f"network={word!r} is not a rate of tc, or a rate and a ping's milliseconds (100mbit-20ms)")
    return {"unlimited": "none"}.get(found["rate"], found["rate"]), float(found["rtt"] or 0)


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise LabError(f"name={name!r}: a lab's name is 1 to 31 lower-case letters, digits and dots")
    return name


def why_no_lab() -> str | None:
    """Why this process cannot make a lab, or None when it can."""
    if os.geteuid() != 0:
        return f"the lab makes network namespaces, which needs root: sudo {shlex.join([sys.executable, *sys.argv])}"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"the lab needs {' and '.join(missing)}: apt-get install iproute2" if missing else None


def namespaces(name: str | None = None) -> list[str]:
    """The namespaces of one lab, or of all labs."""
    listed = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]
    prefix = PREFIX if name is None else f"{PREFIX}{name}-"
    return [each for each in listed if each.startswith(prefix)]


def lab_names() -> list[str]:
    """The names of all labs of this machine."""
    return sorted({each.removeprefix(PREFIX).rpartition("-")[0] for each in namespaces()})


def take_down(name: str) -> int:
    """Kill what runs inside a lab and remove it; returns the number of namespaces, 0 if there was no lab."""
    found = namespaces(name)
    _end_processes(found)
    for namespace in found:
        with suppress(LabError):  # another process removed it first
            _run("ip", "netns", "delete", namespace)
    return len(found)


def take_down_leftovers() -> list[str]:
    """Remove labs whose process is gone; returns their names."""
    leftovers = [name for name in lab_names() if (owned := _OWNED.fullmatch(name)) and not _is_alive(int(owned[1]))]
    for name in leftovers:
        take_down(name)
    return leftovers


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _end_processes(within: Sequence[str]) -> None:
    """A namespace with a process in it outlives its name, with its address and traffic: kill the processes first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_SECONDS
        if not (pids := _processes(within)):
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _processes(within) and time.monotonic() < deadline:
            time.sleep(0.05)


def _processes(within: Sequence[str]) -> list[int]:
    pids: list[int] = []
    for namespace in within:
        with suppress(LabError):
            pids += [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]
    return [pid for pid in pids if pid != os.getpid()]


def _make_namespace(namespace: str) -> None:
    _run("ip", "netns", "add", namespace)
    # IPv6 sends announcements of its own, whose bytes would be counted.
    command = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
    with suppress(LabError):
        _run("ip", "netns", "exec", namespace, "sh", "-c", command)
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if result.returncode != 0:
        raise LabError(f"{' '.join(command)}: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return result.stdout


_name_option = click.option(
    "--name", default=DEFAULT_NAME, show_default=True, help="Name of the lab; several can be up."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Emulate several machines on one: network namespaces on a switch, with links of limited rate. Needs root."""
    if reason := why_no_lab():
        raise LabError(reason)


@main.command("up")
@click.option("--nodes", default=2, show_default=True, help="Number of emulated machines.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate limit of each node, as tc spells it; or none.")
@click.option("--rtt", default=0.0, show_default=True, help="Milliseconds of a ping between two machines.")
@_name_option
def up_command(nodes: int, rate: str, rtt: float, name: str) -> None:
    """Make a lab and leave it up."""
    lab = Lab(nodes, rate, name, rtt)
    lab.up()
    for node in lab.nodes:
        click.echo(f"node {node.index}  {node.address}  {node.namespace}  {rate}")


@main.command("exec", context_settings={"ignore_unknown_options": True})
@_name_option
@click.argument("node", type=int)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(name: str, node: int, command: tuple[str, ...]) -> None:
    """Run COMMAND on a node; its exit code is the command's."""
    namespace = f"{PREFIX}{checked_name(name)}-{node}"
    if namespace not in namespaces(name):
        raise LabError(f"lab '{name}' has no node {node}; status lists the labs")
    os.execvp("ip", ["ip", "netns", "exec", namespace, *command])


@main.command("status")
def status_command() -> None:
    """List every lab, its nodes, addresses, limits and processes."""
    names = lab_names()
    if not names:
        click.echo("no lab is up")
    for name in names:
        for namespace in sorted(namespaces(name)):
            click.echo(_status_line(namespace))


def _status_line(namespace: str) -> str:
    processes = len(_processes([namespace]))
    if namespace.endswith(_SWITCH):
        return f"{namespace}  switch"
    address = re.search(r"inet (\S+)", _run("ip", "-n", namespace, "-4", "addr", "show", "dev", "eth0"))
    rate = re.search(r"rate (\S+)", _run("tc", "-n", namespace, "qdisc", "show", "dev", "eth0"))
    limit = rate[1].lower() if rate else "no limit"
    return f"{namespace}  {address[1] if address else 'no address'}  {limit}  {processes} processes"


@main.command("down")
@_name_option
@click.option("--all", "everything", is_flag=True, help="All labs of this machine, including those in use.")
def down_command(name: str, everything: bool) -> None:
    """Remove a lab with everything that runs in it, and what killed processes left behind."""
    names = lab_names() if everything else [checked_name(name)]
    removed = [each for each in names if take_down(each)] + take_down_leftovers()
    click.echo(f"removed: {', '.join(removed)}" if removed else "nothing to remove")


if __name__ == "__main__":
    main()
