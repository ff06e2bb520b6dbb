"""What the rendezvous store remembers: scope by scope its values, meetings, failures, and who is gone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from fleet_train.cluster.store_wire import Json

# How long all members may stand at different meetings before that counts as a mistake and not as a coincidence.
_CROSSED_SECONDS = 1.0
# Reports beyond these add nothing: the first ones say who failed, and the job is ending.
_MOST_REPORTS = 256


@dataclass
class Gather:
    """One meeting: who has come with what, and who waits for the rest."""

    count: int
    first: int
    values: dict[int, Json] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    """What each has called in its script to get here, where it has said so."""
    waiting: list[asyncio.Future[Json]] = field(default_factory=list)
    out_of_patience: set[int] = field(default_factory=set)
    """Came, and went when their own bound was over: not to blame for those that came a moment after them."""

    @property
    def missing(self) -> list[int]:
        return [member for member in range(self.count) if member not in self.values]

    def answer(self, reply: Json) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(reply)
        self.waiting.clear()


class ScopeState:
    """What the server remembers. Touched by the event loop's thread only."""

    def __init__(self) -> None:
        self.values: dict[str, Json] = {}
        self.gathers: dict[tuple[str, str], Gather] = {}
        self.gone: dict[tuple[str, int], str] = {}
        self.failures: list[tuple[Json, float]] = []
        self.began = time.monotonic()

    @property
    def failure(self) -> Json:
        """The first report: the one that waiters are told."""
        return self.failures[0][0] if self.failures else None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def fail(self, report: Json) -> None:
        if len(self.failures) < _MOST_REPORTS:
            self.failures.append((report, round(self.seconds, 3)))
        if len(self.failures) == 1:
            self.review()

    def arrive(self, group: str, member: int, request: Json) -> asyncio.Future[Json]:
        key = (group, request["name"])
        gather = self.gathers.setdefault(key, Gather(request["count"], member))
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        gather.waiting.append(future)
        if gather.count != request["count"]:
            counts = [[gather.first, gather.count], [member, request["count"]]]
            self._finish(key, gather, {"error": "count", "counts": counts})
            return future
        gather.values[member] = request["value"]
        gather.calls[member] = str(request.get("call", ""))
        if not gather.missing:
            self._finish(key, gather, {"value": [gather.values[i] for i in range(gather.count)]})
        else:
            self._give_up_if_hopeless(key, gather)
            asyncio.get_running_loop().call_later(_CROSSED_SECONDS, self._give_up_if_crossed, group)
        return future

    def _give_up_if_crossed(self, group: str) -> None:
        """All members wait, but at different meetings: nobody will ever come, so say who stands where."""
        pending = {name: gather for (g, name), gather in self.gathers.items() if g == group}
        waiting = sorted(member for gather in pending.values() for member in gather.values)
        if len(pending) < 2 or waiting != list(range(max(gather.count for gather in pending.values()))):
            return
        where = [[member, name, gather.calls[member]] for name, gather in pending.items() for member in gather.values]
        for name, gather in pending.items():
            self._finish((group, name), gather, {"error": "crossed", "where": sorted(where)})

    def _finish(self, key: tuple[str, str], gather: Gather, reply: Json) -> None:
        gather.answer(reply)
        self.gathers.pop(key, None)

    def _give_up_if_hopeless(self, key: tuple[str, str], gather: Gather) -> None:
        if self.failure is not None:
            self._finish(key, gather, {"error": "failed", "failure": self.failure})
            return
        gone = [[member, self.gone[(key[0], member)]] for member in gather.missing if (key[0], member) in self.gone]
        if gone:
            call = next(filter(None, gather.calls.values()), "")
            self._finish(key, gather, {"error": "gone", "gone": gone, "call": call})

    def review(self) -> None:
        """Answer every meeting that can no longer be complete."""
        for key, gather in list(self.gathers.items()):
            self._give_up_if_hopeless(key, gather)

    def time_out(self, group: str, member: int, name: str) -> Json:
        """The answer to a member whose patience ended; it is withdrawn, so that a later round can start clean."""
        gather = self.gathers.get((group, name))
        missing = [one for one in gather.missing if one not in gather.out_of_patience] if gather else []
        if gather:
            gather.out_of_patience.add(member)
            gather.values.pop(member, None)
            gather.waiting = [future for future in gather.waiting if not future.done()]
            if not gather.values:
                del self.gathers[(group, name)]
        return {"error": "timeout", "missing": missing}


class Memory:
    """All scopes, and who is connected to which. Touched by the event loop's thread only (``members`` is also read)."""

    def __init__(self) -> None:
        self.scopes: dict[str, ScopeState] = {}
        self.members: dict[tuple[str, str, int], str] = {}
        """(scope, group, member) -> the machine that it has named."""

    def scope(self, name: str) -> ScopeState:
        return self.scopes.setdefault(name, ScopeState())

    def lose(self, machine: str, how: str) -> None:
        """The machine is silent: its members count as gone in every scope, whatever TCP still believes."""
        for key in [key for key, named in self.members.items() if named == machine]:
            self.depart(key, how)

    def depart(self, key: tuple[str, str, int], how: str) -> None:
        if self.members.pop(key, None) is not None:  # else it was lost already
            state = self.scope(key[0])
            state.gone[key[1:]] = how
            state.review()

    def end(self, key: tuple[str, str, int]) -> None:
        """The member's process has ended well: one that has never come will not come either."""
        state = self.scope(key[0])
        if key not in self.members and key[1:] not in state.gone:
            state.gone[key[1:]] = "left"
            state.review()
