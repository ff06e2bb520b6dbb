"""The state of a launcher about its job, and how long a phase of it lasts: what `job.step` maps to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from fleet_train import timeouts
from fleet_train.launch.attempts import Attempt, RunResult
from fleet_train.launch.election import Standing, Status
from fleet_train.launch.events import Action, Decision, Say
from fleet_train.launch.request import FaultPolicy


class Phase(Enum):
    STARTING = "node 0 asks whether the job is already running"
    SEEKING = "this launcher looks for the leader, without a part in its election"
    MEETING = "it looks whether the job has started without it"
    JOINING = "it waits for an attempt that it is part of"
    RUNNING = "an attempt runs"
    CHECKING = "the leader asks whether the others follow a later one"
    PAUSING = "the leader waits before a restart"
    GATHERING = "the leader waits for the nodes of the next attempt"
    DIVIDED = "the leader asks whether those that did not come back may be alive"
    FOLLOWING = "a node waits for the leader's decision"
    LOOKING = "the leader was lost: the launchers look for another one"
    OVER = "this launcher is done"


@dataclass(frozen=True)
class JobState:
    """A launcher's state. ``describe`` names a node in messages."""

    me: int
    nodes: int
    policy: FaultPolicy
    join_timeout_seconds: float
    describe: Callable[[int], str]
    endpoint: str = ""
    address: str = ""
    host: str = ""
    """Of node 0's store; this node's, and its name in the list: for messages."""
    phase: Phase = Phase.STARTING
    leader: int = -1
    term: int = -1
    decision: Decision | None = None
    """The last one that is known: a new leader continues from it."""
    attempt: Attempt | None = None
    result: RunResult | None = None
    earlier: tuple[RunResult, ...] = ()
    restarts: int = 0
    began: float = 0.0
    """When the phase began; ``word_at`` and ``look_at``: when it says something, or looks for a later leader."""
    word_at: float = 0.0
    look_at: float = 0.0
    bound_seconds: float = 0.0
    """How long it may last."""
    turn: int = 1
    candidate: tuple[int, int] | None = None
    """The (leader, term) that a `Follow` tries."""
    round: int = 0
    """While a node waits for a decision: the last round that it took part in, or knows of."""
    number: int = 0
    here: tuple[int, ...] = ()
    """While it is asked whether these nodes may go on alone."""
    bounded: bool = True
    """Whether that wait has a bound: a node that the job goes on without waits while the leader keeps its store."""

    @property
    def every(self) -> range:
        return range(self.nodes)

    @property
    def leads(self) -> bool:
        return self.leader == self.me

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(node for node in self.every if node != self.me)

    def named(self, nodes: Sequence[int] | set[int]) -> str:
        return ", ".join(map(self.describe, sorted(nodes)))

    def status(self, state: Standing) -> Status:
        return Status(state, self.leader, self.term)


Step = tuple[JobState, list[Action]]


def enter(job: JobState, phase: Phase, now: float, bound_seconds: float) -> JobState:
    word_at, look_at = now + timeouts.FIRST_WAITING_SECONDS, now + timeouts.CHECK_OTHER_LEADER_SECONDS
    return replace(job, phase=phase, began=now, word_at=word_at, look_at=look_at, bound_seconds=bound_seconds)


def seconds_left(job: JobState, now: float) -> float:
    return job.began + job.bound_seconds - now


def say_again(job: JobState, now: float, text: str) -> Step:
    """A line about a long wait, if one is due."""
    if now <= job.word_at:
        return job, []
    return replace(job, word_at=now + timeouts.REPORT_WAITING_SECONDS), [Say(text)]
