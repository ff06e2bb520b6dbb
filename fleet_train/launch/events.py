"""The words of `job.step`: events, which say what came of an action, and actions, which a launcher carries out.

The last action of a step is the one that is waited for: `Ask`, `Follow`, `Lead`, `Look`, `Run`, `Wait` or `Finish`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleet_train.launch.attempts import Attempt, RunResult
from fleet_train.launch.election import Heard, Status

Decision = Mapping[str, Any]
"""The leader's: ``round``, ``nodes`` and ``restarts`` (how many there have been), or ``end`` and ``message``."""


# Events: what came of the last action, with the time on this machine's monotonic clock.


@dataclass(frozen=True)
class Woken:
    """At the beginning, and after a `Wait`."""

    now: float


@dataclass(frozen=True)
class Answered:
    """The other launchers' states, after an `Ask`; ``refusal``: why node 0's store has refused us."""

    now: float
    heard: Heard
    refusal: str = ""


@dataclass(frozen=True)
class Connected:
    """To the leader's store, which may be our own; ``connected`` is False if it does not answer, or has refused us:
    ``refusal`` says why."""

    now: float
    connected: bool = True
    refusal: str = ""


@dataclass(frozen=True)
class StoreSeen:
    """What the leader's store says, after a `Look`. ``here``: the nodes that are connected and ready, on the leader."""

    now: float
    decision: Decision | None = None
    here: frozenset[int] = frozenset()
    stopped: str | None = None
    """The message of a launcher that was stopped on purpose while no rank was running."""
    difference: str = ""
    """In what the leader was started differently; empty: in nothing, or it was not asked."""
    lost: bool = False
    """The store does not answer."""


@dataclass(frozen=True)
class Ended:
    """An attempt's end, with the number that its nodes agreed on."""

    now: float
    attempt: Attempt
    result: RunResult


Event = Woken | Answered | Connected | StoreSeen | Ended


# Actions.


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Publish:
    """Show the others this state, with the leader and the term that are known now."""

    status: Status


@dataclass(frozen=True)
class Write:
    """The leader's decision into its store; ``with_facts``: also how it was started."""

    decision: Decision
    with_facts: bool = False


@dataclass(frozen=True)
class Ask:
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Follow:
    """Leave the store that is used now, and connect to that of ``leader``, until ``deadline`` at most."""

    leader: int
    term: int
    deadline: float


@dataclass(frozen=True)
class Lead:
    term: int


@dataclass(frozen=True)
class Look:
    """At the leader's store. ``ready``: the round for which this node is ready, which the store learns first.
    ``here``: the leader asks which nodes are ready for that round, and whether one was stopped on purpose.
    ``with_facts``: compare how the leader was started."""

    ready: int | None = None
    here: int | None = None
    with_facts: bool = False


@dataclass(frozen=True)
class Run:
    attempt: Attempt


@dataclass(frozen=True)
class Wait:
    seconds: float


class Why(Enum):
    """How `Finish` ends the launcher."""

    RESULT = "as the last attempt did"
    ENDED = "the leader ended the job while this launcher waited to join"
    NO_ANSWER = "the others, or the leader, did not answer in time"
    REFUSED = "a store has refused this launcher"
    LATE = "the job has started without it"
    UNLIKE = "the job was started with other flags"


@dataclass(frozen=True)
class Finish:
    why: Why
    message: str = ""
    exit_code: int = 0
    result: RunResult | None = None


Action = Say | Publish | Write | Ask | Follow | Lead | Look | Run | Wait | Finish
