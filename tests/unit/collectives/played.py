"""Ranks of a job that need no other process: one that is watched, all in turn, and one of two whose peer agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.engine import CallContext, Collective, HostDevice, Stage, StageProgress, Stages
from fleet_train.collectives.engines import OWN, StreamCalls, StreamEngine, Watchdog
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.step_notes import StepClock, StepNotes
from fleet_train.errors import WorkerFailed
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile
from tests.support.agreeing import AgreeingJob
from tests.support.late import LateCalls, LateDevice

PLACE = CallContext("step 1", "step 1, bucket 0")


@dataclass(frozen=True)
class Group:
    """A process group on paper, of which the rank that asks is the first member."""

    id: int
    ranks: Sequence[int] = (0, 1)
    rank: int = 0

    def is_member(self) -> bool:
        return True


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


class BeginCalls(StreamCalls):
    """``begin`` in place of both kinds of call."""

    def __init__(self, begin: Callable[[Collective], Any]) -> None:
        self.on_own_stream = self.on_calc_stream = begin  # type: ignore[method-assign]


def stream_engine(begin: Callable[[Collective], Any], blamed: Attributed | None = None) -> StreamEngine:
    engine = StreamEngine(HostDevice(), blamed or Attributed(), unwatched(), BeginCalls(begin))
    engine.use(OWN)
    return engine


def stages(*every: Stage, result: Any = None) -> Stages[Any]:
    yield from every
    return result


def collective(name: str, group: Group) -> Collective:
    return Collective(name, group, None)


def one(name: str, group: Group, more: bool = False) -> Stage:
    """A stage of one collective."""
    return Stage((collective(name, group),), more)


T = TypeVar("T")


@dataclass
class PaperRank:
    """A rank of a job, as far as those see it who make process groups and stages: groups are on paper, too."""

    rank: int
    world_size: int
    on_host: bool = False
    formed: list[Group] = field(default_factory=list)
    """In the order in which this rank has made them."""

    timeout_seconds = 9.0

    def __post_init__(self) -> None:
        self.cluster = Cluster(Cluster.imagined(self.world_size, 1).ranks, self.rank)
        self.engine = SimpleNamespace(reads_values=self.on_host, averages=False)
        self.place = paddle.CPUPlace()
        self._counts: dict[str, Iterator[int]] = {}

    def count(self, name: str) -> int:
        return next(self._counts.setdefault(name, count()))

    def communicators(self, number: int) -> list[Any]:
        while len(self.formed) < number:
            form(self, range(self.world_size))
        return list(self.formed[:number])


def form(job: PaperRank, ranks: Sequence[int]) -> Group:
    """Stands for the making of a process group: its number says which one it is on all ranks."""
    job.formed.append(Group(len(job.formed), tuple(ranks)))
    return job.formed[-1]


def ranks_of(world_size: int, on_host: bool = False) -> list[PaperRank]:
    return [PaperRank(rank, world_size, on_host) for rank in range(world_size)]


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective that was carried out."""

    kind: str
    ranks: tuple[int, ...]
    dtype: str
    elements: int
    more: bool


def in_turn(ranks: Sequence[Stages[T]]) -> tuple[list[T], list[CollectiveSpec]]:
    """What every rank returns, and what was sent. Fails where ranks yield different stages."""
    everybody, sent = [StageProgress(stages, PLACE) for stages in ranks], list[CollectiveSpec]()
    while any(not one.is_done for one in everybody):
        assert all(not one.is_done for one in everybody), "a rank has yielded fewer stages than another"
        queues: dict[int, dict[int, list[Collective]]] = {}
        for rank, one in enumerate(everybody):
            for collective in one.stage.collectives:  # type: ignore[union-attr]
                queues.setdefault(collective.group.id, {}).setdefault(rank, []).append(collective)
        (more,) = {one.stage.more for one in everybody}  # type: ignore[union-attr]
        for queue in queues.values():
            members = next(iter(queue.values()))[0].group.ranks
            assert set(queue) == set(members), f"{sorted(queue)} have come to a collective of {list(members)}"
            for collectives in zip(*(queue[rank] for rank in members), strict=True):
                _carry_out(collectives)
                first = collectives[0]
                dtype = str(first.tensor.dtype).rpartition(".")[2]
                sent.append(CollectiveSpec(first.kind, tuple(first.group.ranks), dtype, first.tensor.size, more))
        for one in everybody:
            one.go_on()
    return [one.value for one in everybody], sent  # type: ignore[misc]


