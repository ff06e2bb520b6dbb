"""What one node measures with the others: ports, packets, round trips, clocks, and bytes in each direction.

Ports and packets at once; all else in rounds that follow from the list, each node in one pair at a time.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fleet_train import timeouts
from fleet_train.cluster.network import connect_from
from fleet_train.doctor.facts import Datagrams, Echo, PortTry, Stream
from fleet_train.doctor.sockets import Door, Sockets, outcome_of, received, sweep_packet_sizes, transfer
from fleet_train.launch.node import Node

_DOCTOR_PINGS_SECONDS = 0.4
"""How long round trips of small messages to one node are measured."""

_MOST_AT_ONCE = 64
_PINGS = 40
_READY, _PING, _NO_MORE = b"!", b"?", b"."
_CLOCK, _NUMBER = struct.Struct(">d"), struct.Struct(">I")


def dial(
    node: Node, ports: Mapping[int, Iterable[int]], seconds: float = timeouts.DOCTOR_CONNECT_SECONDS
) -> tuple[PortTry, ...]:
    """Connect from this node to all of these ports of other nodes, by node, at once."""

    def dial_one(other: int, port: int) -> PortTry:
        try:
            connect_from(node.address, node.addresses[other], port, seconds).close()
        except OSError as error:
            return PortTry(other, port, outcome_of(error))
        return PortTry(other, port, "open")

    wanted = [(other, port) for other in ports if other != node.index for port in ports[other]]
    with ThreadPoolExecutor(_MOST_AT_ONCE, "doctor dials") as pool:
        return tuple(pool.map(dial_one, *zip(*wanted, strict=True)) if wanted else ())


def sweep(node: Node, doors: Mapping[int, Door], mtus: Mapping[int, int]) -> tuple[Datagrams, ...]:
    """Packets of many sizes to the other nodes, at once. ``mtus``: of this node's interface to each of them."""

    def sweep_to(other: int) -> Datagrams:
        address, door, mtu = node.addresses[other], doors[other], mtus.get(other) or 1500
        return Datagrams(other, *sweep_packet_sizes(address, door.udp, node.address, door.secret, mtu), mtu)

    with ThreadPoolExecutor(_MOST_AT_ONCE, "doctor sweeps") as pool:
        return tuple(pool.map(sweep_to, (other for other in doors if other != node.index)))


class Rounds:
    """Latency, clocks and bandwidth of pairs, over one connection of each.

    ``tries``: of all nodes; the lower node of a pair calls if it reaches the other one, and keeps what is measured.
    ``late``: waits for the others at the beginning of a round; those that have not come.
    """

    def __init__(
        self,
        node: Node,
        own: Sockets,
        doors: Mapping[int, Door],
        tries: Mapping[int, Iterable[PortTry]],
        late: Callable[[int], set[int]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.echoes: list[Echo] = []
        self.streams: list[Stream] = []
        self._node = node
        self._own = own
        self._doors = doors
        self._open = {(by, each.target): each.port for by in tries for each in tries[by] if each.outcome == "open"}
        self._late = late
        self._clock = clock

    def measure(self, seconds: float) -> None:
        """Measure the pairs in these seconds, and at most one round longer."""
        own, nodes, began = self._node.index, sorted(self._doors), time.monotonic()
        flow = stream_seconds(len(nodes), seconds)
        for number in range(len(nodes)):
            if time.monotonic() - began > seconds:
                return
            late = self._late(number)
            pair = sorted((own, partner(nodes, own, number)))
            way = next((way for way in ((pair[0], pair[1]), (pair[1], pair[0])) if way in self._open), None)
            if way is None or late.intersection(pair):
                continue
            word = self._doors[way[1]].secret + _NUMBER.pack(number)
            if way[0] == own:
                self._call(way, word, flow)
            else:
                self._attend(word, flow)

    def _call(self, way: tuple[int, int], word: bytes, seconds: float) -> None:
        """Measure a pair as the one that connects: what fails keeps the rest of this pair from being measured."""
        own, other = way
        here, there = self._node.address, self._node.addresses[other]
        try:
            with connect_from(here, there, self._open[way], timeouts.DOCTOR_CONNECT_SECONDS) as sock:
                _prepare(sock)
                sock.sendall(word)
                if not _attends(sock):
                    return  # it has given this node up meanwhile
                self.echoes.append(self._echo(sock, other))
                sock.sendall(_NO_MORE)
                for way in ((own, other), (other, own)):
                    measured = transfer(sock, way[0] == own, seconds)
                    self.streams.append(Stream(way[0], way[1], *measured))
        except OSError as error:
            why = "stalled" if isinstance(error, TimeoutError) else str(error)[:120] or type(error).__name__
            self.streams.append(Stream(way[0], way[1], 0.0, error=why))

    def _attend(self, word: bytes, seconds: float) -> None:
        with contextlib.suppress(OSError), self._own.accept(word, timeouts.DOCTOR_ROUND_SECONDS) as sock:
            _prepare(sock)
            sock.sendall(_READY)
            while received(sock, 1) != _NO_MORE:
                sock.sendall(_CLOCK.pack(self._clock()))
            for sends in (False, True):
                transfer(sock, sends, seconds)

    def _echo(self, sock: socket.socket, target: int) -> Echo:
        """Median round trip of a small message; how far this node's clock is ahead, from the fastest one (as NTP)."""
        times: list[float] = []
        best = (float("inf"), 0.0)
        began = time.perf_counter()
        while len(times) < 3 or (len(times) < _PINGS and time.perf_counter() - began < _DOCTOR_PINGS_SECONDS):
            before, start = self._clock(), time.perf_counter()
            sock.sendall(_PING)
            (answer,) = _CLOCK.unpack(received(sock, _CLOCK.size))
            times.append(time.perf_counter() - start)
            best = min(best, (times[-1], before + times[-1] / 2 - answer))
        return Echo(target, statistics.median(times), best[1], best[0] / 2)


def _attends(sock: socket.socket) -> bool:
    try:
        return received(sock, 1) == _READY
    except OSError:
        return False


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(timeouts.DOCTOR_ANSWER_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def partner(nodes: Sequence[int], node: int, number: int) -> int:
    """The partner of a node in a round: each pair meets in one of as many rounds as there are nodes; else itself."""
    return nodes[(number - nodes.index(node)) % len(nodes)]


def stream_seconds(nodes: int, left_seconds: float) -> float:
    """Transfer time per direction of a pair, so that all rounds end within the remaining time."""
    return max(0.15, min(1.0, left_seconds / nodes / 2 - 0.1))
