"""A device on CPUs whose collectives end late: NCCL's asynchrony, which Gloo does not show; jobs that have one; and a
tripwire for reads of a device's values.

``LateCalls`` begins a collective on a stream of its own as a GPU would: the call returns at once, and until ``wait()``
whoever reads the buffer gets NaN. The collective itself runs on a thread of its group, which stands for the group's
stream, after a random delay. Whoever writes into what is still being sent or received is told at the wait. With
``reads_early`` it sends what the buffer held before, as if NCCL did not wait for the calculation stream.

Run as a program: the script that the first argument names, in such jobs.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops

from fleet_train.collectives import job as job_module
from fleet_train.collectives.engine import Collective, HostCopy, HostDevice, WorkerThread
from fleet_train.collectives.engines import OWN, StreamCalls, StreamEngine, Watchdog
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job

# Kept: a test may make these raise for whoever looks into a device in a step; what stands for the device may.
_numpy: Callable[[Any], np.ndarray[Any, Any]] = paddle.Tensor.numpy
_to_tensor = paddle.to_tensor


class LateTask:
    """Paddle's task of a collective that runs on copies; ``wait`` puts the results where they belong."""

    def __init__(self, written: Sequence[Any], read: Sequence[Any], results: Future[Sequence[Any]]) -> None:
        self._written = written
        self._read = [(tensor, _bytes(tensor)) for tensor in read]
        self._results = results
        self._is_filled = False

    def is_completed(self) -> bool:
        return self._results.done()

    def wait(self) -> None:
        results = self._results.result()
        if self._is_filled:
            return
        self._is_filled = True
        for tensor in self._written:
            assert _is_poisoned(tensor), "a buffer was written while its collective was in flight"
        for tensor, before in self._read:
            assert _bytes(tensor) == before, "what a collective sends was changed while it was in flight"
        for tensor, value in zip(self._written, results, strict=True):
            _C_ops.assign_out_(value, tensor)  # paddle.assign counts a name in the script's generator


class LateCalls(StreamCalls):
    """``never``: of the collectives of this kind, none on an own stream ends any more."""

    def __init__(self, place: Any, seed: int, most_seconds: float = 0.003, reads_early: bool = False) -> None:
        self._place = place
        self._random = random.Random(seed)
        self._most_seconds = most_seconds
        self._reads_early = reads_early
        self._before: dict[tuple[Any, ...], Any] = {}
        self._streams: dict[int, WorkerThread] = {}
        self.begun = 0
        self.never: str | None = None

    def stop(self) -> None:
        for stream in self._streams.values():
            stream.stop()

    def on_calc_stream(self, collective: Collective) -> Any:
        self.begun += collective.group.is_member()
        return _carry_out(collective)

    def on_own_stream(self, collective: Collective) -> LateTask | None:
        group = collective.group
        if not group.is_member():
            return None
        self.begun += 1
        copied = collective.copied()
        if self._reads_early:
            self._send_what_was_there(copied)
        pause, never = self._random.random() * self._most_seconds, collective.kind == self.never

        def run() -> Sequence[Any]:
            time.sleep(pause)
            try:
                assert not never, "asked never to end"
                _carry_out(copied)
            except Exception:
                traceback.print_exc()
                _never_end()
            return [copied.tensor] if copied.kind == "reduce" else copied.results

        if group.id not in self._streams:
            self._streams[group.id] = WorkerThread(f"late group {group.id}", self._place)
        written, read = _buffers(collective)
        for tensor in written:
            _C_ops.assign_out_(paddle.full_like(tensor, _poison_of(tensor)), tensor)
        return LateTask(written, read, self._streams[group.id].submit(run))

    def _send_what_was_there(self, collective: Collective) -> None:
        """Of the last such buffer: the memory that this one would probably have got."""
        now, key = collective.tensor.clone(), (collective.group.id, collective.kind, *collective.tensor.shape)
        _C_ops.assign_out_(self._before.get(key, paddle.zeros_like(now)).cast(now.dtype), collective.tensor)
        self._before[key] = now


def _carry_out(collective: Collective) -> Any:
    """By Gloo, which has no average, and no streams."""
    if collective.op == "avg":
        collective.tensor.scale_(1.0 / len(collective.group.ranks))
        collective = replace(collective, op="sum")
    return collective.begin(sync_op=True)


def _buffers(collective: Collective) -> tuple[list[Any], list[Any]]:
    """What a collective writes, and what it only reads."""
    tensor = collective.tensor
    if collective.kind in ("all_gather", "all_to_all"):
        return [collective.output], [tensor]
    if collective.kind == "gather":
        group = collective.group
        if group.ranks[group.rank] == collective.root:  # Paddle fills an empty list at once, and its tensors later
            collective.output.extend(paddle.empty_like(tensor) for _ in group.ranks)
        return list(collective.output), [tensor]
    return [tensor], list(collective.parts or ())


