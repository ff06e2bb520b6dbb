"""Findings of ordered pairs of nodes: ports, MTU, clocks, latency, bandwidth, retransmits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from fleet_train.doctor.facts import Datagrams, Echo, Examination, PortTry, Stream
from fleet_train.doctor.judge.finding import FAIL, PASS, WARN, Finding, rate

GROUP = "network"
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


def findings(examined: Examination) -> Iterator[Finding]:
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
