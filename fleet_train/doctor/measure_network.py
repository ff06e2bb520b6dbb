"""Names, interfaces, routes, ports and proxies of this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet_train import timeouts
from fleet_train.cluster import network as addresses_here
from fleet_train.doctor.facts import Interface, NetworkFacts, Route

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CARDS = Path("/sys/class/net")
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def network(
    addresses: Sequence[str], index: int, held: Mapping[int, str], is_named: bool, environ: Mapping[str, str]
) -> NetworkFacts:
    """``held``: ports that could not be opened, and the processes that use them."""
    name = socket.gethostname()
    interfaces = addresses_here.interface_addresses()
    return NetworkFacts(
        host_name=name,
        resolved=own_address(name),
        is_named=is_named,
        interfaces=tuple(_interface(name, interfaces[name]) for name in sorted(interfaces)),
        routes={i: _route(address, interfaces) for i, address in enumerate(addresses) if i != index},
        held=dict(held),
        proxies=proxies_in_the_way(environ, [address for i, address in enumerate(addresses) if i != index]),
        wrong_interface_variables=wrong_interfaces(environ, interfaces, addresses[index]),
        outgoing_ports=outgoing_ports(),
    )


def own_address(name: str) -> str:
    """The address of this machine's own host name here; empty: none."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return ""


def _interface(name: str, addresses: tuple[str, ...]) -> Interface:
    card = _CARDS / name
    speed = _number(card / "speed") if (card / "device").exists() else 0
    return Interface(name, addresses, _number(card / "mtu"), max(0, speed))


def _route(address: str, interfaces: dict[str, tuple[str, ...]]) -> Route:
    source = addresses_here.address_towards(address)
    if source is None:
        return Route("", "")
    return Route(_interface_by_route(address) or addresses_here.interface_of(source, interfaces) or "", source)


def _interface_by_route(address: str) -> str:
    """Ask ``ip`` for the interface to an address: a packet may leave by another one than its source address's."""
    command = ["ip", "-o", "-4", "route", "get", address]
    match = re.search(r"\bdev (\S+)", addresses_here.output_of(command, timeouts.DOCTOR_IP_SECONDS))
    return match[1] if match else ""


def proxies_in_the_way(environ: Mapping[str, str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Names of the proxy variables that are set, unless no_proxy excludes every node. Values are never returned."""
    variables = {name.lower(): name for name, value in environ.items() if name.lower() in _PROXIES and value.strip()}
    excepted = [word.strip() for name in ("no_proxy", "NO_PROXY") for word in environ.get(name, "").split(",")]
    outside = [address for address in addresses if not addresses_here.is_loopback(address)]
    if not outside or all(_is_excepted(address, excepted) for address in outside):
        return ()
    return tuple(sorted(variables.values()))


def _is_excepted(address: str, excepted: Sequence[str]) -> bool:
    for word in filter(None, excepted):
        if word in ("*", address):
            return True
        try:
            if "/" in word and ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:
            continue
    return False


def wrong_interfaces(
    environ: Mapping[str, str], interfaces: Mapping[str, tuple[str, ...]], own: str
) -> tuple[str, ...]:
    """The variables that name no interface with an address here. NCCL's may be a list of prefixes, ``=``, ``^``."""
    wrong = []
    for variable in _INTERFACE_VARIABLES:
        value = environ.get(variable, "").strip()
        if not value or value.startswith("^"):
            continue
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        words = [word.strip().split(":")[0] for word in value.lstrip("=").split(",")]
        matches = [n for n in interfaces if any(n == word or (not is_exact and n.startswith(word)) for word in words)]
        if not any(own in interfaces[name] or addresses_here.is_loopback(own) for name in matches):
            wrong.append(variable)
    return tuple(wrong)


def outgoing_ports(path: Path = _PORT_RANGE) -> tuple[int, int]:
    """The range from which the kernel takes the ports of outgoing connections."""
    try:
        first, last = path.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
