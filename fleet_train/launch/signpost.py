"""Launchers that wait for one another in vain because they were started with different flags: each finds the other.

Where a launcher's store listens follows from its own --started_port and --nproc_per_node, and who waits for whom from
its own list. So one that has waited for a moment also shows its flags at one of `PORTS`, which follow from nothing, and
looks there on the other machines. Two that wait with the same program and other flags learn of each other, and end.
So does one that a waiting one's store has refused: lists that differ behind their first machine make two jobs.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout, ScheduleMismatch
from fleet_train.launch.node import Node
from fleet_train.launch.rendezvous import difference_of
from fleet_train.launch.request import LaunchRequest

PORTS = range(28170, 28178)
"""The first free one: launchers of several jobs may wait on one machine. Below those of outgoing connections."""
_NAMESPACE, _CARD, _TOLD = "waiting", "card", "told "
_HOSTS_AT_A_TIME = 8
_LAST_WORD = 5
"""How many times longer a busy machine may take when it is told: whoever tells ends, and does not try again."""
_LOOKS = 2
"""How often in a row a difference is seen before it counts: a job's own launcher there may be about to start."""

Card = dict[str, Any]
"""What a waiting launcher shows: ``host``, ``program``, ``facts``; ``place``: what decides whom it meets, and where."""


def program_of(request: LaunchRequest) -> list[str]:
    """What tells the jobs of one machine apart: launchers of two programs do not wait for each other."""
    if request.is_module:
        return ["-m", request.command[0], str(Path.cwd())]
    return [str(Path(request.command[0]).resolve())]