def _never_end() -> None:
    """A kernel of NCCL whose peer is gone raises nothing: it goes on waiting."""
    while True:
        time.sleep(1.0)


class LateCopy(HostCopy):
    """A copy to the host that must not be read in the step in which it was made."""

    def __init__(self, device: LateDevice, tensor: Any) -> None:
        self._device, self._made_in = device, device.step
        self._value = tensor.clone()

    def read(self) -> Any:
        self._device.early_reads += self._device.step == self._made_in
        return _numpy(self._value)


class LateDevice(HostDevice):
    """The CPU as a device that the host does not look into in a step."""

    def __init__(self) -> None:
        self.step = 0
        self.early_reads = 0

    def to_host(self, tensor: Any) -> LateCopy:
        return LateCopy(self, tensor)

    def to_device(self, array: Any) -> Any:
        return _to_tensor(array)


@contextmanager
def ending_late(job: Job, seed: int = 0, reads_early: bool = False) -> Iterator[tuple[LateCalls, LateDevice]]:
    """Meanwhile a job on CPUs has a stream engine, whose collectives are Gloo's, late; ``seed``: how late, by rank."""
    usual, device = job.engine, LateDevice()
    calls = LateCalls(job.place, 100 * seed + job.cluster.rank, reads_early=reads_early)
    watchdog = Watchdog(job._end_stuck, job._is_hopeless)
    job.engine = StreamEngine(device, job.attribute_failure, watchdog, calls)
    try:
        yield calls, device
    finally:
        job.engine.stop()
        calls.stop()
        job.engine = usual


def _poison_of(tensor: Any) -> float:
    return float("nan") if tensor.is_floating_point() else 85


def _is_poisoned(tensor: Any) -> bool:
    values = _numpy(tensor.cast("float32") if tensor.dtype == paddle.bfloat16 else tensor)
    return bool(np.isnan(values).all() if tensor.is_floating_point() else (values == 85).all())


def _bytes(tensor: Any) -> bytes:
    return np.ascontiguousarray(_numpy(tensor)).tobytes()


def install_late_engine(seed: int = 0, stream: str = OWN, reads_early: bool = False) -> None:
    """From now on every job of this process has such an engine, from its joining on; ``stream``: that of all profiles,
    or nothing for what each asks for."""

    def make_engine(place: Any, attribute_failure: Any, is_hopeless: Any, on_stuck: Any) -> StreamEngine:
        calls = LateCalls(place, seed, reads_early=reads_early)
        return StreamEngine(LateDevice(), attribute_failure, Watchdog(on_stuck, is_hopeless), calls)

    job_module.make_engine = make_engine  # type: ignore[assignment]
    real = StreamEngine.use
    StreamEngine.use = lambda engine, asked: real(engine, stream or asked)  # type: ignore


_reads = threading.local()
_READERS = (
    "numpy",
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
    "__dlpack__",
    "__len__",
)


class HostRead(AssertionError):
    """The host has read a device's value in a step."""


def install_tripwire() -> None:
    """From now on whatever reads a tensor's value while an exchange's operator runs raises HostRead.

    So does ``paddle.to_tensor``: it copies an array from pageable memory, for which a device's queue must be empty.
    """
    paddle.to_tensor = _guarded("to_tensor", paddle.to_tensor)
    for name in _READERS:
        real = getattr(paddle.Tensor, name, None)
        if real is not None:
            setattr(paddle.Tensor, name, _guarded(name, real))
    for name in ("arrive", "begin", "launch", "wait", "finish"):
        setattr(GradientExchange, name, _armed(getattr(GradientExchange, name)))


def _guarded(name: str, real: Any) -> Any:
    @wraps(real)
    def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(_reads, "is_armed", False):
            what = f"a tensor {list(tensor.shape)}" if isinstance(tensor, paddle.Tensor) else "an array"
            raise HostRead(f"{name} of {what} in a step")
        return real(tensor, *arguments, **options)

    return read


def _armed(operator: Any) -> Any:
    @wraps(operator)
    def run(exchange: Any, *arguments: Any, **options: Any) -> Any:
        _reads.is_armed = not exchange._job.engine.reads_values
        try:
            return operator(exchange, *arguments, **options)
        finally:
            _reads.is_armed = False

    return run


def run_script(arguments: list[str]) -> None:
    """The script that the first argument names, in jobs whose collectives end late."""
    install_tripwire()
    install_late_engine(seed=int(os.environ.get("PADDLE_TRAINER_ID", "0")))  # no two ranks are late alike
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    from tests.support import late  # the module that the script imports as well

    late.run_script(sys.argv[1:])
