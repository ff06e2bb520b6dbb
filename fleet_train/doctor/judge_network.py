"""Findings of the network: of each node its name, routes, ports and variables; nodes that did not connect; of ordered
pairs of nodes their ports, MTU, clocks, latency, bandwidth and retransmits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from fleet_train.doctor.facts import (
    ABSENT,
    FAIL,
    PASS,
    WARN,
    Datagrams,
    Echo,
    Examination,
    Finding,
    NetworkFacts,
    PortTry,
    Stream,
    level_above,
    rate,
)

SPEEDS_DIFFER = 0.5
_LEAST_MTU = 1280
"""The least MTU in bytes: a smaller one ends IPv6 on an interface."""
CLOCK_WARN, CLOCK_FAIL = 1.0, 60.0
"""Seconds: logs of several nodes cannot be put in order; newer checkpoints look older than older ones."""
LATENCY_WARN, LATENCY_FAIL = 5e-3, 50e-3
"""Seconds of the fastest round trip (busy processors slow others down), of a network in one room; an
allreduce of n nodes waits 2 (n - 1) times for half of it."""
BANDWIDTH_SHARE, BANDWIDTH_LEAST, BANDWIDTH_ENOUGH = 0.5, 6.25e6, 312.5e6
"""Bandwidths that are judged: a share of the median of all pairs; bytes per second (50 Mb/s), below which no strategy
helps a model of usual size; and (2.5 Gb/s) beyond which pairs are not compared: one connection of one process then
measures the processors."""
RETRANSMITS_WARN, RETRANSMITS_FAIL = 0.01, 0.05
"""Share of retransmitted segments: TCP's speed falls with the square root of the loss."""
FEWEST_SEGMENTS = 100

_finding = partial(Finding, "network")


def network_findings(examined: Examination) -> Iterator[Finding]:
    several = len(examined.addresses) > 1
    if several:
        yield from absent(examined)
    for index, report in examined.reports.items():
        network = report.facts.network
        if network is None:
            continue
        host = examined.host(index)
        yield ports_held(host, network, several=several)
        yield ports_outgoing(host, network, examined.started_port)
        if several:
            yield own_name(host, examined.addresses[index], network)
            yield from routes(examined, index, network)
            yield proxies(host, network, examined.addresses)
            yield variables(host, examined.addresses[index], network)
    if several:
        yield from cards(examined)
    for index, report in examined.reports.items():
        yield from ports(examined, index, report.tries)
        yield from (mtu(examined, index, datagrams) for datagrams in report.datagrams)
        yield from (clock(_pair(examined, index, echo.target), echo) for echo in report.echoes)
        for echo in report.echoes:
            yield latency(_pair(examined, index, echo.target), examined.addresses[echo.target], echo)
    streams = [stream for report in examined.reports.values() for stream in report.streams]
    yield from bandwidths(examined, streams)
    for stream in streams:
        if stream.segments >= FEWEST_SEGMENTS:
            yield retransmits(_pair(examined, stream.source, stream.target), stream)


def absent(examined: Examination) -> Iterator[Finding]:
    missing = [index for index in range(len(examined.addresses)) if index not in examined.reports]
    if missing and examined.difference:
        return  # it is told instead
    if examined.cut_off:
        yield _absent(examined, 0, f"{examined.cut_off}; nobody else can be asked: what follows is of this node alone")
        return
    for index in missing:
        is_present = index in examined.present
        measured = (
            "came, but its report did not arrive" if is_present else f"did not connect{_dialled(examined, index)}"
        )
        yield _absent(examined, index, measured)
    if not missing:
        yield _finding(ABSENT, PASS, (f"all {len(examined.reports)} nodes",), "all connected")


def _absent(examined: Examination, index: int, measured: str) -> Finding:
    address = examined.addresses[index]
    fix = f"ping {address}; start the same command there, with its address as --node_ip"
    return _finding(ABSENT, FAIL, (examined.host(index),), measured, "--join_timeout", fix)


