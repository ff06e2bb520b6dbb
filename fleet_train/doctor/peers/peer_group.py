"""This node among the others: connects to them, measures the network between, and exchanges results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from fleet_train.cluster.store.protocol.greeting import Refused
from fleet_train.cluster.store.protocol.wire import ProtocolError
from fleet_train.doctor.facts import Datagrams, Echo, PortTry, Stream
from fleet_train.doctor.participants import Participants
from fleet_train.doctor.peers import datagrams, pair
from fleet_train.doctor.peers.channel import dialled, outcome_of
from fleet_train.doctor.peers.replicated_state import ReplicatedState
from fleet_train.doctor.peers.responder import Responder
from fleet_train.doctor.peers.rounds import rounds, stream_seconds

T = TypeVar("T")
_PAUSE_SECONDS = 0.25
_SETTLE_SECONDS = 1.0
"""How long after the first node ends the rendezvous other nodes may still report their presence."""
ERRORS = (OSError, ProtocolError, Refused)


class PeerGroup:
    def __init__(self, participants: Participants, state: ReplicatedState, responder: Responder) -> None:
        self.participants = participants
        self.state = state
        self.responder = responder
        self.refusals: dict[int, PortTry] = {}
        """The answers of nodes that refuse this one."""
        self._ports: dict[int, int] = {}
        self._complete: set[int] = set()

    # rendezvous

    def wait_for_nodes(self, seconds: float, say: Callable[[str], None]) -> tuple[int, ...]:
        """Wait until all nodes are present, or one of them times out. Returns the present nodes, this one included."""
        deadline, word_at = time.monotonic() + seconds, time.monotonic() + 3.0
        everybody = set(range(len(self.participants.addresses)))
        while True:
            self._sync_with(everybody - {self.participants.index})
            missing = everybody - self.state.nodes("here")
            over = bool(self.state.nodes("over"))
            if not missing or over or time.monotonic() > deadline:
                break
            if time.monotonic() > word_at:
                named = ", ".join(f"node {i} ({self.participants.addresses[i]})" for i in sorted(missing)[:5])
                say(f"waiting for {named} ({max(0.0, deadline - time.monotonic()):.0f} s more)")
                word_at = time.monotonic() + 5.0
            self.state.wait(_PAUSE_SECONDS)
        present = tuple(sorted(self.state.nodes("here")))
        self.state.put(f"over/{self.participants.index}", list(present))
        self._sync_with(set(present) - {self.participants.index})
        return tuple(sorted(self.state.nodes("here")))

    def collect(self, kinds: Sequence[str], present: Iterable[int], seconds: float) -> set[int]:
        """Exchange until all present nodes have sent these; returns the nodes that have not within the time."""
        wanted, deadline = set(present), time.monotonic() + seconds
        while True:
            missing = {node for node in wanted if any(node not in self.state.nodes(kind) for kind in kinds)}
            if not missing or time.monotonic() > deadline:
                return missing
            self._sync_with(wanted - {self.participants.index})
            self.state.wait(_PAUSE_SECONDS)

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
                time.sleep(_PAUSE_SECONDS)

    def _sync_with(self, nodes: Iterable[int]) -> set[int]:
        """Returns those that cannot be reached from here."""
        reached = self._each(sorted(nodes), self._sync)
        return {node for node, was_reached in reached.items() if not was_reached}

    def _sync(self, node: int) -> bool:
        for port in self._candidates(node):
            try:
                with dialled(
                    self.participants.addresses[node], port, self.participants.access, self.participants.index
                ) as channel:
                    _, told = channel.ask({"do": "sync"}, self.state.keys())
                    if not isinstance(told, dict):
                        raise ProtocolError("the answer is empty")
                    self.state.take(dict(told["values"]))
                    channel.ask({"do": "tell"}, self.state.beyond(map(str, told["keys"])))
                    if set(told["keys"]) | set(told["values"]) >= set(self.state.keys()):
                        self._complete.add(node)
                    self._ports[node] = port
                    return True
            except Refused as refusal:
                self.refusals[node] = PortTry(node, port, f"refused by the doctor ({refusal.kind})", str(refusal))
            except (*ERRORS, KeyError, TypeError, ValueError):
                self._ports.pop(node, None)
        return False

    def _candidates(self, node: int) -> list[int]:
        """The port on which the node answered last; else all on which its doctor may listen."""
        if node in self._ports:
            return [self._ports[node]]
        told = self.state.get(f"here/{node}") or {}
        ports = told.get("open", self.participants.ports[node])
        return [*ports, *([told["extra"]] if "extra" in told else [])]

    def _each(self, nodes: Sequence[int], task: Callable[[int], T]) -> dict[int, T]:
        """For all nodes at once."""
        if not nodes:
            return {}
        with ThreadPoolExecutor(len(nodes), "doctor dials") as pool:
            return dict(zip(nodes, pool.map(task, nodes), strict=True))

    # measuring

    def try_ports(self, present: Iterable[int]) -> tuple[PortTry, ...]:
        """Every port of every other node on which a doctor listens."""
        wanted = []
        for node in sorted(set(present) - {self.participants.index}):
            told = self._reported(node)
            wanted += [(node, int(port)) for port in (*told["open"], told["extra"])]
        if not wanted:
            return ()
        with ThreadPoolExecutor(min(64, len(wanted)), "doctor dials") as pool:
            return tuple(pool.map(lambda pair: self._try(*pair), wanted))

    def _try(self, node: int, port: int) -> PortTry:
        try:
            with dialled(
                self.participants.addresses[node], port, self.participants.access, self.participants.index
            ) as channel:
                seen = str(channel.ask({"do": "who"})[0].get("seen_as", ""))[:60]
        except Refused as refusal:
            return PortTry(node, port, "another program" if refusal.kind == "job" else "open", str(refusal)[:300])
        except ERRORS as error:
            return PortTry(node, port, outcome_of(error))
        self._ports[node] = port
        return PortTry(node, port, "open", "" if seen == self.participants.address else seen)

    def sweep(self, present: Iterable[int], mtus: dict[int, int]) -> tuple[Datagrams, ...]:
        """``mtus``: of this node's interface to each other node."""

        def one(node: int) -> Datagrams:
            port, mtu = int(self._reported(node)["udp"]), mtus.get(node) or 1500
            address, source = self.participants.addresses[node], self.participants.access.source
            return Datagrams(node, *datagrams.sweep(address, port, source, self.responder.nonce, mtu), mtu)

        return tuple(self._each(sorted(set(present) - {self.participants.index}), one).values())

    def measure_pairs(self, present: Sequence[int], seconds: float) -> tuple[list[Echo], list[Stream]]:
        """Latency, clocks and bandwidth of the pairs that this node initiates: with higher nodes that it can reach, and
        with lower ones that could not reach it."""
        began = time.monotonic()
        flow = stream_seconds(len(present), seconds)
        echoes: list[Echo] = []
        found: list[Stream] = []
        for pairs in rounds(present):
            other = next((a + b - self.participants.index for a, b in pairs if self.participants.index in (a, b)), None)
            if other is None or not self._begins(other) or time.monotonic() - began > seconds:
                continue
            echo, both = self._measure(other, flow)
            echoes += [echo] if echo else []
            found += both
        return echoes, found

    def _begins(self, other: int) -> bool:
        if other not in self._ports:
            return False
        return other > self.participants.index or other not in self.responder.callers

    def _measure(self, other: int, seconds: float) -> tuple[Echo | None, list[Stream]]:
        own, address, port = self.participants.index, self.participants.addresses[other], self._ports[other]
        echo: Echo | None = None
        try:
            with dialled(address, port, self.participants.access, own) as channel:
                echo = pair.echo(channel, other, self.responder.clock)
        except ERRORS:
            pass
        both = []
        for outgoing in (True, False):
            source, target = (own, other) if outgoing else (other, own)
            try:
                with (
                    self.responder.my_turn() as alone,
                    dialled(address, port, self.participants.access, own) as channel,
                ):
                    found = pair.stream(channel, source, target, outgoing, seconds)
                    both.append(found if alone else replace(found, alone=False))
            except TimeoutError:
                both.append(Stream(source, target, 0.0, error="stalled"))
            except ERRORS as error:
                both.append(Stream(source, target, 0.0, error=str(error)[:120] or type(error).__name__))
        return echo, both

    def _reported(self, node: int) -> dict[str, Any]:
        told = self.state.get(f"here/{node}")
        complete = isinstance(told, dict) and {"open", "extra", "udp"} <= told.keys()
        return told if complete else {"open": [], "extra": 0, "udp": 0}
