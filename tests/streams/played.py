"""One rank of a job whose other ranks are absent: real conversion, exchange and engine, recorded by a `Recorder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import paddle

from fleet_train.cluster import Cluster
from fleet_train.collectives import engine, engines, groups, host_ops
from fleet_train.collectives.engine import CallContext, Engine, HostCopy, HostDevice
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods import quantised
from tests.streams.recorder import RecordedFuture, Recorder
from tests.streams.trace import Op
from tests.support.agreeing import AgreeingJob

T = TypeVar("T")
MakeEngine = Callable[[Recorder, Job], Engine]

_READERS = ("numpy", "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__array__", "__dlpack__")


class PlayedGroup:
    """A process group without processes."""

    def __init__(self, number: int, ranks: Sequence[int], rank: int) -> None:
        self.id, self.ranks, self._rank = number, list(ranks), rank

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
        with self._recorder.unwatched():
            return paddle.to_tensor(array)


class PlayedCopy(HostCopy):
    """A copy into pinned memory, behind which an event stands."""

    def __init__(self, recorder: Recorder, tensor: Any) -> None:
        self._recorder, self._event = recorder, recorder.event()
        with recorder.unwatched():
            self._value = np.array(tensor.numpy())

    def read(self) -> Any:
        self._recorder.add(Op.READ, self._event)
        return self._value


class PlayedThread:
    """In place of a `WorkerThread`."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def submit(self, task: Callable[[], T]) -> Future[T]:
        future: RecordedFuture[T] = self._recorder.beside(self._name, task)
        return future

    def stop(self) -> None:
        """Nothing runs."""


class PlayedWatchdog:
    """Watches nothing; it is told the place of each call, which names the bucket in the trace."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def watch(self, task: Any, context: CallContext) -> None:
        """Nothing gets stuck while a trace is recorded."""

    @contextmanager
    def over_a_call(self, context: CallContext) -> Iterator[None]:
        with self._recorder.inside(context.what):
            yield

    def stop(self) -> None:
        """Nothing runs."""


def stream_engine(recorder: Recorder, job: Job) -> Engine:
    """The real one, as on NCCL."""
    watchdog: Any = PlayedWatchdog(recorder)
    return engines.StreamEngine(PlayedDevice(recorder), job.attribute_failure, watchdog)


def play_rank(
    cluster: Cluster, rank: int, make_engine: MakeEngine, action: Callable[[PlayedJob, Recorder], None]
) -> Any:
    """The trace of ``action`` on one rank of ``cluster``."""
    recorder = Recorder(rank)
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

    def begin(collective: engine.Collective, sync_op: bool) -> Any:
        return recorder.begin(collective, sync_op)

    def make_group(ranks: Sequence[int]) -> PlayedGroup:
        return PlayedGroup(next(numbers), ranks, rank)

    def make_thread(name: str, place: Any) -> PlayedThread:
        del place
        return PlayedThread(recorder, name)

    with ExitStack() as stack:
        patches: list[Any] = [
            mock.patch.object(engine.Collective, "begin", begin),
            mock.patch.object(paddle.distributed, "new_group", make_group),
            mock.patch.object(quantised, "backend_name", return_value="nccl"),
            mock.patch.object(groups, "backend_name", return_value="nccl"),
            mock.patch.object(groups, "_own_store", return_value=nullcontext()),
            mock.patch.object(groups, "_kept", lambda group: group),
            mock.patch.object(engines, "WorkerThread", make_thread),
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
        with recorder.unwatched():
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
