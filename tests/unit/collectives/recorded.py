"""Collectives that are recorded instead of sent: who started what, and waited for what, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet_train.collectives.engine import CallContext, Collective, HostDevice, Stage, Stages
from fleet_train.collectives.engines import StreamEngine, Watchdog
from fleet_train.errors import WorkerFailed

PLACE = CallContext("step 1", "step 1, bucket 0")


@dataclass(frozen=True)
class Group:
    """A process group on paper."""

    id: int
    ranks: Sequence[int] = (0, 1)


@dataclass
class Task:
    """``wait`` lets a collective end."""

    name: str
    events: list[str]
    broken: bool = False
    ended: bool = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        if self.broken:
            raise RuntimeError(f"{self.name} was lost")
        if not self.ended:
            self.events.append(f"wait {self.name}")
        self.ended = True


@dataclass
class Recorder:
    """``begin`` of a stream engine. A collective's ``kind`` is its name here."""

    rank: int = 0
    events: list[str] = field(default_factory=list)
    refused: str = ""
    """The collective that cannot be begun."""
    broken: str = ""
    """The one that cannot be waited for."""
    tasks: list[tuple[Collective, Task]] = field(default_factory=list)

    def __call__(self, collective: Collective) -> Task | None:
        if self.rank not in collective.group.ranks:
            return None
        if collective.kind == self.refused:
            raise RuntimeError(f"{collective.kind} cannot be begun")
        self.events.append(f"begin {collective.kind}")
        self.tasks.append((collective, Task(collective.kind, self.events, collective.kind == self.broken)))
        return self.tasks[-1][1]

    @property
    def begun(self) -> list[str]:
        return [event.removeprefix("begin ") for event in self.events if event.startswith("begin")]

    def in_flight(self) -> list[Collective]:
        return [collective for collective, task in self.tasks if not task.ended]


@dataclass
class Attributed:
    """The ``blame`` of an engine, and for what it was called."""

    places: list[CallContext] = field(default_factory=list)

    def __call__(self, context: CallContext, error: BaseException) -> WorkerFailed:
        self.places.append(context)
        return WorkerFailed(f"{context.what}: {error}")


def unwatched() -> Watchdog:
    """A watchdog that has nothing to say in a test of milliseconds."""
    return Watchdog(lambda _, __: None, lambda: False)


def stream_engine(begin: Callable[[Collective], Any], blamed: Attributed | None = None) -> StreamEngine:
    return StreamEngine(HostDevice(), blamed or Attributed(), unwatched(), begin)


def collective(name: str, group: Group) -> Collective:
    return Collective(name, group, None)


def stages(*every: Stage, result: Any = None) -> Stages[Any]:
    yield from every
    return result


def one(name: str, group: Group, more: bool = False) -> Stage:
    """A stage of one collective."""
    return Stage((collective(name, group),), more)