def _dialled(examined: Examination, target: int) -> str:
    """How the others' connections to the ports of one that did not come have ended."""
    outcomes: dict[str, list[str]] = {}
    for index, report in examined.reports.items():
        for attempt in report.tries:
            if attempt.target == target:
                outcomes.setdefault(attempt.outcome, []).append(examined.host(index))
    told = "".join(
        f"; its ports, from {', '.join(dict.fromkeys(hosts))}: {outcome}" for outcome, hosts in outcomes.items()
    )
    if "open" in outcomes:
        told += (
            f" (if its doctor runs, {examined.host(0)}, which all connect to, does not admit it: see what it prints)"
        )
    return told


def own_name(host: str, address: str, network: NetworkFacts) -> Finding:
    name, resolved = f"its own name {network.host_name!r}", network.resolved
    # In words: no pattern finds a name in every /etc/hosts (aliases, comments, names within names).
    add = f"add the line '{address} {network.host_name}' to /etc/hosts there (sudoedit /etc/hosts)"
    fix = f"{add}, or list nodes by their addresses"
    is_loopback = resolved.startswith("127.")
    if not resolved:
        level, measured = WARN, f"{name} cannot be resolved here"
    else:
        level, measured = PASS, f"{name} resolves to {resolved}"
        fix = (
            f"if a line of /etc/hosts there gives {network.host_name} the address {resolved}, take that one name out "
            f"of it and leave its other names; {add}; or list nodes by their addresses"
        )
        if network.is_named:
            level, measured = FAIL, f"{measured} here, and the node list uses that name"
        elif is_loopback and not address.startswith("127."):
            level = WARN
        elif not is_loopback and not any(resolved in interface.addresses for interface in network.interfaces):
            level, measured = WARN, f"{measured}, which is not an address of this machine"
    rule = "an address that the other nodes reach"
    return _finding("own_name", level, (host,), measured, rule, fix if level != PASS else "")


def routes(examined: Examination, index: int, network: NetworkFacts) -> Iterator[Finding]:
    host, address = examined.host(index), examined.addresses[index]
    findings = []
    for other, route in network.routes.items():
        pair, there = (host, examined.host(other)), examined.addresses[other]
        if not route.source:
            fix = (
                f"ip route shows the routes of {host}: add one, by its router (via ROUTER) unless {there} is beside it"
            )
            findings.append(_finding("route", FAIL, pair, f"there is no route to {there}", "a route", fix))
        elif route.source != address and not address.startswith("127."):
            measured = f"packets to {there} leave from {route.source} ({route.interface}), not from {address}"
            fix = (
                f"name this node by {route.source} in the list on every node; or give the route that ip route get "
                f"{there} shows, with its router, the source {address}"
            )
            findings.append(_finding("route", WARN, pair, measured, "the listed address", fix))
    used = sorted({route.interface for route in network.routes.values() if route.source})
    if len(used) > 1:
        measured = f"the routes to the nodes leave by different interfaces: {', '.join(used)}"
        fix = "ip route get ADDRESS for each node; list the nodes by addresses of one network, or mend the wrong route"
        findings.append(_finding("route", WARN, (host,), measured, "one interface", fix))
    yield from findings or [
        _finding("route", PASS, (host,), f"by {', '.join(used) or 'no interface'}", "one interface")
    ]


def ports_held(host: str, network: NetworkFacts, *, several: bool) -> Finding:
    if not network.held:
        return _finding("ports_held", PASS, (host,), "the ports of a job are free here", "free")
    measured = "; ".join(f"port {port} is in use by {who}" for port, who in sorted(network.held.items()))
    other = "choose another --started_port on every node" if several else "launch without --started_port takes others"
    fix = (
        f"{other}; or sudo ss -ltnp 'sport = :{min(network.held)}' shows who it is: end it if it is a leftover of a job"
    )
    return _finding("ports_held", FAIL if several else WARN, (host,), measured, "free", fix)


def ports_outgoing(host: str, network: NetworkFacts, started_port: int) -> Finding:
    first, last = network.outgoing_ports
    return _finding(
        "ports_range", WARN if first <= started_port <= last else PASS, (host,),
        f"first port {started_port}, outgoing connections take {first} to {last}", "outside of these",
        f"choose --started_port below {first}: the kernel uses ports of that range for outgoing connections",
    )  # fmt: skip


