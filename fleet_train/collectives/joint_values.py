"""Values of a program that are taken over the batches of all ranks, inside the program: means over ranks, and all
ranks' samples.

A count is known as soon as the batch is fed. Its exchange is started there and waited for where it is read, hidden
behind the forward pass. A value that depends on parameters is exchanged where it stands, and its gradient in the
backward pass.

Ranks have unlike numbers of samples, from step to step, too. Memory for them is allocated by the host, which may not
read a device's values: the numbers go through the store. That is also the exchange's barrier. The others wait for the
step's barrier, where that begins before them.

All are on the first communicator: its collectives have one order on every rank, that of the program.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import paddle

from fleet_train.cluster.flight.ring import recorder
from fleet_train.collectives.engine import HAND_OVER, CallContext, Collective, Stage, Stages
from fleet_train.collectives.groups import all_gathered
from fleet_train.collectives.host_ops import emit_link, token
from fleet_train.collectives.job import Job
from fleet_train.errors import ScheduleMismatch
from fleet_train.profile.methods.base import ITEM_BYTES, CollectiveSpec


@dataclass
class SampleNumbers:
    """The numbers of samples of all ranks in the run that was last; empty: a rank has its own alone."""

    numbers: list[int] = field(default_factory=list)

    def before(self, rank: int) -> int:
        """The number of samples of the ranks below: the index of this rank's first sample."""
        return sum(self.numbers[:rank])


