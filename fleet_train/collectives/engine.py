"""What an engine carries out: stages of collectives, and where their tensors are. The engines are in `engines`.

A communication method is a generator: it computes, yields the collectives that it needs, and continues when they are
done: ``yield Stage((...,))``. It does not know whether a call blocks the host or a stream, nor which thread runs it.
The generator returns the result.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import paddle

from fleet_train import timeouts
from fleet_train.cluster.flight.ring import recorder
from fleet_train.cluster.flight.stands import spans
from fleet_train.collectives.paddle_compat import dynamic_mode, ensured_dynamic_mode
from fleet_train.errors import FleetTrainError

_FIRST_DEVICE_POLL_SECONDS = 20e-6
_DEVICE_POLL_SECONDS = 2e-3
"""Pause between two looks at whether a device is done, first and at most: a blocking wait would hold Python's lock."""

T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class CallContext:
    """The point of a job at which something is communicated: ``moment`` (a step) is the same on every rank, ``what``
    (the bucket that this rank has reached) may differ. ``timeout_seconds``: how long it may take while no other
    collective ends. ``label``: what it is in every step, for the flight recorder."""

    moment: str
    what: str
    timeout_seconds: float = timeouts.COLLECTIVE_TIMEOUT_SECONDS
    label: str = ""


AttributeFailure = Callable[[CallContext, BaseException], FleetTrainError]
"""Makes the error for a failed collective, which names the root cause."""


class Running(Protocol[Result_co]):
    """Stages that an engine has started."""

    def result(self) -> Result_co:
        """Wait for the last collective and return the result of the stages. The host waits, or a stream."""


class Engine:
    """Carries out stages. All ranks make the same calls in the same order."""

    reads_values: bool
    """Whether the host may read a tensor's value in a step."""
    side_by_side: bool
    """Whether collectives on several communicators over the same ranks run concurrently."""
    averages: bool
    """Whether the backend divides before it adds (NCCL's ``avg``): one pass over memory less, and float16 keeps within
    its range."""
    barrier_margin_seconds: float
    """How much longer than its timeout a barrier waits, so that ranks inside a collective can first find the missing
    rank, which may be one that has reached the barrier."""

    def __init__(self, device: HostDevice, attribute_failure: AttributeFailure) -> None:
        self.device = device
        self._attribute_failure = attribute_failure

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> Running[T]:
        """Start ``stages``; their first collective waits until ``barrier`` is done.

        Errors are raised by the result as a FleetTrainError that names the root cause.
        """
        raise NotImplementedError

    def run_here(self, stages: Stages[T], context: CallContext) -> T:
        """Carry out ``stages`` in the calling operator: later operators of the program read their result."""
        raise NotImplementedError

    def step_on(self) -> None:
        """A fixed point of the program, the same on every rank: stages with ``more`` may be ended here."""

    def run_in_background(self, task: Callable[[], T]) -> Future[T]:
        """Run work without devices or process groups (barriers in the store) while the computing thread goes on."""
        raise NotImplementedError

    def drain(self, seconds: float) -> bool:
        """Wait until the device has done what is enqueued, at most this long; whether it has."""
        return self.device.moment().await_passed(seconds)

    def stop(self) -> None:
        """End the engine's threads."""

    @contextmanager
    def attributing(self, context: CallContext) -> Iterator[None]:
        """Errors of Paddle in the body, the call of a collective, are failures of the network or of another rank."""
        try:
            yield
        except FleetTrainError:
            raise
        except Exception as error:
            raise self._attribute_failure(context, error) from error


REDUCTIONS = ("sum", "max", "min")
"""The reductions that every backend can do; NCCL also has ``avg``."""