def _carry_out(collectives: tuple[Collective, ...]) -> None:
    """By what each kind is defined to do; ``collectives`` are one per member, in the order of the group."""
    assert len({(one.kind, one.root, one.op) for one in collectives}) == 1
    first, ranks = collectives[0], list(collectives[0].group.ranks)
    brought = [_array(one.tensor) for one in collectives]
    root = ranks.index(first.root) if first.root >= 0 else -1
    reductions: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min, "avg": np.mean}
    for position, one in enumerate(collectives):
        match one.kind:
            case "all_reduce":
                _put(one.tensor, reductions[one.op](brought, axis=0))
            case "reduce" if position == root:
                _put(one.tensor, np.sum(brought, axis=0))
            case "reduce":
                _put(one.tensor, np.zeros_like(brought[0]))  # what it holds is nobody's business
            case "broadcast":
                _put(one.tensor, brought[root])
            case "all_gather":
                _put(one.output, np.concatenate(brought))
            case "all_to_all":
                _put(one.output, np.concatenate([np.split(each, len(ranks))[position] for each in brought]))
            case _:
                raise AssertionError(f"{one.kind} is not played here")


def _array(tensor: Any) -> np.ndarray:
    return np.array(tensor.cast("float32").numpy() if tensor.dtype == paddle.bfloat16 else tensor.numpy())


def _put(tensor: Any, values: np.ndarray) -> None:
    """A backend takes a buffer as it is."""
    assert tuple(tensor.shape) == values.shape
    paddle.assign(paddle.to_tensor(values).cast(tensor.dtype), output=tensor)


class OneOfTwo(AgreeingJob):
    """Rank 0 of a job without a store, whose peer always sends the same: what an exchange does to real buffers.

    Collectives are those of the late group (`tests.support.late`), carried out by arithmetic instead of Gloo.
    """

    def __init__(self) -> None:
        super().__init__(Cluster.imagined(2, 1), paddle.CPUPlace())
        self.device, self.backend = LateDevice(), LateCalls(paddle.CPUPlace(), seed=0)
        self.engine = StreamEngine(self.device, self.attribute_failure, unwatched(), self.backend)
        self.engine.use(OWN)
        self.clock = StepClock(self.device.moment)
        self.notes = StepNotes(self.cluster, self.clock, self._times_up_to)
        self.barriers: list[str] = []
        """The names of the step barriers, in order."""

    def met(self, name: str) -> None:
        if name.startswith("barrier "):
            self.barriers.append(name.removeprefix("barrier "))

    def communicators(self, number: int) -> list[Any]:
        return [Group(index) for index in range(number)]

    def attribute_failure(self, context: CallContext, error: BaseException) -> WorkerFailed:
        return WorkerFailed(f"{context.what}: {error}")


def by_arithmetic(collective: Collective, _: Any) -> None:
    """What a collective does whose other member has brought the same."""
    if collective.kind == "all_reduce":
        factor = 2.0 if collective.op == "sum" else 1.0
        paddle.assign(collective.tensor * factor, output=collective.tensor)
    elif collective.kind == "all_gather":
        paddle.assign(paddle.concat([collective.tensor] * 2).reshape(collective.output.shape), collective.output)
    elif collective.kind == "gather":
        collective.output.extend(collective.tensor.clone() for _ in collective.group.ranks)


@contextmanager
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    monkeypatch.setattr(Collective, "_begin", by_arithmetic)
    job = OneOfTwo()
    try:
        yield job
    finally:
        job.engine.stop()
        job.backend.stop()


def exchange_of(
    job: Job, shapes: Sequence[Sequence[int]], rate: Callable[[], float] = lambda: 0.1, **settings: Any
) -> GradientExchange:
    """The exchange of a program with a float32 parameter of each shape."""
    profile = Profile(**settings)
    gradients = [TensorSpec(f"p{index}", tuple(shape), "float32") for index, shape in enumerate(shapes)]
    averaged = gradients if profile.use_local_sgd else []
    return GradientExchange(job, build_plan(gradients, job.cluster, profile, averaged), profile, rate)
