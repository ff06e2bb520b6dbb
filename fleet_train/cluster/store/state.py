"""State that all connections of one server share: the rounds, which addresses may connect, and how many."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.members import MOST_MEMBERS, Pace
from fleet_train.cluster.store.relay import Parent, Relay
from fleet_train.cluster.store.rounds import Root, Round

# The most unauthenticated connections: beyond these the one that has been silent longest is closed.
_MOST_STRANGERS = 256
_CONNECTIONS_PER_MEMBER = 4
_MOST_ROUNDS = 4096
_BUFFER_BYTES = 1 << 16
_MOST_REFUSALS_SAID = 8
_INNER_SECONDS = 30.0


class Connection(Protocol):
    """The part of a session that counting sessions needs."""

    @property
    def stands_for_members(self) -> bool: ...

    def abort(self) -> None: ...


class ServerState:
    """Used by the event loop's thread only, except where noted."""

    def __init__(
        self,
        access: Access,
        callers: Callers | None,
        most_members: int = MOST_MEMBERS,
        say: Callable[[str], None] | None = None,
        begins_rounds: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self.access = access
        self.most_members = most_members
        self.clock = asyncio.get_running_loop().time
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        """What one connection has just sent."""
        self.rounds: dict[str, Round] = {}
        self._callers = callers if access.secret is None else None
        self._say = say
        self._pace = pace or Pace()
        self._begins_rounds = begins_rounds
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        self._known: set[Connection] = set()
        self._refused: set[str] = set()
        self._opening: dict[str, asyncio.Future[None]] = {}

    # connections

    def admit(self, session: Connection, address: str) -> bool:
        """Whether a connection from there may authenticate itself."""
        if self._callers is not None and not self._callers.hears(address):
            if not self._callers.may_change:
                self._say_refused(address)
            return False
        self.keep_stranger(session)
        return True

    def keep_stranger(self, session: Connection) -> None:
        """Count an unauthenticated connection, in place of the oldest one if there are many."""
        if len(self._strangers) >= _MOST_STRANGERS:
            self._strangers.popitem(last=False)[0].abort()
        self._strangers[session] = None

    @property
    def may_admit_later(self) -> bool:
        """Whether the accepted addresses may change."""
        return self._callers is not None and self._callers.may_change

    def _say_refused(self, address: str) -> None:
        if address not in self._refused and len(self._refused) < _MOST_REFUSALS_SAID:
            self._refused.add(address)
            if self._say is not None:
                self._say(f"refused a connection from {address}, which is not in the node list")

    def know(self, session: Connection) -> None:
        self._strangers.pop(session, None)
        self._known.add(session)
        if len(self._known) > _CONNECTIONS_PER_MEMBER * self.most_members + 64:
            session.abort()

    def forget(self, session: Connection) -> None:
        self._strangers.pop(session, None)
        self._known.discard(session)

    @property
    def has_members(self) -> bool:
        """Other threads may ask (a racy reading)."""
        return any(session.stands_for_members for session in self._known.copy())

    def close(self) -> None:
        for found in self.rounds.values():
            if isinstance(found, Relay):
                found.close()
        for session in [*self._strangers, *self._known]:
            session.abort()

    # rounds

    def find_round(self, name: str, *, is_relay: bool, then: Callable[[Round | None], None]) -> None:
        """Call ``then`` with the round of that name; None if it is not open.

        Members may begin a round if the server is not a relay, others wait until it is opened. A round within another
        (``0.selftest`` in ``0``) has its tree, and is opened on the first request for it.
        """
        outer = self.rounds.get(name.partition(".")[0])
        if name in self.rounds:
            then(self.rounds[name])
        elif isinstance(outer, Relay):
            parent = replace(outer.parent, round_name=name)
            if name not in self._opening:
                self._opening[name] = asyncio.ensure_future(self.open_relay(parent, _INNER_SECONDS))
                self._opening[name].add_done_callback(lambda _: self._opening.pop(name, None))
            self._opening[name].add_done_callback(lambda done: then(self._opened(name, done)))
        elif (outer is None and (is_relay or not self._begins_rounds)) or len(self.rounds) >= _MOST_ROUNDS:
            then(None)
        else:
            then(self.open_root(name))

    def _opened(self, name: str, opening: asyncio.Future[None]) -> Round | None:
        return None if opening.cancelled() or opening.exception() else self.rounds[name]

    def open_root(self, name: str) -> Root:
        """A round whose root is here. What members have begun is kept."""
        found = self.rounds.setdefault(name, Root(self.clock, self._pace))
        assert isinstance(found, Root)
        return found

    async def open_relay(self, parent: Parent, timeout_seconds: float) -> None:
        """A round whose root is elsewhere. Raises Refused if the parent does not accept this relay."""
        relay = Relay(self.clock, self._pace, parent)
        await relay.connect(timeout_seconds)
        self.rounds[parent.round_name] = relay

    def close_round(self, name: str) -> None:
        """Stop relaying a round and those within it; a round whose root is here stays readable."""
        for inner in [each for each in self.rounds if each.partition(".")[0] == name]:
            found = self.rounds[inner]
            if isinstance(found, Relay):
                found.close()
                del self.rounds[inner]

    def lose(self, machine: str, how: str) -> None:
        """The machine is silent: its members count as lost in every round."""
        for found in list(self.rounds.values()):
            if isinstance(found, Root):
                found.lose(machine, how)

    def present(self, group: str, name: str) -> set[int]:
        """The members that are connected now. Other threads may ask (a racy reading)."""
        found = self.rounds.get(name)
        return set(found.present.get(group, {}).copy()) if isinstance(found, Root) else set()
