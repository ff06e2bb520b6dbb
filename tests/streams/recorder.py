"""Records what one rank's host threads do while the real code runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import paddle

from fleet_train.collectives.engine import Collective
from fleet_train.collectives.host_ops import is_barrier, passes_a_token
from tests.streams.trace import COMPUTING, Action, Call, Op, Trace

T = TypeVar("T")

_TALKING = ("arrive", "begin", "launch", "wait", "finish", "barrier", "gather", "total")


class Recorder:
    """The trace of one rank, and which of its host threads is at work.

    Threads are played one after the other: a task that is handed over runs at once, under the other thread's name.
    That is sound because what a thread does here does not depend on when it runs.
    """

    def __init__(self, rank: int) -> None:
        self.trace = Trace(rank)
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
        with self.unwatched(), paddle.no_grad():
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
        talks = operator.partition("_")[0] in _TALKING
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
    def watched(self) -> Iterator[None]:
        """In the body, reading a tensor's value is a wait of the host for the device."""
        before, self._is_armed = self._is_armed, True
        try:
            yield
        finally:
            self._is_armed = before

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        before, self._is_armed = self._is_armed, False
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
        if passes_a_token(operator) or is_barrier(operator):
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
