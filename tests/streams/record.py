"""The trace of one rank of a job whose other ranks are absent: real conversion, exchange and engine, and notes of what
its host threads do."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import paddle

from fleet_train.cluster import Cluster
from fleet_train.collectives import engine, engines, groups, host_ops
from fleet_train.collectives.engine import CallContext, Collective, Engine, HostCopy, HostDevice
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods import quantised
from tests.streams.trace import COMPUTING, Action, Call, Op, Trace
from tests.support.agreeing import AgreeingJob

T = TypeVar("T")

_READERS = ("numpy", "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__array__", "__dlpack__")
_TALKING = (
    "arrive",
    "begin",
    "launch",
    "wait",
    "finish",
    "gate",
    "passed",
    "barrier",
    "gather",
    "total",
    "counts",
    "joint",
)
_OF_THE_PROGRAM = ("sum", "split")
"""Host operators that stand for what the executor itself enqueues."""


class Recorder:
    """The trace of one rank, and which of its host threads is at work.

    Threads are played one after the other: a task that is handed over runs at once, under the other thread's name.
    That is sound because what a thread does here does not depend on when it runs.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.trace, self.world_size = Trace(rank), world_size
        self._thread = COMPUTING
        self._where = ["start"]
        self._known: set[tuple[str, str, int]] = set()
        self._is_armed = False
        self._events = 0
        self._gaps: list[int] = []
        # The executor has several threads: operators without an order (those that hold a recomputation back) must not
        # be noted in the middle of a task that is played under another thread's name.
        self.one_operator = threading.Lock()

    def add(self, op: Op, number: int = -1, what: str = "", amount: int = 0) -> None:
        self._actions(self._thread).append(Action(op, number, what, amount, self._where[-1]))

    def _actions(self, thread: str) -> list[Action]:
        return self.trace.threads.setdefault(thread, [])

    @property
    def position(self) -> tuple[str, int]:
        """The thread that is at work, and how many actions it has done."""
        return self._thread, len(self._actions(self._thread))

    def after(self, thread: str, actions: int) -> None:
        """The thread at work waits until another has done so many actions; what it knows already is left out."""
        if thread != self._thread and actions and (self._thread, thread, actions) not in self._known:
            self._known.add((self._thread, thread, actions))
            self.add(Op.AFTER, actions, thread)

    def event(self) -> int:
        """Put an event on the calculation stream; returns its number."""
        self._events += 1
        self.add(Op.RECORD, self._events - 1)
        return self._events - 1

    def begin(self, collective: Collective, sync_op: bool) -> RecordedTask | None:
        """In place of Paddle's call: the note, and values as if all ranks had brought this one's."""
        group = collective.group
        if not group.is_member():
            return None
        tensor = collective.tensor
        elements, dtype = math.prod(tensor.shape), str(tensor.dtype).rpartition(".")[2]
        signature = f"{collective.kind} {elements} {dtype} {collective.op} {collective.root}"
        number = len(self.trace.calls)
        nbytes = elements * tensor.element_size()
        self.trace.calls.append(Call(group.id, tuple(group.ranks), signature, nbytes, self._where[-1]))
        self.add(Op.BEGIN, number)
        task = RecordedTask(self, number)
        if sync_op:
            task.wait()
        with self.watched(False), paddle.no_grad():
            _carry_out(collective, len(group.ranks))
        return task

    def beside(self, thread: str, task: Callable[[], T]) -> RecordedFuture[T]:
        """Hand a task to another thread."""
        submitted = self.position
        before, self._thread = self._thread, thread
        future: RecordedFuture[T] = RecordedFuture(self)
        try:
            self.after(*submitted)
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        finally:
            future.ended = self.position
            self._thread = before
        return future

    def begin_run(self, program: Any) -> None:
        """The executor is about to run ``program``."""
        if not self.trace.first_step:
            self.trace.first_step = {name: len(actions) for name, actions in self.trace.threads.items()}
        self._gaps = gaps_of(program)

    def reach(self, operator: str) -> None:
        """A host operator runs: the program's operators that stand before it are enqueued."""
        talks = operator.partition("_")[0] in (*_TALKING, *_OF_THE_PROGRAM)
        self.add(Op.KERNEL, amount=self._gaps.pop(0) if talks and self._gaps else 1)

    def end_run(self) -> None:
        assert len(self._gaps) == 1, f"host operators that have not run: {len(self._gaps) - 1}"
        self.add(Op.KERNEL, amount=self._gaps.pop())

    @contextmanager
    def inside(self, where: str) -> Iterator[None]:
        """What is noted in the body belongs to ``where``."""
        self._where.append(where)
        try:
            yield
        finally:
            self._where.pop()

    @contextmanager
    def watched(self, is_armed: bool = True) -> Iterator[None]:
        """In the body, reading a tensor's value is a wait of the host for the device, or is not."""
        before, self._is_armed = self._is_armed, is_armed
        try:
            yield
        finally:
            self._is_armed = before

    def read(self, how: str) -> None:
        """The host has read a value, or copied one to the device from memory that is not pinned."""
        if self._is_armed:
            self.add(Op.SYNC, what=how)