@dataclass(frozen=True)
class Collective:
    """A collective of Paddle that has not started yet. Ranks are those of the job.

    ``tensor`` is overwritten by an all_reduce, a reduce (on ``root`` only) and a broadcast. ``output``: of an
    all_gather [ranks * n], of an all_to_all like ``tensor``, for a gather a list that is empty before it. ``parts``:
    what the root of a scatter sends.
    """

    kind: str
    group: Any
    tensor: Any
    root: int = -1
    op: str = "sum"
    output: Any = None
    parts: Sequence[Any] | None = None

    @property
    def results(self) -> list[Any]:
        """The tensors that hold its result on this rank; those of a gather exist once it has begun."""
        if self.kind in ("all_gather", "all_to_all"):
            return [self.output]
        this = self.group.ranks[self.group.rank]
        if self.kind == "gather":
            return list(self.output) if this == self.root else []
        return [] if self.kind == "reduce" and this != self.root else [self.tensor]

    def copied(self) -> Collective:
        """A copy of the collective with the present values in other memory, and room for its results."""
        output = None
        if self.output is not None:
            output = [] if self.kind == "gather" else paddle.zeros_like(self.output)
        return replace(self, tensor=self.tensor.clone(), output=output)

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's part."""
        return int(self.tensor.size) * int(self.tensor.element_size())

    def begin(self, sync_op: bool, use_calc_stream: bool = False) -> Any:
        """Call Paddle; with ``sync_op``, work enqueued later waits for it. Returns Paddle's task, or None."""
        with ensured_dynamic_mode():
            return self._begin({"group": self.group, "sync_op": sync_op, "use_calc_stream": use_calc_stream})

    def _begin(self, common: dict[str, Any]) -> Any:
        stream = paddle.distributed.stream
        match self.kind:
            case "all_reduce":
                operation = getattr(paddle.distributed.ReduceOp, self.op.upper())
                return stream.all_reduce(self.tensor, op=operation, **common)
            case "reduce":
                return stream.reduce(self.tensor, dst=self.root, **common)
            case "broadcast":
                return stream.broadcast(self.tensor, src=self.root, **common)
            case "all_gather":
                return stream.all_gather(self.output, self.tensor, **common)
            case "all_to_all":
                return stream.alltoall_single(self.output, self.tensor, **common)
            case "gather":
                return stream.gather(self.tensor, self.output, dst=self.root, **common)
            case "scatter":
                return stream.scatter(self.tensor, self.parts, src=self.root, **common)
        raise AssertionError(f"unknown collective {self.kind!r}")


def begin_wire(collective: Collective, context: CallContext, enqueued: float = 0.0) -> int:
    """Begin the collective's event; returns what the recorder's ``end`` takes. ``enqueued``: when it was ready."""
    if not recorder.is_on:
        return -1
    return recorder.begin("wire", context.label, collective.nbytes, name_of_group(collective.group), enqueued)


def name_of_group(group: Any) -> str:
    """The ranks of a process group in short."""
    name = _group_names.get(group.id)
    if name is None:
        name = _group_names[group.id] = f"group {group.id}: ranks {spans(sorted(group.ranks))}"
    return name


_group_names: dict[int, str] = {}


@dataclass(frozen=True)
class Stage:
    """Collectives that do not need one another's results; none on a rank that does not take part in this stage.

    ``more``: further collectives follow, so ending the stage early is better than ending it when the result is needed.
    Every rank yields the same number of stages, whether it takes part in each or not.
    """

    collectives: tuple[Collective, ...] = ()
    more: bool = False


HAND_OVER = Stage()
"""What a method yields where the computing thread's part ends: what follows may run on another thread."""

Stages = Generator[Stage, None, T]


class StageProgress(Generic[T]):
    """The progress of a generator of stages: at ``stage``, or done, with its ``value``."""

    def __init__(self, stages: Stages[T], context: CallContext) -> None:
        self._stages = stages
        self._context = context
        self.stage: Stage | None = None
        self.value: T | None = None
        self.ready_at = 0.0
        """The time (of ``time.perf_counter``) at which the collectives of ``stage`` could begin."""
        self.go_on("copy")

    @property
    def is_done(self) -> bool:
        return self.stage is None

    def go_on(self, kind: str = "code") -> None:
        """The collectives of ``stage`` are complete: compute up to the next one, as an event of this kind."""
        began = time.perf_counter()
        try:
            with ensured_dynamic_mode(), paddle.no_grad():
                self.stage = next(self._stages)
        except StopIteration as end:
            self.stage, self.value = None, end.value
        except MemoryError as error:
            raise FleetTrainError(out_of_memory(self._context, error)) from error
        finally:
            recorder.add(kind, self._context.label, began)
            self.ready_at = time.perf_counter()


