"""This node among the others: connects to them, measures the network between, and exchanges results."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fleet_train import timeouts
from fleet_train.cluster.store.access import Refused
from fleet_train.cluster.store.wire import ProtocolError
from fleet_train.doctor.channel import Channel, dialled, outcome_of, sweep_packet_sizes
from fleet_train.doctor.facts import Datagrams, Echo, PortTry, Stream
from fleet_train.doctor.participants import Participants
from fleet_train.doctor.responder import ReplicatedState, Responder
from fleet_train.log import logger

T = TypeVar("T")
ERRORS = (OSError, ProtocolError, Refused)


class PeerGroup:
    """The doctors of all nodes as this one sees them: whom it reaches, what it measures with them."""

    def __init__(self, participants: Participants, state: ReplicatedState, responder: Responder) -> None:
        self.participants = participants
        self.state = state
        self.responder = responder
        self.refusals: dict[int, PortTry] = {}
        """The answers of nodes that refuse this one."""
        self._ports: dict[int, int] = {}
        self._complete: set[int] = set()
        self.waits_in_vain: Callable[[], object] = lambda: False
        """Whether it is known that a missing node will not come."""

    def wait_for_nodes(self, seconds: float) -> tuple[int, ...]:
        """Wait until all nodes are present, or one of them times out. Returns the present nodes, this one included."""
        everybody = range(len(self.participants.addresses))
        self._sync_with(everybody)
        self.collect("here", everybody, seconds, is_joining=True)
        present = self.state.nodes("here")
        self.state.put(f"over/{self.participants.index}", sorted(present))
        self._sync_with(present)
        return tuple(sorted(self.state.nodes("here")))

    def collect(self, kind: str, nodes: Iterable[int], seconds: float, is_joining: bool = False) -> set[int]:
        """Exchange until all nodes have sent a value of this kind; returns those that have not within the time.

        ``is_joining``: nodes may still have to be started; the wait ends as soon as any node has ended its own.
        """
        wanted, began = set(nodes), time.monotonic()
        word_at = began + timeouts.DOCTOR_FIRST_WORD_SECONDS
        while True:
            missing, now = wanted - self.state.nodes(kind), time.monotonic()
            if not missing or now > began + seconds:
                return missing
            if is_joining and (self.state.nodes("over") or self.waits_in_vain()):
                return missing
            if is_joining and now > word_at:
                names = ", ".join(f"node {i} ({self.participants.addresses[i]})" for i in sorted(missing)[:5])
                logger.info(f"waiting for {names} ({began + seconds - now:.0f} s more)")
                word_at = now + timeouts.DOCTOR_NEXT_WORD_SECONDS
            self._sync_with(wanted)
            self.state.wait(timeouts.DOCTOR_PAUSE_SECONDS)

    def leave(self, present: Iterable[int], seconds: float) -> None:
        """Wait until all others have this node's values, at most this long."""
        deadline = time.monotonic() + seconds
        self._complete.clear()  # may date from before this node's last values
        others = set(present) - {self.participants.index}
        while (waiting := others - self._complete) and time.monotonic() < deadline:
            gone = self._sync_with(waiting)
            if gone >= waiting:
                return
            if waiting - self._complete:
                time.sleep(timeouts.DOCTOR_PAUSE_SECONDS)

    def _sync_with(self, nodes: Iterable[int]) -> set[int]:
        """Returns those that cannot be reached from here."""
        reached = self._each(nodes, self._sync)
        return {node for node, was_reached in reached.items() if not was_reached}

    def _sync(self, node: int) -> bool:
        for port in self._candidates(node):
            try:
                with self._dialled(node, port) as channel:
                    _, answer = channel.ask({"do": "sync"}, self.state.keys())
                    if not isinstance(answer, dict):
                        raise ProtocolError("the answer is empty")
                    self.state.add(dict(answer["values"]))
                    channel.ask({"do": "values"}, self.state.beyond(map(str, answer["keys"])))
                    if set(answer["keys"]) | set(answer["values"]) >= set(self.state.keys()):
                        self._complete.add(node)
                    self._ports[node] = port
                    return True
            except Refused as refusal:
                self.refusals[node] = PortTry(node, port, f"refused by the doctor ({refusal.kind})", str(refusal))
            except (*ERRORS, KeyError, TypeError, ValueError):
                self._ports.pop(node, None)
        return False

    def _dialled(self, node: int, port: int) -> contextlib.AbstractContextManager[Channel]:
        return dialled(self.participants.addresses[node], port, self.participants.access, self.participants.index)

    def _candidates(self, node: int) -> list[int]:
        """The port on which the node answered last; else all on which its doctor may listen."""
        if node in self._ports:
            return [self._ports[node]]
        answer = self.state.get(f"here/{node}") or {}
        ports = answer.get("open", self.participants.ports[node])
        return [*ports, *([answer["extra"]] if "extra" in answer else [])]

    def _each(self, nodes: Iterable[int], task: Callable[[int], T]) -> dict[int, T]:
        """For all of these nodes but this one, at once."""
        others = sorted(set(nodes) - {self.participants.index})
        if not others:
            return {}
        with ThreadPoolExecutor(len(others), "doctor dials") as pool:
            return dict(zip(others, pool.map(task, others), strict=True))

    def try_ports(self, present: Iterable[int]) -> tuple[PortTry, ...]:
        """Every port of every other node on which a doctor listens."""
        wanted = []
        for node in sorted(set(present) - {self.participants.index}):
            answer = self._reported(node)
            wanted += [(node, int(port)) for port in (*answer["open"], answer["extra"])]
        if not wanted:
            return ()
        with ThreadPoolExecutor(min(64, len(wanted)), "doctor dials") as pool:
            return tuple(pool.map(lambda pair: self._try(*pair), wanted))

    def _try(self, node: int, port: int) -> PortTry:
        try:
            with self._dialled(node, port) as channel:
                seen = str(channel.ask({"do": "who"})[0].get("seen_as", ""))[:60]
        except Refused as refusal:
            return PortTry(node, port, "another program" if refusal.kind == "job" else "open", str(refusal)[:300])
        except ERRORS as error:
            return PortTry(node, port, outcome_of(error))
        self._ports[node] = port
        return PortTry(node, port, "open", "" if seen == self.participants.address else seen)

    def sweep(self, present: Iterable[int], mtus: dict[int, int]) -> tuple[Datagrams, ...]:
        """``mtus``: of this node's interface to each other node."""

        def sweep_to(node: int) -> Datagrams:
            port, mtu = int(self._reported(node)["udp"]), mtus.get(node) or 1500
            address, source = self.participants.addresses[node], self.participants.access.source
            return Datagrams(node, *sweep_packet_sizes(address, port, source, self.responder.nonce, mtu), mtu)

        return tuple(self._each(present, sweep_to).values())

    def measure_pairs(self, present: Sequence[int], seconds: float) -> tuple[list[Echo], list[Stream]]:
        """Latency, clocks and bandwidth of the pairs that this node initiates: with higher nodes that it can reach, and
        with lower ones that could not reach it."""
        began = time.monotonic()
        flow = stream_seconds(len(present), seconds)
        echoes: list[Echo] = []
        transfers: list[Stream] = []
        for pairs in rounds(present):
            other = next((a + b - self.participants.index for a, b in pairs if self.participants.index in (a, b)), None)
            if other is None or not self._begins(other) or time.monotonic() - began > seconds:
                continue
            echo, both = self._measure(other, flow)
            echoes += [echo] if echo else []
            transfers += both
        return echoes, transfers

    def _begins(self, other: int) -> bool:
        if other not in self._ports:
            return False
        return other > self.participants.index or other not in self.responder.callers

    def _measure(self, other: int, seconds: float) -> tuple[Echo | None, list[Stream]]:
        own, port = self.participants.index, self._ports[other]
        echo: Echo | None = None
        with contextlib.suppress(*ERRORS), self._dialled(other, port) as channel:
            echo = _echo(channel, other, self.responder.clock)
        streams = []
        for sends, source, target in ((True, own, other), (False, other, own)):
            try:
                with self.responder.my_turn() as alone, self._dialled(other, port) as channel:
                    answer, _ = channel.ask({"do": "transfer", "sends": sends, "seconds": seconds})
                    measured = channel.transfer(sends, seconds)
                    streams.append(Stream(source, target, *measured, alone=alone and answer.get("ready") is True))
            except TimeoutError:
                streams.append(Stream(source, target, 0.0, error="stalled"))
            except ERRORS as error:
                streams.append(Stream(source, target, 0.0, error=str(error)[:120] or type(error).__name__))
        return echo, streams

    def _reported(self, node: int) -> dict[str, Any]:
        answer = self.state.get(f"here/{node}")
        complete = isinstance(answer, dict) and {"open", "extra", "udp"} <= answer.keys()
        return answer if complete else {"open": [], "extra": 0, "udp": 0}


_PINGS = 40


def _echo(channel: Channel, target: int, clock: Callable[[], float]) -> Echo:
    """Median round trip of a small message; how far this node's clock is ahead, from the fastest one (as NTP)."""
    times: list[float] = []
    best = (float("inf"), 0.0)
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < _PINGS and time.perf_counter() - began < timeouts.DOCTOR_PINGS_SECONDS):
        before, start = clock(), time.perf_counter()
        answer = channel.ask({"do": "ping"})[0].get("clock")
        took = time.perf_counter() - start
        if not isinstance(answer, (int, float)):
            raise ProtocolError("no clock")
        times.append(took)
        best = min(best, (took, before + took / 2 - answer))
    return Echo(target, statistics.median(times), best[1], best[0] / 2)


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, in as few rounds as possible (the circle method of tournaments); the smaller number first."""
    seats: list[int | None] = [*sorted(nodes)]
    if len(seats) % 2:
        seats.append(None)
    result = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result


def stream_seconds(nodes: int, left_seconds: float) -> float:
    """Transfer time per direction of a pair, so that all rounds end within the remaining time."""
    if nodes < 2:
        return 0.0
    number = len(rounds(range(nodes)))
    return max(0.15, min(1.0, left_seconds / number / 2 - 0.1))