def proxies(host: str, network: NetworkFacts, addresses: Sequence[str]) -> Finding:
    rule = "no_proxy lists all nodes"
    if not network.proxies:
        return _finding("proxy", PASS, (host,), "no proxy between the nodes", rule)
    measured = f"{', '.join(network.proxies)} set, and no_proxy does not list all nodes (values are not shown)"
    # What NO_PROXY alone excludes must stay: programs read no_proxy before it.
    fix = f'export no_proxy="${{no_proxy:-$NO_PROXY}},{",".join(addresses)}"'
    return _finding("proxy", WARN, (host,), measured, rule, fix)


def variables(host: str, address: str, network: NetworkFacts) -> Finding:
    wrong, rule = network.wrong_interface_variables, "an interface with the node's address"
    if not wrong:
        return _finding("interface_variables", PASS, (host,), "none names a wrong interface", rule)
    names = ", ".join(interface.name for interface in network.interfaces)
    measured = f"{', '.join(wrong)} names no interface that has {address}; there are {names}"
    return _finding("interface_variables", FAIL, (host,), measured, rule, f"unset {' '.join(wrong)}")


def cards(examined: Examination) -> Iterator[Finding]:
    """The speeds that real network cards negotiated with the switch."""
    speeds: dict[int, int] = {}
    for index, report in examined.reports.items():
        if report.facts.network is not None:
            used = {route.interface for route in report.facts.network.routes.values()}
            known = [card.megabits for card in report.facts.network.interfaces if card.name in used and card.megabits]
            speeds |= {index: min(known)} if known else {}
    fastest = max(speeds.values(), default=0)
    for index, speed in speeds.items():
        yield _finding(
            "card", WARN if speed < SPEEDS_DIFFER * fastest else PASS, (examined.host(index),),
            f"its network card runs at {speed} Mb/s", f"{fastest} Mb/s, the fastest one's",
            "sudo ethtool IFACE; change the cable or the switch's port",
        )  # fmt: skip


def _pair(examined: Examination, source: int, target: int) -> tuple[str, str]:
    return examined.host(source), examined.host(target)


def ports(examined: Examination, index: int, tries: Sequence[PortTry]) -> Iterator[Finding]:
    """Findings of one node's connections to each other one: closed ports by how they are closed."""
    own, rule = examined.addresses[index], "every port of a job is open"
    for target in dict.fromkeys(attempt.target for attempt in tries):
        if target not in examined.reports and not examined.cut_off:
            continue  # it is absent, with this
        pair = _pair(examined, index, target)
        attempts = [attempt for attempt in tries if attempt.target == target]
        closed: dict[str, list[str]] = {}
        for attempt in attempts:
            if attempt.outcome != "open":
                closed.setdefault(attempt.outcome, []).append(str(attempt.port))
        for outcome, numbers in closed.items():
            # Gloo and NCCL use ports chosen by the kernel, so the target must admit the host.
            fix = f"on {pair[1]}: sudo iptables -I INPUT -p tcp -s {own} -j ACCEPT (ufw: sudo ufw allow from {own})"
            if outcome == "refused" and examined.cut_off:
                fix = f"start the same command on {pair[1]}; if it runs there: {fix.partition(': ')[2]}"
            yield _finding("port", FAIL, pair, f"port {', '.join(numbers)}: {outcome}", rule, fix)
        if not closed:
            measured = f"{examined.addresses[target]} answers at {len(attempts)} ports"
            yield _finding("port", PASS, pair, measured, rule)