def out_of_memory(context: CallContext, error: MemoryError) -> str:
    """What was too large, by Paddle's own words, and what makes it smaller."""
    lines = [line.strip() for line in str(error).splitlines() if "allocat" in line.lower()]
    return (
        f"{context.what}: this rank is out of memory: {lines[0] if lines else 'an allocation failed'} "
        "(communicating a bucket takes its size once or twice more: a smaller fuse_grad_size_in_MB; training itself: "
        "a smaller batch with accumulate_steps, or recompute_segments)"
    )


class Moment:
    """A point of the calculation stream. On a CPU every call has finished when it returns: the wall clock replaces the
    stream."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def has_passed(self) -> bool:
        """Whether everything enqueued before it is done."""
        return True

    def await_passed(self, seconds: float = math.inf) -> bool:
        """Block the host until then, at most this long; other threads run meanwhile. Whether it has passed."""
        until, pause = time.monotonic() + seconds, _FIRST_DEVICE_POLL_SECONDS
        while not self.has_passed():
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _DEVICE_POLL_SECONDS)
        return True

    def seconds_since(self, earlier: Any) -> float:
        """The time between two points that have both passed."""
        return float(self.at - earlier.at)


class HostCopy:
    """A tensor's value on its way to the host."""

    def __init__(self, tensor: Any) -> None:
        self._array = tensor.numpy().copy()

    def read(self) -> Any:
        """The value as a numpy array. Waits for what was enqueued before the copy; call it a step later."""
        return self._array


class HostDevice:
    """The device on which a program on the CPU computes."""

    def moment(self) -> Moment:
        """The current end of the calculation stream."""
        return Moment()

    def to_host(self, tensor: Any) -> HostCopy:
        """Start copying ``tensor`` at the current end of the stream; the host does not wait."""
        return HostCopy(tensor)

    def to_device(self, array: Any) -> Any:
        """A tensor of a numpy array's values, usable by work enqueued from now on; the host does not wait."""
        return paddle.to_tensor(array)


class GpuMoment(Moment):
    """An event on the calculation stream. Source: ``paddle.device.Event``, cudaEventRecord, cudaEventQuery and
    cudaEventElapsedTime. Its ``synchronize`` holds Python's lock while it waits, so that no watchdog could run."""

    def __init__(self) -> None:
        self.event = paddle.device.Event(enable_timing=True)
        self.event.record()

    def has_passed(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class PinnedCopy(HostCopy):
    """A copy into pinned memory, followed by an event."""

    def __init__(self, tensor: Any) -> None:
        self._copy = tensor._copy_to(paddle.CUDAPinnedPlace(), False)
        self._copied = GpuMoment()

    def read(self) -> Any:
        self._copied.await_passed()
        return self._copy.numpy()


class GpuDevice(HostDevice):
    """A GPU; only ``PinnedCopy.read`` blocks."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._sent: list[tuple[Any, GpuMoment]] = []
        """Pinned memory that copies may still read, each with the event after its copy."""

    def moment(self) -> GpuMoment:
        return GpuMoment()

    def to_host(self, tensor: Any) -> PinnedCopy:
        return PinnedCopy(tensor)

    def to_device(self, array: Any) -> Any:
        """A tensor of a numpy array's values, by way of pinned memory: ``paddle.to_tensor`` copies from pageable
        memory, which waits until the device is idle."""
        self._sent = [(pinned, copied) for pinned, copied in self._sent if not copied.has_passed()]
        pinned = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        tensor = pinned._copy_to(self._place, False)
        self._sent.append((pinned, GpuMoment()))
        return tensor


_STOP = None


class WorkerThread:
    """Runs one task at a time; ``submit`` returns a Future.

    Not a ThreadPoolExecutor, which joins its threads at exit: a thread that waits for a lost rank would block the exit.
    """

    def __init__(self, name: str, place: Any) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._place = place
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def stop(self) -> None:
        self._tasks.put(_STOP)
        self._thread.join(timeout=timeouts.THREAD_END_SECONDS)

    def _run(self) -> None:
        # A thread starts in its creator's mode; in static mode the calls below would build graph operators instead.
        with dynamic_mode(self._place):
            while (item := self._tasks.get()) is not _STOP:
                future, task = item
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
