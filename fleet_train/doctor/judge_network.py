"""Findings of the network: of each node its name, routes, ports and variables; nodes that did not connect; of ordered
pairs of nodes their ports, MTU, clocks, latency, bandwidth and retransmits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from fleet_train.doctor.facts import (
    ABSENT,
    FAIL,
    PASS,
    WARN,
    Datagrams,
    Echo,
    Examination,
    Finding,
    Network,
    PortTry,
    Stream,
    rate,
)

GROUP = "network"
SPEEDS_DIFFER = 0.5


def network_findings(examined: Examination) -> Iterator[Finding]:
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
    yield from of_pairs(examined)


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


CLOCK_WARN, CLOCK_FAIL = 1.0, 60.0
"""Seconds: logs of several nodes cannot be put in order; newer checkpoints look older than older ones."""
LATENCY_WARN, LATENCY_FAIL = 5e-3, 50e-3
"""Seconds of the fastest round trip (busy processors slow others down), of a network in one room; an
allreduce of n nodes waits 2 (n - 1) times for half of it."""
BANDWIDTH_SHARE, BANDWIDTH_LEAST, BANDWIDTH_ENOUGH = 0.5, 6.25e6, 312.5e6
"""Of the median of all pairs; bytes per second (50 Mb/s), below which no strategy helps a model of usual size; and
(2.5 Gb/s) beyond which pairs are not compared: one connection of one process then measures the processors."""
RETRANSMITS_WARN, RETRANSMITS_FAIL = 0.01, 0.05
"""Share of retransmitted segments: TCP's speed falls with the square root of the loss."""
FEWEST_SEGMENTS = 100


def of_pairs(examined: Examination) -> Iterator[Finding]:
    for index, report in examined.reports.items():
        yield from ports(examined, index, report.tries)
        yield from mtus(examined, index, report.datagrams)
        yield from clocks(examined, index, report.echoes)
        yield from latencies(examined, index, report.echoes)
    streams = [stream for report in examined.reports.values() for stream in report.streams]
    yield from bandwidths(examined, streams)
    yield from retransmits(examined, streams)


def ports(examined: Examination, index: int, tries: Iterable[PortTry]) -> Iterator[Finding]:
    """Of one node to each other one: closed ports by how they are closed, and addresses that are translated."""
    by_target: dict[int, list[PortTry]] = {}
    for one in tries:
        by_target.setdefault(one.target, []).append(one)
    for target, group in by_target.items():
        pair, there = (examined.host(index), examined.host(target)), examined.addresses[target]
        closed = [one for one in group if one.outcome != "open"]
        for outcome in dict.fromkeys(one.outcome for one in closed):
            named = ", ".join(str(one.port) for one in closed if one.outcome == outcome)
            told = f"port {named}: {outcome}"
            yield Finding(
                GROUP, "port", FAIL, pair, told, "every port of a job is open", _open(examined, index, closed)
            )
        translated = next((one.seen_as for one in group if one.outcome == "open" and one.seen_as), "")
        if translated:
            told = f"is seen there as {translated[:80]}, not as {examined.addresses[index]}"
            fix = "name the node by the address that others see, or give all nodes the same --job_secret_file"
            yield Finding(GROUP, "address", FAIL, pair, told, "the listed address", fix)
        if not closed:
            told = f"{there} answers at {len(group)} ports"
            yield Finding(GROUP, "port", PASS, pair, told, "every port of a job is open")


def _open(examined: Examination, source: int, closed: list[PortTry]) -> str:
    """The command to open them on the target: Gloo and NCCL use ports chosen by the kernel, so it admits the host."""
    address, target = examined.addresses[source], examined.host(closed[0].target)
    return f"on {target}: sudo iptables -I INPUT -p tcp -s {address} -j ACCEPT (ufw: sudo ufw allow from {address})"


