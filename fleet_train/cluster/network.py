"""The addresses, interfaces and ports of this machine, from the operating system, and the output of its tools."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet_train.cluster.cluster import NO_HOST, may_be_host
from fleet_train.errors import ClusterError

# Any port works: connecting a UDP socket sends nothing, it only makes the kernel choose a route.
_ANY_PORT = 9
_LISTENS = "0A"  # in /proc/net/tcp
_NO_WAY = (errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENETUNREACH)


@dataclass(frozen=True)
class PortOwner:
    """The process that listens on a port; ``pid`` is None when it belongs to another user."""

    pid: int | None
    program: str | None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"process {self.pid} ({self.program or 'name unknown'})"


def output_of(command: Sequence[str], seconds: float) -> str:
    """What a tool prints; empty if it is not installed, fails, or does not end in that time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """IPv4 addresses per network interface, for example ``{"lo": ("127.0.0.1",), "eth0": ("10.0.0.2",)}``."""
    import psutil  # 30 ms: not for --help

    interfaces = {
        name: tuple(entry.address for entry in entries if entry.family == socket.AF_INET)
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in interfaces.items() if addresses}


def local_addresses() -> tuple[str, ...]:
    """Every IPv4 address of this machine, the loopback ones last."""
    addresses = [address for group in interface_addresses().values() for address in group]
    return tuple(sorted(addresses, key=is_loopback))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_local(address: str, addresses: Iterable[str]) -> bool:
    """Whether ``address`` is one of this machine's, which includes all of 127.0.0.0/8."""
    return is_loopback(address) or address in addresses


def resolve(host: str) -> str:
    """The IPv4 address of a host name or of an address in text form.

    Raises ClusterError for an IPv6 address, for something that is neither, and for an unknown name.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _look_up(host)
    if address.version == 6:
        raise ClusterError(
            f"{host} is an IPv6 address; Paddle's launcher splits host:port at the first colon, so give the node's "
            "IPv4 address or a host name that has one"
        )
    if address.is_unspecified or address.is_multicast:
        raise ClusterError(f"{host} is not the address of a machine; give the IPv4 address of each node")
    return str(address)


def is_known(host: str) -> bool:
    """Whether a host name, or an address, can be resolved here now."""
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError):
        return False
    return True


def _look_up(host: str) -> str:
    if not host:
        raise ClusterError("an empty text is neither an IPv4 address nor a host name; give the node's address")
    if host.replace(".", "").isdigit():
        raise ClusterError(f"{host!r} is not an IPv4 address (four numbers from 0 to 255 with dots between them)")
    if not may_be_host(host):
        raise ClusterError(f"{host!r} {NO_HOST}; give the node's address")
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ClusterError(
            f"{host!r} is neither an IPv4 address nor a host name that this machine can resolve ({error}); "
            "give the address, or add the name to /etc/hosts on every node"
        ) from None


def address_towards(address: str) -> str | None:
    """The local address that the kernel would send from to reach ``address``; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        source: str = probe.getsockname()[0]
        return source


def connect_from(source: str, host: str, port: int, timeout_seconds: float) -> socket.socket:
    """A TCP connection from this machine's address ``source`` (empty: any), so that the other side recognizes the node.

    From any address where no connection can start from that one: it is not this machine's (behind network address
    translation), or it is a loopback address and the destination is another machine. Raises OSError.
    """
    if not may_be_host(host):
        raise OSError(f"{host!r} {NO_HOST}")
    if source:
        try:
            return socket.create_connection((host, port), timeout_seconds, (source, 0))
        except OSError as error:
            if error.errno not in _NO_WAY and not isinstance(error, socket.gaierror):
                raise
    return socket.create_connection((host, port), timeout_seconds)


def interface_of(address: str, interfaces: dict[str, tuple[str, ...]]) -> str | None:
    """The interface that carries ``address``; the loopback interface for all of 127.0.0.0/8."""
    for name, addresses in interfaces.items():
        if address in addresses:
            return name
    if is_loopback(address):
        return next((name for name, group in interfaces.items() if any(map(is_loopback, group))), None)
    return None


def interface_towards(address: str) -> str | None:
    """The interface on the route to ``address``; None without a route."""
    source = address_towards(address)
    return interface_of(source, interface_addresses()) if source else None


def interface_variables(interface: str) -> dict[str, str]:
    """What makes Gloo and NCCL use an interface. NCCL takes a bare name for the beginning of names: eth1 also for
    eth10."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def port_is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now. Connections of a past job in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)  # two sockets may be bound with SO_REUSEADDR, only one may listen
        except OSError:
            return False
        return True


def free_port(address: str) -> int:
    """A port of this machine without a listener now."""
    with socket.socket() as holder:
        holder.bind((address, 0))
        return int(holder.getsockname()[1])


def connections_at(endpoints: Iterable[tuple[str, int]]) -> frozenset[str]:
    """This machine's TCP connections from or to these addresses and ports, also those that ended less than a minute ago
    (TIME_WAIT); without listening sockets."""
    wanted = {f"{socket.inet_aton(address)[::-1].hex().upper()}:{port:04X}" for address, port in endpoints}
    connections = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as lines:
            for line in lines:
                # Of an IPv6 address the last 32 bits are the IPv4 address that it maps.
                local, remote, state = (word[-13:] for word in line.split()[1:4])
                if state != _LISTENS and not wanted.isdisjoint((local, remote)):
                    connections.add(f"{local} {remote}")
    return frozenset(connections)


def port_owner(port: int, address: str | None = None) -> PortOwner:
    """The process that listens on ``port`` (on ``address``, or on all addresses); see PortOwner for the limits."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp4") + psutil.net_connections(kind="tcp6")
    except (psutil.AccessDenied, OSError):
        return PortOwner(None, None)
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or connection.laddr.port != port:
            continue
        if address not in (None, connection.laddr.ip) and connection.laddr.ip not in ("0.0.0.0", "::"):
            continue
        if connection.pid:
            return PortOwner(connection.pid, _program_name(connection.pid))
    return PortOwner(None, None)


def _program_name(pid: int) -> str | None:
    """The name of a program only: its arguments may contain secrets."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None