class JointValues:
    """Emits the exchanges of one program. All ranks call ``connect`` at the same point before the program runs.

    In a run that does not train (a copy of the program for an evaluation, which one rank may run alone), a rank keeps
    its own values.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: Any = None
        self._running: dict[str, Any] = {}
        self._moment = f"values of program {job.count('joint values')}"
        self.exchanges: list[CollectiveSpec] = []
        """The exchanges of one pass, in order: for the plan."""

    def connect(self) -> None:
        """Take the exchanges' process group; not done while emitting: planning without a cluster emits as well."""
        if self._group is None:
            self._group = self._job.communicators(1)[0]

    def start_means(self, what: str, values: Sequence[Any]) -> None:
        """Insert the operator that starts the exchange of ``values``, named ``what``, once they are computed."""

        def start(*tensors: Any) -> None:
            if self._job.trains:
                self._running[what] = self._start(what, self._means(tensors), self._barrier(what))
            else:
                self._running[what] = _Own(tensors)

        self._count(values)
        emit_link("counts", start, token(), values)

    def means(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Insert the operator that waits for the exchange ``what``; returns the means over ranks of its ``values``."""
        shapes = [(value.shape, value.dtype) for value in values]
        return self._emit(lambda *_: self._waited(what, self._running.pop(what)), values, shapes)

    def mean(self, what: str, value: Any, *, is_gradient: bool = False) -> Any:
        """Insert the operator that returns the mean of ``value`` over ranks. A gradient's has no barrier: that would
        wait behind the gradients that are being sent."""

        def exchange(tensor: Any) -> list[Any]:
            if not self._job.trains:
                return [tensor.clone()]
            barrier = None if is_gradient else self._barrier(what)
            means: list[Any] = self._waited(what, self._start(what, self._means([tensor]), barrier))
            return means

        self._count([value])
        (mean,) = self._emit(exchange, [value], [(value.shape, value.dtype)])
        return mean

    def number_of_ranks(self, one: Any) -> Any:
        """Insert the operator that returns the number of ranks, float64 []. ``one``: that number on one card, where
        nothing is sent."""

        def give(alone: Any) -> list[Any]:
            return [paddle.full([], self._job.world_size, "float64") if self._job.trains else alone.clone()]

        (number,) = self._emit(give, [one], [([], paddle.float64)])
        number.stop_gradient = True
        return number

    def gather(self, what: str, value: Any, zero: Any) -> tuple[Any, Any]:
        """Insert the operator that has all ranks' samples: returns the index of this rank's first one among them (int64
        [1]), and them, in rank order. ``zero``: that index on one card. Its gradient is summed by ``sum_of_own``."""
        samples = SampleNumbers()

        def exchange(_: Any, own: Any) -> list[Any]:
            samples.numbers.clear()
            if not self._job.trains:
                return [paddle.zeros([1], "int64"), own.clone()]
            shapes = self._shapes(what, own)
            gathered: list[Any] = self._waited(what, self._start(what, self._gathered(own, shapes, samples), shapes))
            return gathered

        self._count([value], "allgather", value.dtype)
        shape = [-1, *value.shape[1:]]
        first, all_samples = self._emit(exchange, [zero, value], [([1], paddle.int64), (shape, value.dtype)])
        _samples[all_samples.get_defining_op().name()] = samples
        return first, all_samples

    def sum_of_own(self, what: str, gradient: Any, gather: Any, shape: Sequence[int]) -> Any:
        """Insert the operator that sums a gradient of all ranks' samples over the ranks, and returns that of this
        rank's own. ``gather``: the operator that has gathered them."""
        samples = _samples[gather.name()]

        def exchange(tensor: Any) -> list[Any]:
            if not samples.numbers:
                return [tensor.clone()]
            return [self._waited(what, self._start(what, self._summed(tensor, samples)))]

        self._count([gradient], "allreduce", gradient.dtype)
        (own,) = self._emit(exchange, [gradient], [(shape, gradient.dtype)])
        return own

    def _emit(self, exchange: Any, values: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Emit an operator, which gets its place in the chain at the end (``chain_in_program_order``)."""
        return emit_link("joint", exchange, token(), values, outputs)[1:]

    def _name(self) -> str:
        return f"{self._moment} {self._job.count(self._moment)}"

    def _barrier(self, what: str) -> Future[Any] | None:
        """What an exchange waits for: the step's barrier where it has begun or is not due, else one of its own."""
        job = self._job
        if job.arrival is not None:
            return job.arrival.barrier
        name = f"{what}: {self._name()}"
        return job.engine.run_in_background(lambda: job.step_barrier(name, job.step_timeout_seconds))

    def _shapes(self, what: str, own: Any) -> Future[Mapping[int, list[int]]]:
        """Ask in the background for the shapes of all ranks' values."""
        job, name, shape = self._job, f"{what}: {self._name()}", list(own.shape)
        return job.engine.run_in_background(lambda: job.step_gather(name, shape))

    def _start(self, what: str, stages: Stages[Any], barrier: Future[Any] | None = None) -> Any:
        arrival, moment = self._job.arrival, self._moment
        if arrival is not None:
            moment, what = arrival.moment, f"{arrival.moment}, {what}"
        context = CallContext(moment, what, self._job.step_timeout_seconds)
        with self._job.clock.exposed():  # where the computing thread is at the barrier itself
            return self._job.engine.start(stages, context, barrier=barrier)

    def _waited(self, what: str, running: Any) -> Any:
        """The result of an exchange. Another rank's lateness is no work of this one."""
        with self._job.clock.exposed(), recorder.event("wait", what):
            return running.result()

    def _gathered(self, own: Any, shapes: Future[Mapping[int, list[int]]], samples: SampleNumbers) -> Stages[list[Any]]:
        """Gather all ranks' samples as bytes, so that any dtype works; ranks with fewer send zeros behind them."""
        yield HAND_OVER
        by_rank = shapes.result()
        ranks = range(self._job.world_size)
        refuse_unlike({rank: by_rank[rank] for rank in ranks})
        samples.numbers = numbers = [by_rank[rank][0] for rank in ranks]
        first = paddle.full([1], samples.before(self._job.cluster.rank), "int64")
        most, size = max(numbers), math.prod(own.shape[1:])
        if most * size == 0:
            return [first, paddle.zeros([sum(numbers), *own.shape[1:]], own.dtype)]
        sent = own.cast("uint8") if own.dtype == paddle.bool else own
        sent = sent.reshape([-1])
        if own.shape[0] < most:
            sent = paddle.concat([sent, paddle.zeros([(most - own.shape[0]) * size], sent.dtype)])
        row = paddle.view(sent, "uint8")
        rows = yield from all_gathered(self._job, self._group, row)
        received = paddle.view(rows, sent.dtype).reshape([len(numbers), most, *own.shape[1:]])
        parts = [received[rank, :number] for rank, number in enumerate(numbers) if number]
        return [first, paddle.concat(parts).cast(own.dtype)]

    def _summed(self, gradient: Any, samples: SampleNumbers) -> Stages[Any]:
        """This rank's part of the sum of all gradients, in float32 at least: Gloo's sum of float16 is infinite."""
        rank = self._job.cluster.rank
        total = gradient.cast("float32" if gradient.element_size() < 4 else gradient.dtype).reshape([-1])
        if total.shape[0]:
            yield Stage((Collective("all_reduce", self._group, total),))
        first = samples.before(rank)
        own = total.reshape(gradient.shape)[first : first + samples.numbers[rank]]
        return own.clone().cast(gradient.dtype)

    def _means(self, tensors: Sequence[Any]) -> Stages[list[Any]]:
        """The means of all ranks' tensors; where the ranks have equal values, a rank's own bits."""
        own = paddle.concat([tensor.reshape([-1]).cast("float64") for tensor in tensors])
        rows = yield from all_gathered(self._job, self._group, own)
        means = paddle.where((rows == own).all(0), own, rows.mean(0))
        parts = paddle.split(means, [tensor.size for tensor in tensors])
        return [part.reshape(tensor.shape).cast(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def _count(self, values: Sequence[Any], kind: str = "allgather", dtype: Any = paddle.float64) -> None:
        """Count an exchange for the plan. An unknown dimension counts as 1: of gathered samples, the bytes of one."""
        item_bytes = ITEM_BYTES.get(str(dtype).rpartition(".")[2], 1)
        elements = sum(math.prod(max(size, 1) for size in value.shape) for value in values)
        self.exchanges.append(CollectiveSpec(kind, elements * item_bytes, item_bytes, flat=True))


_samples: dict[str, SampleNumbers] = {}
"""The numbers of samples by the operator that gathers them: Paddle cannot read such an operator's attributes."""

_of_programs: weakref.WeakKeyDictionary[Any, JointValues] = weakref.WeakKeyDictionary()


def joint_values_of(program: Any, job: Job) -> JointValues:
    """The joint values of a program, for all that exchanges values in it."""
    if program not in _of_programs:
        _of_programs[program] = JointValues(job)
    return _of_programs[program]


def refuse_unlike(shapes: Mapping[int, Sequence[int]]) -> None:
    """Raise ScheduleMismatch, on every rank alike, unless the ranks' values differ in their numbers of samples only."""
    own = next(iter(shapes.values()))
    for rank, shape in shapes.items():
        if list(shape[1:]) != list(own[1:]):
            raise ScheduleMismatch(
                f"fleet.all_gather_samples: rank 0 has samples of shape {list(own[1:])}, rank {rank} of shape "
                f"{list(shape[1:])}; they may differ in their number alone: pad them to one size"
            )


class _Own:
    """The values of a rank alone."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._copies = [tensor.clone() for tensor in tensors]

    def result(self) -> list[Any]:
        return self._copies