def mtus(examined: Examination, index: int, found: Iterable[Datagrams]) -> Iterator[Finding]:
    for one in found:
        pair = (examined.host(index), examined.host(one.target))
        there = _mtu_at(examined, one.target, index)
        need = min(one.tried, there) if there else one.tried
        rule = f"packets of {need} bytes, as the interfaces are set"
        if not one.largest:
            told = "no UDP packet is answered: the MTU could not be measured"
            yield Finding(
                GROUP, "mtu", WARN, pair, told, rule, f"ping -M do -s {need - 28} {examined.addresses[one.target]}"
            )
        elif one.largest < need:
            is_told = bool(one.known) and one.known < need
            end = "; a router reports it, and TCP adapts" if is_told else "; no router reports it: large messages hang"
            told = f"packets of {one.largest} bytes arrive, of {need} do not{end}"
            fix = f"sudo ip link set dev {_interface(examined, index, one.target)} mtu {one.largest} on both nodes"
            yield Finding(GROUP, "mtu", WARN if is_told else FAIL, pair, told, rule, fix)
        elif there and there != one.tried:
            told = f"the interface's MTU is {one.tried} here and {there} there"
            fix = f"sudo ip link set dev {_interface(examined, index, one.target)} mtu {need} on both nodes"
            yield Finding(GROUP, "mtu", WARN, pair, told, "the same on both", fix)
        else:
            yield Finding(GROUP, "mtu", PASS, pair, f"packets of {one.largest} bytes arrive", rule)


def _interface(examined: Examination, index: int, target: int) -> str:
    network = examined.reports[index].facts.network
    route = network.routes.get(target) if network else None
    return route.interface if route and route.interface else "IFACE"


def _mtu_at(examined: Examination, index: int, towards: int) -> int:
    report = examined.reports.get(index)
    network = report.facts.network if report else None
    name = _interface(examined, index, towards) if network else ""
    return next((one.mtu for one in (network.interfaces if network else ()) if one.name == name), 0)


def clocks(examined: Examination, index: int, echoes: Iterable[Echo]) -> Iterator[Finding]:
    for one in echoes:
        off = max(0.0, abs(one.ahead) - one.uncertainty)
        level = FAIL if off > CLOCK_FAIL else WARN if off > CLOCK_WARN else PASS
        told = f"the first one's clock is {abs(one.ahead):.3f} s {'ahead' if one.ahead > 0 else 'behind'}"
        pair = (examined.host(index), examined.host(one.target))
        fix = "sudo timedatectl set-ntp true on both, then timedatectl timesync-status"
        yield Finding(GROUP, "clock", level, pair, told, f"{CLOCK_WARN:g} s", fix)


def latencies(examined: Examination, index: int, echoes: Iterable[Echo]) -> Iterator[Finding]:
    for one in echoes:
        fastest = 2 * one.uncertainty
        level = FAIL if fastest > LATENCY_FAIL else WARN if fastest > LATENCY_WARN else PASS
        there = examined.addresses[one.target]
        fix = f"mtr {there}; for inherently slow links: python -m fleet_train recommend"
        pair = (examined.host(index), examined.host(one.target))
        told = f"round trip {one.median * 1e3:.2f} ms, the fastest {fastest * 1e3:.2f} ms"
        yield Finding(GROUP, "latency", level, pair, told, f"{LATENCY_WARN * 1e3:g} ms", fix)


def bandwidths(examined: Examination, streams: Iterable[Stream]) -> Iterator[Finding]:
    streams = list(streams)
    known = [one.best for one in streams if not one.error]
    # Of two: the faster one, so that one slow direction shows.
    median = statistics.median_high(known) if known else 0.0
    for one in streams:
        pair = (examined.host(one.source), examined.host(one.target))
        there = examined.addresses[one.target]
        fix = f"iperf3 -s there, then iperf3 -c {there}; sudo ethtool IFACE on both: speed, duplex, errors"
        if one.error:
            told = "the transfer stalls" if one.error == "stalled" else f"no bytes could be sent: {one.error}"
            yield Finding(GROUP, "bandwidth", FAIL, pair, told, "flows", f"{fix}; a smaller MTU if mtu fails, too")
            continue
        least = max(BANDWIDTH_LEAST, min(BANDWIDTH_SHARE * median, BANDWIDTH_ENOUGH) if one.alone else 0.0)
        told = f"{rate(one.bytes_per_second)}, at best {rate(one.best)}"
        yield Finding(GROUP, "bandwidth", WARN if one.best < least else PASS, pair, told, rate(least), fix)


def retransmits(examined: Examination, streams: Iterable[Stream]) -> Iterator[Finding]:
    for one in streams:
        if one.segments < FEWEST_SEGMENTS:
            continue
        share = one.retransmits / one.segments
        level = FAIL if share > RETRANSMITS_FAIL else WARN if share > RETRANSMITS_WARN else PASS
        pair = (examined.host(one.source), examined.host(one.target))
        told = f"{share:.2%} of {one.segments} segments were retransmitted"
        fix = "ethtool -S IFACE | grep -iE 'err|drop' on both; change the cable or the switch's port"
        yield Finding(GROUP, "retransmits", level, pair, told, f"{RETRANSMITS_WARN:.0%}", fix)