class Signpost:
    """Of one launcher, until it has met the others. ``refuse`` is called while it waits."""

    def __init__(self, node: Node, access: Access, program: list[str], facts: Mapping[str, Any]) -> None:
        self._node = node
        self._access = replace(access, job="waiting launchers")
        place = [",".join(node.every_host), node.started_port, node.processes_in_words, access.job]
        self._card: Card = {"host": node.address, "program": program, "place": place, "facts": dict(facts)}
        self._server: StoreServer | None = None
        self.difference = ""
        """In what a launcher that waits for this one was started differently; empty: none is known."""
        self._seen: dict[str, int] = {}
        self._looked = 0
        self._turn = 0
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="fleet_train signpost", daemon=True)
        if len(node.addresses) > 1:
            self._watcher.start()

    def refuse(self) -> None:
        """Raises ScheduleMismatch once a launcher with other flags is known to wait for this one."""
        if self.difference:
            raise ScheduleMismatch(self.difference)

    def look_longer(self) -> None:
        """For a launcher that a store has refused: whoever waits there may wait for it, with other flags. Raises
        ScheduleMismatch then, once the other one is told, too."""
        until = time.monotonic() + timeouts.SIGNPOST_BUSY_SECONDS
        enough = self._looked + _LOOKS + 2
        while self._looked < enough and time.monotonic() < until and self._watcher.is_alive():
            self._watcher.join(timeouts.SIGNPOST_SECONDS / 10)
        self.refuse()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        with suppress(FleetTrainError, OSError):
            while not self._closing.wait(timeouts.SIGNPOST_SECONDS) and not self.difference:
                self._server = self._server or self._shown()
                self._look()
                self._looked += 1
        if self._server is not None:
            self._server.stop()

    def _shown(self) -> StoreServer | None:
        callers = Callers(self._node.every_host)
        for port in PORTS:
            with suppress(ClusterError):  # another job's is there
                server = StoreServer(self._node.address, port, self._access, callers, logs_refusals=False).start()
                server.publish(_NAMESPACE, _CARD, self._card)
                return server
        return None

    def _look(self) -> None:
        """One look at this machine's and some other machines' waiting launchers."""
        here = set()
        for port, card, told in self._cards(self._node.index):
            here.add(str(card["place"]))
            if self._server is not None and port == self._server.port:
                self._hear(told)
        for index in () if self.difference else self._asked():
            cards = [(port, card) for port, card, _ in self._cards(index) if card["program"] == self._card["program"]]
            if any(card["place"] == self._card["place"] for _, card in cards):
                continue
            for port, card in cards:
                key = f"{card['host']} {card['place']}"
                self._seen[key] = self._seen.get(key, 0) + 1
                if str(card["place"]) not in here and self._seen[key] >= _LOOKS:
                    self._show(index, port, self._card)
                    self._learn(card)
                    return

    def _asked(self) -> Iterator[int]:
        """The first node, and some others in turn."""
        others = [index for index in range(len(self._node.addresses)) if index != self._node.index]
        some = {(self._turn + each) % len(others) for each in range(min(len(others), _HOSTS_AT_A_TIME))}
        self._turn += _HOSTS_AT_A_TIME
        yield from sorted({others[each] for each in some} | ({0} & set(others)))

    def _cards(self, index: int, patience: int = 1) -> Iterator[tuple[int, Card, list[Card]]]:
        """Of a machine's launchers that wait: the port, the card, and the cards that others have shown there."""
        for port in PORTS:
            try:
                with self._visited(index, port, patience) as client:
                    card = client.get(_CARD)
                    told = [client.get(key) for key in client.keys(_TOLD)]
            except JoinTimeout as nobody:
                if not isinstance(nobody.__cause__, ConnectionRefusedError):
                    return  # the machine does not answer
                continue
            except (FleetTrainError, OSError):
                continue  # of a job with another secret, or another program's port
            if _is_card(card):
                yield port, card, list(filter(_is_card, told))

    @contextmanager
    def _visited(self, index: int, port: int, patience: int = 1) -> Iterator[StoreClient]:
        client = StoreClient.connect(
            f"{self._node.host(index)}:{port}/{_NAMESPACE}",
            os.getpid() % 10_000,
            group="visitor",
            timeout_seconds=0.0,
            watched=False,
            answer_seconds=patience * timeouts.ASK_LAUNCHER_SECONDS,
            dial_seconds=timeouts.ASK_LAUNCHER_SECONDS,
            access=self._access,
        )
        try:
            yield client
        finally:
            client.close()

    def _hear(self, told: list[Card]) -> None:
        """Another launcher has found this one, and shown its card; or one like this, and shown a third one's."""
        for card in told:
            ours = self._card["program"] == card["program"]
            if ours and self._card["place"] != card["place"] and not self.difference:
                self._learn(card)

    def _show(self, index: int, port: int, card: Card) -> None:
        """Show a card to a launcher: it learns whose that is, and need not have seen that one itself."""
        with suppress(FleetTrainError, OSError), self._visited(index, port, _LAST_WORD) as client:
            client.set(f"{_TOLD}{secrets.token_hex(4)}", card)

    def _pass_on(self, card: Card) -> None:
        """Show it to the other launchers like us, which may not see it any more: who learns of one ends."""
        for other in self._asked():
            for where, like_us, _ in list(self._cards(other, _LAST_WORD)):
                if like_us["place"] == self._card["place"] and like_us["program"] == self._card["program"]:
                    self._show(other, where, card)

    def _learn(self, card: Card) -> None:
        hosts = self._node.addresses
        there = self._node.describe(hosts.index(card["host"])) if card["host"] in hosts else card["host"]
        here, ours, theirs = self._node.describe(), self._card, card
        jobs = [{"--job_id": each["place"][-1]} for each in (ours, theirs)]  # by default it follows from the facts
        found = difference_of(there, here, ours["facts"], theirs["facts"]) or difference_of(there, here, *jobs)
        if found:  # the others first: this launcher ends with it
            self._pass_on(card)
            self.difference = found


def _is_card(value: Any) -> bool:
    kinds = {"host": str, "program": list, "place": list, "facts": dict}
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in kinds.items())
