"""Findings of one node's network: its name, routes, ports and variables; and nodes that did not connect."""

from __future__ import annotations

from collections.abc import Iterator

from fleet_train.doctor.facts import Examination, Network
from fleet_train.doctor.judge.finding import ABSENT, FAIL, PASS, WARN, Finding

GROUP = "network"
SPEEDS_DIFFER = 0.5


def findings(examined: Examination) -> Iterator[Finding]:
    several = len(examined.addresses) > 1
    if several:
        yield from absent(examined)
    for index, report in examined.reports.items():
        found = report.facts.network
        if found is None:
            continue
        yield ports_held(examined, index, found)
        yield ports_outgoing(examined, index, found)
        if several:
            yield name(examined, index, found)
            yield from routes(examined, index, found)
            yield proxies(examined, index, found)
            yield variables(examined, index, found)
    if several:
        yield from cards(examined)


def absent(examined: Examination) -> Iterator[Finding]:
    missing = [index for index in range(len(examined.addresses)) if index not in examined.reports]
    for index in missing:
        met = [examined.host(i) for i, report in examined.reports.items() if index in report.present]
        tried = next(
            (one for r in examined.reports.values() for one in r.tries if one.target == index and one.seen_as), None
        )
        why = f"; seen by {', '.join(met)}, but its report did not arrive" if met else ""
        why += f"; its answer: {tried.outcome}: {tried.seen_as}" if tried and not met else ""
        yield Finding(
            GROUP, ABSENT, FAIL, (examined.host(index),), f"did not connect{why}", "--join_timeout",
            f"ping {examined.addresses[index]}; start the same command there, with its address as --node_ip",
        )  # fmt: skip
    if not missing:
        hosts = tuple(examined.host(index) for index in examined.reports)
        yield Finding(GROUP, ABSENT, PASS, (f"all {len(hosts)} nodes",), "all connected")


def name(examined: Examination, index: int, found: Network) -> Finding:
    host, address = (examined.host(index),), examined.addresses[index]
    own = {one for interface in found.interfaces for one in interface.addresses}
    add = f"echo '{address} {found.host_name}' | sudo tee -a /etc/hosts"
    fix = f"sudo sed -i '/^127/ s/[[:space:]]{found.host_name}\\b//g' /etc/hosts && {add}"
    rule = "an address that the other nodes reach"
    if not found.resolved:
        told = f"its own name {found.host_name!r} cannot be resolved here"
        return Finding(GROUP, "own_name", WARN, host, told, rule, add)
    told = f"its own name {found.host_name!r} resolves to {found.resolved}"
    if found.is_named:
        return Finding(GROUP, "own_name", FAIL, host, f"{told} here, and the node list uses that name", rule, fix)
    if found.resolved.startswith("127.") and not address.startswith("127."):
        return Finding(GROUP, "own_name", WARN, host, told, rule, fix)
    if found.resolved not in own and not found.resolved.startswith("127."):
        return Finding(GROUP, "own_name", WARN, host, f"{told}, which is not an address of this machine", rule, fix)
    return Finding(GROUP, "own_name", PASS, host, told, rule)


def routes(examined: Examination, index: int, found: Network) -> Iterator[Finding]:
    host, address = examined.host(index), examined.addresses[index]
    wrong = False
    for other, route in found.routes.items():
        to, there = examined.host(other), examined.addresses[other]
        if not route.source:
            wrong = True
            told, fix = f"there is no route to {there}", f"ip route get {there}; sudo ip route add {there} dev IFACE"
            yield Finding(GROUP, "route", FAIL, (host, to), told, "a route", fix)
        elif route.source != address and not address.startswith("127."):
            wrong = True
            told = f"packets to {there} leave from {route.source} ({route.interface}), not from {address}"
            fix = f"sudo ip route replace {there} dev IFACE src {address}; or name this node by {route.source}"
            yield Finding(GROUP, "route", WARN, (host, to), told, "the listed address", fix)
    used = {route.interface for route in found.routes.values() if route.source}
    if len(used) > 1:
        wrong = True
        told = f"the routes to the nodes leave by different interfaces: {', '.join(sorted(used))}"
        fix = "ip route get ADDRESS for each node, and remove the wrong route: sudo ip route del"
        yield Finding(GROUP, "route", WARN, (host,), told, "one interface", fix)
    if not wrong:
        yield Finding(GROUP, "route", PASS, (host,), f"by {', '.join(sorted(used)) or 'no interface'}", "one interface")


def ports_held(examined: Examination, index: int, found: Network) -> Finding:
    host = (examined.host(index),)
    if not found.held:
        return Finding(GROUP, "ports_held", PASS, host, "the ports of a job are free here", "free")
    told = "; ".join(f"port {port} is in use by {who}" for port, who in sorted(found.held.items()))
    port = next(iter(sorted(found.held)))
    fix = f"sudo ss -ltnp 'sport = :{port}', and end that process; or choose another --started_port on every node"
    return Finding(GROUP, "ports_held", FAIL, host, told, "free", fix)


def ports_outgoing(examined: Examination, index: int, found: Network) -> Finding:
    first, last = found.outgoing_ports
    is_inside = first <= examined.started_port <= last
    return Finding(
        GROUP, "ports_range", WARN if is_inside else PASS, (examined.host(index),),
        f"first port {examined.started_port}, outgoing connections take {first} to {last}", "outside of these",
        f"choose --started_port below {first}: the kernel uses ports of that range for outgoing connections",
    )  # fmt: skip


def proxies(examined: Examination, index: int, found: Network) -> Finding:
    host = (examined.host(index),)
    if not found.proxies:
        return Finding(GROUP, "proxy", PASS, host, "no proxy between the nodes", "no_proxy lists all nodes")
    told = f"{', '.join(found.proxies)} set, and no_proxy does not list all nodes (values are not shown)"
    fix = f"export no_proxy=$no_proxy,{','.join(examined.addresses)}"
    return Finding(GROUP, "proxy", WARN, host, told, "no_proxy lists all nodes", fix)


def variables(examined: Examination, index: int, found: Network) -> Finding:
    host, wrong = (examined.host(index),), found.wrong_interface_variables
    rule = "an interface with the node's address"
    if not wrong:
        return Finding(GROUP, "interface_variables", PASS, host, "none names a wrong interface", rule)
    here = ", ".join(one.name for one in found.interfaces)
    told = f"{', '.join(wrong)} names no interface that has {examined.addresses[index]}; there are {here}"
    return Finding(GROUP, "interface_variables", FAIL, host, told, rule, f"unset {' '.join(wrong)}")


def cards(examined: Examination) -> Iterator[Finding]:
    """The speeds that real network cards negotiated with the switch."""
    speeds: dict[int, int] = {}
    for index, report in examined.reports.items():
        found = report.facts.network
        used = {route.interface for route in found.routes.values()} if found else set()
        for card in found.interfaces if found else ():
            if card.name in used and card.megabits:
                speeds[index] = min(card.megabits, speeds.get(index, card.megabits))
    fastest = max(speeds.values(), default=0)
    for index, speed in speeds.items():
        level = WARN if speed < SPEEDS_DIFFER * fastest else PASS
        told, fix = (
            f"its network card runs at {speed} Mb/s",
            "sudo ethtool IFACE; change the cable or the switch's port",
        )
        yield Finding(GROUP, "card", level, (examined.host(index),), told, f"{fastest} Mb/s, the fastest one's", fix)