def mtu(examined: Examination, index: int, datagrams: Datagrams) -> Finding:
    target, largest, here = datagrams.target, datagrams.largest, datagrams.tried
    there = _mtu_at(examined, target, index)
    need = min(here, there) if there else here
    pair, rule = _pair(examined, index, target), f"packets of {need} bytes, as the interfaces are set"
    there_to = _interface(examined, target, index)
    fix = f"sudo ip link set dev {_interface(examined, index, target)} mtu {min(largest, need)} on {pair[0]}, and "
    fix += f"dev {there_to} on {pair[1]}"
    if largest < _LEAST_MTU:
        fix = f"tracepath -n {examined.addresses[target]} shows where they are lost: mend that, not the interfaces' MTU"
    if not largest:
        measured = "no UDP packet is answered: the MTU could not be measured"
        fix = f"ping -M do -s {need - 28} {examined.addresses[target]}"
        return _finding("mtu", WARN, pair, measured, rule, fix)
    if largest < need:
        is_reported = 0 < datagrams.known < need
        end = "a router reports it, and TCP adapts" if is_reported else "no router reports it: large messages hang"
        measured = f"packets of {largest} bytes arrive, of {need} do not; {end}"
        return _finding("mtu", WARN if is_reported else FAIL, pair, measured, rule, fix)
    if there and there != here:
        measured = f"the interface's MTU is {here} here and {there} there"
        return _finding("mtu", WARN, pair, measured, "the same on both", fix)
    return _finding("mtu", PASS, pair, f"packets of {largest} bytes arrive", rule)


def _interface(examined: Examination, index: int, target: int) -> str:
    """The name of the interface by which the route to the target leaves."""
    network = examined.reports[index].facts.network if index in examined.reports else None
    route = network.routes.get(target) if network else None
    return route.interface if route and route.interface else "IFACE"


def _mtu_at(examined: Examination, index: int, towards: int) -> int:
    """The MTU of the interface towards a node, in bytes; 0: unknown."""
    network = examined.reports[index].facts.network if index in examined.reports else None
    name = _interface(examined, index, towards)
    return next((card.mtu for card in (network.interfaces if network else ()) if card.name == name), 0)


def clock(pair: tuple[str, str], echo: Echo) -> Finding:
    off = max(0.0, abs(echo.ahead) - echo.uncertainty)
    return _finding(
        "clock", level_above(off, CLOCK_FAIL, CLOCK_WARN), pair,
        f"the first one's clock is {abs(echo.ahead):.3f} s {'ahead' if echo.ahead > 0 else 'behind'}",
        f"{CLOCK_WARN:g} s", "on both: timedatectl, and if no NTP service is active: sudo timedatectl set-ntp true",
    )  # fmt: skip


def latency(pair: tuple[str, str], there: str, echo: Echo) -> Finding:
    fastest = 2 * echo.uncertainty
    return _finding(
        "latency", level_above(fastest, LATENCY_FAIL, LATENCY_WARN), pair,
        f"round trip {echo.median * 1e3:.2f} ms, the fastest {fastest * 1e3:.2f} ms", f"{LATENCY_WARN * 1e3:g} ms",
        f"mtr {there}; for inherently slow links: fleet_train recommend",
    )  # fmt: skip


def bandwidths(examined: Examination, streams: Sequence[Stream]) -> Iterator[Finding]:
    known = [stream.best for stream in streams if not stream.error]
    # Of two: the faster one, so that one slow direction shows.
    median = statistics.median_high(known) if known else 0.0
    for stream in streams:
        pair, there = _pair(examined, stream.source, stream.target), examined.addresses[stream.target]
        fix = f"iperf3 -s there, then iperf3 -c {there}; sudo ethtool IFACE on both: speed, duplex, errors"
        if stream.error:
            is_stalled = stream.error == "stalled"
            measured = "the transfer stalls" if is_stalled else f"no bytes could be sent: {stream.error}"
            yield _finding("bandwidth", FAIL, pair, measured, "flows", f"{fix}; a smaller MTU if mtu fails, too")
            continue
        least = max(BANDWIDTH_LEAST, min(BANDWIDTH_SHARE * median, BANDWIDTH_ENOUGH))
        measured = f"{rate(stream.bytes_per_second)}, at best {rate(stream.best)}"
        yield _finding("bandwidth", WARN if stream.best < least else PASS, pair, measured, rate(least), fix)


def retransmits(pair: tuple[str, str], stream: Stream) -> Finding:
    share = stream.retransmits / stream.segments
    return _finding(
        "retransmits", level_above(share, RETRANSMITS_FAIL, RETRANSMITS_WARN), pair,
        f"{share:.2%} of {stream.segments} segments were retransmitted", f"{RETRANSMITS_WARN:.0%}",
        "ethtool -S IFACE | grep -iE 'err|drop' on both; change the cable or the switch's port",
    )  # fmt: skip