def gaps_of(program: Any) -> list[int]:
    """How many operators stand before each host operator that talks, and behind the last one."""
    gaps = [0]
    for operator in program.global_block().ops:
        of_the_program = any(f"fleet_train_{name}_" in operator.name() for name in _OF_THE_PROGRAM)
        if of_the_program or host_ops.passes_a_token(operator) or host_ops.is_barrier(operator):
            gaps.append(0)
        else:
            gaps[-1] += 1
    return gaps


class RecordedTask:
    """Paddle's task of a collective."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self.number = recorder, number

    def wait(self) -> None:
        self._recorder.add(Op.WAIT, self.number)

    def is_completed(self) -> bool:
        return True


class RecordedFuture(Future[T]):
    """Of a task that another thread has done; who asks for the result waits for that thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.ended = ("", 0)

    def result(self, timeout: float | None = None) -> T:
        self._recorder.after(*self.ended)
        return super().result(timeout)


def _carry_out(collective: Collective, ranks: int) -> None:
    """What Paddle would put into the tensors if all ranks had brought the same values."""
    tensor = collective.tensor
    if collective.kind in ("all_reduce", "reduce") and collective.op == "sum":
        paddle.assign(tensor.scale(float(ranks)), output=tensor)
    elif collective.kind == "all_gather":
        paddle.assign(paddle.tile(tensor, [ranks]), output=collective.output)
    elif collective.kind == "all_to_all":
        paddle.assign(tensor, output=collective.output)
    elif collective.kind == "gather":
        collective.output.extend(tensor.clone() for _ in range(ranks))
    elif collective.kind == "scatter" and collective.parts:
        paddle.assign(collective.parts[0], output=tensor)


MakeEngine = Callable[[Recorder, Job], Engine]


class PlayedGroup:
    """A process group without processes."""

    def __init__(self, number: int, ranks: Sequence[int], rank: int) -> None:
        self.id, self.ranks, self._rank = number, list(ranks), rank
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1

    def is_member(self) -> bool:
        return self._rank in self.ranks


class PlayedJob(AgreeingJob):
    """A rank whose peers always agree and are always in time; its synchronization points are recorded."""

    def __init__(self, cluster: Cluster, recorder: Recorder, make_engine: MakeEngine) -> None:
        super().__init__(cluster, paddle.CPUPlace())
        self._recorder = recorder
        self.engine = make_engine(recorder, self)

    def met(self, name: str) -> None:
        if not name.startswith("barrier "):
            name = f"{name} {self.count(f'sync {name}')}"
        self._recorder.add(Op.BARRIER, what=name)


