"""How synchronised batch norm talks to the other ranks: at once, on a process group of its own."""

from __future__ import annotations

from typing import Any

import paddle

from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.engines.stages import Collective, Stage, Stages
from fleet_train.collectives.groups import new_group
from fleet_train.collectives.host_ops import _TOKEN, _host_operator, emit_meeting, token
from fleet_train.collectives.job import Job
from fleet_train.plan.legs import Sent
from fleet_train.plan.plan import ITEM_BYTES


class RankStatistics:
    """Emits the exchanges of one program. Before the program runs, all ranks call ``connect`` at the same moment.

    Where communicators have threads, its group is not one of the gradients': those send while the backward pass goes
    on, in an order that the statistics do not share. On streams it is the first of them: the program has one order for
    all, and a device that runs two communicators' kernels at a time may choose another one than its peer.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: Any = None
        self.exchanges: list[Sent] = []
        """What one forward and backward pass exchanges, in order: for the plan."""
        self._moment = f"statistics of program {job.count('statistics')}"

    def connect(self) -> None:
        """Form the group. Not done while emitting: a plan for a cluster that is not there emits, too."""
        job = self._job
        alone = job.engine.side_by_side
        self._group = new_group(job, list(range(job.world_size))) if alone else job.communicators(1)[0]

    def start(self) -> Any:
        """A token behind the meeting of all ranks: Gloo would wait for a busy rank for 30 s only, and not name it."""
        return emit_meeting(self._job, self._moment, token())

    def gather(self, what: str, values: Any, chain: Any) -> tuple[Any, Any]:
        """``values`` ([n]) of every rank, in rank order, as [world_size, n]; and the next token."""

        def run(link: Any, tensor: Any) -> Any:
            rows = paddle.empty([self._job.world_size * tensor.shape[0]], tensor.dtype)
            self._talk(what, Collective("all_gather", self._group, tensor, output=rows))
            return link.clone(), rows.reshape([self._job.world_size, -1])

        self._count("allgather", values)
        shape = [self._job.world_size, *values.shape]
        link, rows = _host_operator("gather", 2, [_TOKEN, (shape, values.dtype)], run)(chain, values)
        return rows, link

    def total(self, what: str, values: Any, chain: Any) -> tuple[Any, Any]:
        """The sum of ``values`` ([n]) over the ranks; and the next token."""

        def run(link: Any, tensor: Any) -> Any:
            summed = tensor.clone()
            self._talk(what, Collective("all_reduce", self._group, summed))
            return link.clone(), summed

        self._count("allreduce", values)
        link, summed = _host_operator("total", 2, [_TOKEN, (values.shape, values.dtype)], run)(chain, values)
        return summed, link

    def _count(self, kind: str, values: Any) -> None:
        item_bytes = ITEM_BYTES["float32"]
        self.exchanges.append(Sent(kind, int(values.shape[0]) * item_bytes, item_bytes, flat=True))

    def _talk(self, what: str, collective: Collective) -> None:
        def stages() -> Stages[None]:
            yield Stage((collective,))

        self._job.engine.run_here(stages(), Place(self._moment, what, self._job.timeout_seconds))
