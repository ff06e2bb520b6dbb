"""The formed job: this process's store connection, process groups, and error messages about its peers."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import paddle

from fleet_train import timeouts
from fleet_train.cluster import Cluster, StoreClient
from fleet_train.cluster.flight import trace, witness
from fleet_train.cluster.flight.ring import recorder
from fleet_train.cluster.flight.stands import Stand, with_stands
from fleet_train.cluster.store.access import access_of
from fleet_train.cluster.store.client import StepAnswer, StepNote, Variants
from fleet_train.cluster.store.host import StoreHost
from fleet_train.cluster.store.reports import FailureReport, report_of_exit, reports_of, with_absent
from fleet_train.collectives.engine import (
    HAND_OVER,
    REDUCTIONS,
    AttributeFailure,
    CallContext,
    Collective,
    Engine,
    GpuDevice,
    Stage,
    Stages,
)
from fleet_train.collectives.engines import StreamCalls, StreamEngine, ThreadEngine, Watchdog
from fleet_train.collectives.groups import new_group
from fleet_train.collectives.step_notes import StepClock, StepNotes
from fleet_train.errors import (
    ConversionError,
    FleetTrainError,
    JoinTimeout,
    LinkFailed,
    WorkerFailed,
    is_news,
)
from fleet_train.log import logger
from fleet_train.plan import CommPlan
from fleet_train.plan.price import Network

# Set in the store by the first rank whose watchdog gives up on a collective.
_GIVEN_UP = "a collective is given up"
# One name for all steps: without a step barrier, a rank may already be in the next step.
_ATTRIBUTION = "a collective that failed"
_STEPS_OF = "steps of rank "
_NAMED_LEFT = 8
_REDUCIBLE = ("float32", "float64", "int32", "int64")

Array = np.ndarray[Any, Any]
_Error = TypeVar("_Error", bound=BaseException)


@dataclass(frozen=True)
class Passed:
    """A step barrier that all ranks reached: its answer to every rank, and how long this rank waited."""

    answer: StepAnswer
    seconds: float


@dataclass(frozen=True)
class StepArrival:
    """The start of a step, ``moment``, from which on collectives may run once ``barrier``, if it has one, is passed."""

    moment: str
    barrier: Future[Passed] | None


class Job:
    """This process's view of its peers. Made by ``join``; a job of one process has no store and no groups."""

    def __init__(
        self,
        cluster: Cluster,
        place: Any,
        *,
        host: StoreHost | None = None,
        store: StoreClient | None = None,
        barriers: StoreClient | None = None,
        timeout_seconds: float = timeouts.COLLECTIVE_TIMEOUT_SECONDS,
    ) -> None:
        self.cluster = cluster
        self.place = place
        self.timeout_seconds = self.step_timeout_seconds = timeout_seconds
        self.failure: FleetTrainError | None = None
        self._host = host
        self._store = store
        self._barrier_store = barriers
        self._watch: StoreClient | None = None
        self._watch_lock = threading.Lock()
        self.engine: Engine = make_engine(place, self.attribute_failure, self._is_hopeless, self._end_stuck)
        self.clock = StepClock(self.engine.device.moment)
        self.notes = StepNotes(cluster, self.clock, self._times_up_to)
        self._groups: list[Any] = []
        self._counts: dict[str, int] = {}
        self.optimizers: list[tuple[Any, Any]] = []
        """Programs, each with an optimizer that built gradients in it."""
        self.sync_points = 0
        """Synchronization points other than step barriers: the same number on every rank between the same calls."""
        self.advise: Callable[[FleetTrainError], None] = lambda _: None
        """Tells the user about a probable mistake of the script; all ranks call it at the same point."""
        self.describe_steps: Callable[[], str] = str
        """How many steps this rank has made, and where in the script; empty for none."""
        self.settle: Callable[[], None] = lambda: None
        """Makes the update that is still to come, if there is one."""
        self.settle_with_others: Callable[[], None] = lambda: None
        """Makes it if other ranks take part in it: one of them may need it already, and wait."""
        self.trains = True
        """Whether the program that runs makes an update; False only in a run that is known not to."""
        self.arrival: StepArrival | None = None
        """The arrival at the current step's barrier; None outside of steps and where a step has its barrier later."""
        self._turn = (-1, 0)
        self._left = False
        self._has_reported = False
        self.network: Network | None = None
        """The links, once measured; planning without a cluster sets them."""
        self.network_source = "measured"
        self._call = ""
        """The call of the facade that this rank is in, in the script's words."""

    @contextlib.contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """Let errors about waiting for other ranks name ``call`` in the body; nested calls keep the outermost.

        The device's work ends before: a copy would wait for it with Python's lock, and so without a watchdog.
        """
        self.settle_with_others()
        self.engine.drain(math.inf)
        before, self._call = self._call, self._call or call
        name = call.partition("(")[0]
        try:
            with recorder.event("save" if "save" in name else "call", name):
                yield
        finally:
            self._call = before

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @property
    def store(self) -> StoreClient:
        assert self._store is not None, "a job of one process has no store"
        return self._store

    def count(self, name: str) -> int:
        """0, 1, 2, ... per name: a repeated synchronization point has the same name on every rank."""
        self._counts[name] = self._counts.get(name, -1) + 1
        return self._counts[name]

    def barrier(self, name: str, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks, with a timeout; errors name the missing ranks. So do the three methods below."""
        if self.world_size > 1:
            with self._sync_point():
                self.store.barrier(name, None, *self._everybody(timeout_seconds))

    def all_gather(self, name: str, value: Any, timeout_seconds: float | None = None) -> dict[int, Any]:
        """The JSON values of all ranks, on every rank."""
        if self.world_size == 1:
            return {0: value}
        with self._sync_point():
            return self.store.all_gather(name, value, *self._everybody(timeout_seconds))

    def broadcast(self, name: str, value: Any, source: int = 0, timeout_seconds: float | None = None) -> Any:
        """The JSON value of one rank, on every rank; the others' values are ignored."""
        if self.world_size == 1:
            return value
        with self._sync_point():
            return self.store.broadcast(name, value, source, *self._everybody(timeout_seconds))

    def compare(self, name: str, value: Any, timeout_seconds: float | None = None) -> Variants:
        """Whether all ranks pass the same JSON value: empty if they do, else which ranks pass which."""
        if self.world_size == 1:
            return []
        with self._sync_point():
            return self.store.compare(name, value, *self._everybody(timeout_seconds))

    def _everybody(self, timeout_seconds: float | None) -> tuple[int, float, str]:
        return self.world_size, timeout_seconds or self.timeout_seconds, self._call

    def mark_active_program(self, number: tuple[int, int], timeout_seconds: float) -> None:
        """A program of this exchange and training starts, with its timeout; after another, a synchronization point."""
        self.step_timeout_seconds = timeout_seconds
        if number != self._turn:
            self._turn = number
            self.sync_points += 1

    def step_barrier(self, name: str, timeout_seconds: float, note: StepNote | None = None) -> Passed:
        """Wait until every rank reaches the same barrier. ``sync_points`` does not count it.

        Gloo's own wait ends after 30 s in any case and names no rank. A step barrier has our timeout: a rank may be
        busy for minutes (saving, evaluating), and the error names a rank that does not arrive.
        """
        assert self._barrier_store is not None
        began = time.perf_counter()
        event = recorder.begin("barrier")  # one that fails does not end: the ring shows where this rank was
        with self._remembering():
            answer = self._barrier_store.barrier(name, note, self.world_size, timeout_seconds, self._call)
        recorder.end(event)
        return Passed(answer, time.perf_counter() - began)

    def step_gather(self, name: str, value: Any) -> dict[int, Any]:
        """Wait until every rank reaches the same barrier; every rank gets the JSON values of all, by rank."""
        assert self._barrier_store is not None
        event = recorder.begin("barrier")
        with self._remembering():
            values = self._barrier_store.all_gather(name, value, self.world_size, self.step_timeout_seconds, self._call)
        recorder.end(event)
        return values

    def _times_up_to(self, barrier: int) -> dict[int, list[float]]:
        with self._remembering():
            return self.store.times(barrier)

    @contextlib.contextmanager
    def _sync_point(self) -> Iterator[None]:
        self.sync_points += 1
        event = recorder.begin("barrier", self._call.partition("(")[0])
        with self._remembering():
            yield
        recorder.end(event)

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except JoinTimeout as error:
            self.failure = with_absent(WorkerFailed(str(self.located(error))), error.absent)
            raise self.failure from None
        except FleetTrainError as error:
            self.failure = self.located(error)
            raise

    def located(self, error: _Error) -> _Error:
        """The error with the lines at which ranks stand that others wait for, if their witnesses know, and the steps of
        those that have left."""
        if steps := self._steps_of_those_that_left(error):
            error.args = (f"{error}; {steps}",)
        return with_stands(error, self._stands_of(error))

    def _steps_of_those_that_left(self, error: BaseException) -> str:
        made, own = [], self.describe_steps()
        for rank in _absent(error, "left")[:_NAMED_LEFT] if own else ():
            with contextlib.suppress(FleetTrainError):
                steps = str(self._watchdogs_store().get(f"{_STEPS_OF}{rank}") or "")
                if steps and steps.split()[0] != own.split()[0]:
                    made.append(f"rank {rank} made {steps}")
        if not made:
            return ""
        return (
            f"{', '.join(made)}; rank {self.cluster.rank} has begun {own}. All ranks must make equally many: let them "
            "agree on the fewest batches before the loop, number = int(fleet.all_reduce(np.array([number]), "
            "op='min')[0]), or read with a sampler that fills up (docs/data.md)"
        )

    def _stands_of(self, error: BaseException) -> list[Stand]:
        ranks = _absent(error, "missing", "elsewhere")
        nodes = {self.cluster.ranks[rank].node_index for rank in ranks}
        with contextlib.suppress(FleetTrainError, TypeError, ValueError, KeyError):
            return witness.ask_about(self._watchdogs_store(), str(error), ranks, nodes) if ranks else []
        return []

    def carries_out(self, plan: CommPlan) -> bool:
        """Whether the program is to get its operators; asked when all ranks have the same plan."""
        del plan
        return True

    def add_default_group(self, group: Any) -> None:
        """Paddle's default group is the first communicator where calls are enqueued: a second one over the same ranks
        would take memory and time. On Gloo a script's own calls of ``paddle.distributed`` use the default group, while
        a thread of ours may be in a collective."""
        if not self.engine.side_by_side:
            self._groups.append(group)

    def refuse_other_place(self, tensor: Any) -> None:
        """Raise ConversionError unless a program computes on this rank's device: NCCL would be handed other memory."""
        if str(tensor.place) != str(self.place):
            raise ConversionError(
                f"the program runs on {tensor.place}, but this rank's device is {self.place}: make its executor with "
                "paddle.static.Executor(fleet.place())"
            )

    def communicators(self, number: int) -> list[Any]:
        """The first ``number`` process groups over all ranks; made on first use, by all ranks in the same order."""
        while len(self._groups) < number:
            self._groups.append(new_group(self, list(range(self.world_size))))
        return self._groups[:number]

    def reduce(self, values: Array, op: str) -> Array:
        """``values`` reduced over all ranks. Raises ConversionError when the ranks' arrays differ in shape or dtype."""
        refuse_unreducible(values, op)
        if self.world_size == 1:
            return np.array(values)
        name = f"all_reduce {self.count('all_reduce')}"
        variants = self.compare(name, [list(values.shape), values.dtype.name, op])
        if variants:
            arrays = "; ".join(f"rank {ranks[0][0]}: {array}" for ranks, array in variants)
            raise ConversionError(f"{name}: the ranks passed different arrays: {arrays}")
        return self.engine.start(
            self._reduced(values, op), CallContext(name, name, self.timeout_seconds, "all_reduce")
        ).result()

    def _reduced(self, values: Array, op: str) -> Stages[Array]:
        group = self.communicators(1)[0]
        yield HAND_OVER
        tensor = paddle.to_tensor(values.reshape(-1), place=self.place)
        yield Stage((Collective("all_reduce", group, tensor, op=op),))
        result: Array = np.array(tensor.numpy()).reshape(values.shape)
        return result

    def attribute_failure(self, context: CallContext, error: BaseException) -> WorkerFailed:
        """Why a collective failed: the ranks that died, or that did not report the failure within seconds."""
        if not isinstance(self.failure, WorkerFailed):  # collectives that were behind this one fail as well
            self.failure = self._find_root_cause(context, error)
        return self.failure

    def _is_hopeless(self) -> bool:
        """Whether a collective that has not ended for seconds cannot end: a rank is gone, or another rank's watchdog
        gave up. The watchdog calls this on its thread, over its own connection."""
        client = self._watchdogs_store()
        is_over = client.failure() is not None or client.get(_GIVEN_UP) is not None
        return is_over or any(how != "left" for how in client.gone().values())

    def _end_stuck(self, context: CallContext, seconds: float) -> None:
        """A collective does not end and may block the computing thread forever: name the missing ranks and exit."""
        stuck = FleetTrainError(f"no collective has ended for {seconds:.0f} s")
        try:
            client = self._watchdogs_store()
            client.set(_GIVEN_UP, context.moment)
            if not isinstance(self.failure, WorkerFailed):
                self.failure = self._find_root_cause(context, stuck, client)
            self.report_failure(self.failure, client=client)
        except FleetTrainError as error:
            self.failure = WorkerFailed(f"{context.what}: {stuck}, and {error}")
        _end_process(self.failure)

    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, and how. From any thread. WorkerFailed if the store does not answer."""
        if self.world_size == 1 or self._left:
            return {}
        return self._watchdogs_store().gone()

    def _watchdogs_store(self) -> StoreClient:
        """A separate connection: the computing thread may be waiting on the others."""
        with self._watch_lock:
            if self._watch is None:
                self._watch = StoreClient.connect(
                    self.store.endpoint,
                    self.cluster.rank,
                    timeout_seconds=timeouts.ATTRIBUTION_SECONDS,
                    describe=self.cluster.describe,
                    watched=False,
                    access=access_of(self.cluster),
                )
            return self._watch

    def _find_root_cause(
        self, context: CallContext, error: BaseException, client: StoreClient | None = None
    ) -> WorkerFailed:
        what = context.what
        detail = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        stands: list[Stand] = []
        try:
            client = client or self.store
            try:
                client.barrier(_ATTRIBUTION, None, self.world_size, timeouts.EARLY_ATTRIBUTION_SECONDS)
            except JoinTimeout as early:
                stands = self._stands_of(early)
                if len(stands) == len(early.absent) and not any(stand.waits for stand in stands):
                    raise  # a call of those that wait may be about to fail as well
                client.barrier(_ATTRIBUTION, None, self.world_size, timeouts.ATTRIBUTION_SECONDS)
        except (JoinTimeout, WorkerFailed) as cause:
            words = f"{what}: {str(cause).removeprefix(f'{_ATTRIBUTION}: ')} (the collective ended with: {detail[0]})"
            if str(cause).startswith(f"{what}: "):  # another rank's report of the same failure
                words = str(cause)
            absent = {absence.member for absence in cause.absent}
            failed = with_absent(WorkerFailed(words), cause.absent)
            return with_stands(failed, [stand for stand in stands if stand.rank in absent])
        except FleetTrainError as other:
            return WorkerFailed(f"{what}: {other}")
        return LinkFailed(
            f"{what}: the collective failed on every rank ({detail[0]}); all ranks are alive, so look at the network "
            "between them and at GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME"
        )

    def report_failure(
        self, error: BaseException, doing: str = "stopped with {kind}", client: StoreClient | None = None
    ) -> None:
        """Record why this rank stops and report it once: its own failure, or the ranks missing here."""
        if self._has_reported:
            return
        self.failure = error if isinstance(error, FleetTrainError) else FleetTrainError(str(error))
        self._report(reports_of(error, self.cluster.this, self.cluster.describe(self.cluster.rank), doing), client)

    def report_exit(self, code: Any) -> None:
        """Report that this rank's script exited with a code other than 0."""
        report = report_of_exit(code, self.cluster.this, self.cluster.describe(self.cluster.rank))
        if report is not None:
            self.failure = FleetTrainError(report.message)
            self._report([report])

    def _report(self, reports: Iterable[FailureReport], client: StoreClient | None = None) -> None:
        client = client or self._store
        if client is None or self._left:
            return
        self._has_reported = True
        with contextlib.suppress(FleetTrainError):
            for report in reports:
                client.fail(report.to_json())

    def leave(self) -> None:
        """Graceful shutdown of this rank; the store stays up for ranks that are still running."""
        if self._left:
            return
        if trace.current is not None and self.failure is None:
            trace.current.end()
        if self._store is not None and self.failure is None and not self.engine.side_by_side:
            self._meet_to_leave()
        self._left = True
        self.engine.stop()
        if self._store is not None and self.failure is None:
            with contextlib.suppress(FleetTrainError):
                if steps := self.describe_steps():
                    self._store.set(f"{_STEPS_OF}{self.cluster.rank}", steps)
                self._store.leave()
        self.close()

    def _meet_to_leave(self) -> None:
        """What is enqueued is not done: a process that ends takes its part of the last collectives with it. Wait for
        the device, and for the other ranks' devices; both bounded, and without an error: this rank has no further use
        for them."""
        try:
            is_done = self.engine.drain(timeouts.LEAVE_SECONDS)
        except Exception as error:  # a device that has failed
            is_done, self.failure = False, FleetTrainError(str(error))
        if not is_done:
            logger.warning("rank %d leaves, but its device has not ended its work", self.cluster.rank)
        with contextlib.suppress(FleetTrainError):
            self.store.barrier("leaving", None, *self._everybody(timeouts.LEAVE_SECONDS))

    def close(self) -> None:
        """Close the connections: the other ranks see this rank as lost unless it has left."""
        for client in (self._barrier_store, self._store, self._watch):
            if client is not None:
                client.close()
        if self._host is not None:
            self._host.release()


def _absent(error: BaseException, *kinds: str) -> list[int]:
    """The ranks that an error misses in one of these ways."""
    absent = error.absent if isinstance(error, FleetTrainError) else ()
    return [absence.member for absence in absent if absence.kind in kinds]


def _end_process(error: FleetTrainError) -> None:
    """Exit as with an uncaught ``error``: the blocked computing thread cannot raise it."""
    sys.stdout.flush()
    if is_news(error):
        logger.error("%s: %s", type(error).__name__, error)
    os._exit(error.exit_code)


def refuse_unreducible(values: Array, op: str) -> None:
    """Raise ConversionError for an unknown operation, or a dtype that not every backend reduces."""
    if op not in REDUCTIONS:
        raise ConversionError(f"all_reduce: op={op!r} is unknown; it takes {', '.join(REDUCTIONS)}")
    if values.dtype.name not in _REDUCIBLE:
        raise ConversionError(f"all_reduce: dtype {values.dtype} cannot be reduced; use {', '.join(_REDUCIBLE)}")


def make_engine(
    device_place: Any,
    attribute_failure: AttributeFailure,
    is_hopeless: Callable[[], bool],
    on_stuck: Callable[[CallContext, float], None],
) -> Engine:
    """The stream engine on a GPU, whose collectives are enqueued; the thread engine on a CPU."""
    if isinstance(device_place, paddle.CPUPlace):
        return ThreadEngine(device_place, attribute_failure)
    return StreamEngine(GpuDevice(device_place), attribute_failure, Watchdog(on_stuck, is_hopeless), StreamCalls())