class PlayedDevice(HostDevice):
    """A device whose values the host reads later, behind an event."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def to_host(self, tensor: Any) -> PlayedCopy:
        return PlayedCopy(self._recorder, tensor)

    def to_device(self, array: Any) -> Any:
        with self._recorder.watched(False):
            return paddle.to_tensor(array)


class PlayedCopy(HostCopy):
    """A copy into pinned memory, behind which an event stands."""

    def __init__(self, recorder: Recorder, tensor: Any) -> None:
        self._recorder, self._event = recorder, recorder.event()
        with recorder.watched(False):
            self._value = np.array(tensor.numpy())

    def read(self) -> Any:
        self._recorder.add(Op.READ, self._event)
        return self._value


class PlayedThread:
    """In place of a `WorkerThread`."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def submit(self, task: Callable[[], T]) -> Future[T]:
        return self._recorder.beside(self._name, task)

    def stop(self) -> None:
        """Nothing runs."""


class PlayedWatchdog:
    """Watches nothing; it is told the place of each call, which names the bucket in the trace."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def watch(self, task: Any, context: CallContext, event: int = -1) -> None:
        """Nothing gets stuck while a trace is recorded."""

    def over_a_call(self, context: CallContext) -> AbstractContextManager[None]:
        return self._recorder.inside(context.what)

    def stop(self) -> None:
        """Nothing runs."""


class PlayedStreams(engines.StreamEngine):
    """The real one, as on NCCL."""

    def __init__(self, recorder: Recorder, job: Job) -> None:
        watchdog: Any = PlayedWatchdog(recorder)
        super().__init__(PlayedDevice(recorder), job.attribute_failure, watchdog, engines.StreamCalls())


def play_rank(
    cluster: Cluster, rank: int, make_engine: MakeEngine, action: Callable[[PlayedJob, Recorder], None]
) -> Any:
    """The trace of ``action`` on one rank of ``cluster``."""
    recorder = Recorder(rank, cluster.world_size)
    with _played(recorder):
        job = PlayedJob(replace(cluster, rank=rank), recorder, make_engine)
        try:
            action(job, recorder)
        finally:
            job.leave()
    return recorder.trace


@contextmanager
def _played(recorder: Recorder) -> Iterator[None]:
    """While this lasts, what would talk, start threads or look into a device takes notes instead."""
    rank, numbers = recorder.trace.rank, count(1)
    with ExitStack() as stack:
        patches: list[Any] = [
            mock.patch.object(
                engine.Collective,
                "begin",
                lambda collective, sync_op, **_: recorder.begin(collective, sync_op),
            ),
            mock.patch.object(paddle.distributed, "new_group", lambda ranks: PlayedGroup(next(numbers), ranks, rank)),
            mock.patch.object(quantised, "backend_name", return_value="nccl"),
            mock.patch.object(groups, "backend_name", return_value="nccl"),
            mock.patch.object(groups, "_own_store", return_value=nullcontext()),
            mock.patch.object(groups, "_kept", lambda group: group),
            mock.patch.object(engines, "WorkerThread", lambda name, _: PlayedThread(recorder, name)),
            mock.patch.object(host_ops, "_host_operator", _noted(recorder)),
            mock.patch.object(paddle, "to_tensor", _reading(recorder, "to_tensor", paddle.to_tensor)),
        ]
        for patch in patches:
            stack.enter_context(patch)
        for name in _READERS:
            real = getattr(paddle.Tensor, name, None)
            if real is not None:
                setattr(paddle.Tensor, name, _reading(recorder, name, real))
                stack.callback(setattr, paddle.Tensor, name, real)
        yield


def _reading(recorder: Recorder, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def read(*arguments: Any, **options: Any) -> Any:
        recorder.read(name)
        with recorder.watched(False):
            return real(*arguments, **options)

    return read


def _noted(recorder: Recorder) -> Callable[..., Any]:
    """``_host_operator`` whose operators say when they run; what they read in there, they read in a step."""
    real = host_ops._host_operator

    def host_operator(name: str, inputs: int, outputs: Any, run: Callable[..., Any], **how: bool) -> Any:
        def noted(*values: Any) -> Any:
            with recorder.one_operator:
                recorder.reach(name)
                with recorder.inside(name), recorder.watched():
                    return run(*values)

        return real(name, inputs, outputs, noted, **how)

    return host_operator
