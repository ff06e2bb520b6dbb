"""Leader election of the job's launchers: the state that each reports, and which may lead after a loss. Pure.

A term belongs to one leader; the highest term wins. A leader that was unreachable (frozen, cut off) finds a higher one
and follows. Two sides of a network partition must not both continue: a side that cannot reach nodes which may be alive
continues only if it is the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Standing(str, Enum):
    FRESH = "fresh"
    """Has just started and knows no leader yet."""
    LOOKING = "looking"
    """Has lost its leader."""
    FOLLOWING = "following"
    LEADING = "leading"


@dataclass(frozen=True)
class Status:
    """The state that a launcher reports. ``leader`` and ``term`` are the last that it knew; -1: none."""

    state: Standing
    leader: int = -1
    term: int = -1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Status:
        """Raises ValueError, TypeError, KeyError for anything but the output of ``to_json``."""
        return cls(Standing(data["state"]), int(data["leader"]), int(data["term"]))


class Unheard(Enum):
    """Why a launcher has not reported its state."""

    DEAD = "nothing listens there: its launcher has ended, and its ranks with it"
    SILENT = "it may be alive behind a broken network, or frozen"
    DEAF = "it is alive and does not know our address yet: our name had another one"


Heard = Mapping[int, Status | Unheard]


def leader_among(heard: Heard, term: int) -> int | None:
    """The node that reports itself as leader with this term or a later one."""
    leading = [
        (status.term, index)
        for index, status in heard.items()
        if isinstance(status, Status) and status.state is Standing.LEADING and status.term >= term
    ]
    return max(leading)[1] if leading else None


def is_at_work(heard: Heard) -> bool:
    """Whether some launcher has known a leader: then the job started without the caller."""
    return any(isinstance(status, Status) and status.term >= 0 for status in heard.values())


def elected(me: int, term: int, heard: Heard, last_nodes: Iterable[int], nodes: int) -> int | None:
    """The term with which ``me`` may lead now; None while it may not.

    ``last_nodes``: the nodes of the attempt in which the leader was lost. The first living node of the list leads, once
    all reachable nodes have lost their leader, and no larger side may be alive elsewhere. Each of ``nodes`` has terms
    of its own (its number, and so many more each time): two that are elected one after the other never have the same,
    also if the first one was frozen before anybody had heard of it.
    """
    others = [index for index in last_nodes if index != me]
    alive = {i: status for i in others if isinstance(status := heard.get(i, Unheard.SILENT), Status)}
    members = {index: status for index, status in alive.items() if status.state is not Standing.FRESH}
    if any(status.state is not Standing.LOOKING for status in members.values()) or any(index < me for index in members):
        return None
    away = silent(heard, others)
    if not may_go_on({me, *members}, away, set(others) - members.keys() - away):
        return None
    least = 1 + max([term, *(status.term for status in members.values())])
    return least + (me - least) % nodes


def silent(heard: Heard, nodes: Iterable[int]) -> set[int]:
    return {index for index in nodes if heard.get(index, Unheard.SILENT) in (Unheard.SILENT, Unheard.DEAF)}


def may_go_on(here: set[int], silent: set[int], dead: set[int]) -> bool:
    """Whether these nodes may continue without those that are silent: the larger side, or of two halves the one with
    the first node. Nodes that are known to be dead, or have been started again, count for the other side: it may have
    gone on with them before. Where nobody is silent there is no other side."""
    other = silent | dead
    return not silent or len(here) > len(other) or (len(here) == len(other) and min(here) < min(other))
