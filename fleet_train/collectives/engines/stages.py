"""Stages of collectives, yielded by the generators that communication methods are written as.

A method computes, yields the collectives that it needs, and continues when they are done: ``yield Stage((...,))``. It
does not know whether a call blocks the host or a stream, nor which thread runs it. Its generator returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import paddle

from fleet_train.collectives.paddle_compat.modes import ensured_dynamic_mode

T = TypeVar("T")

REDUCTIONS = {"sum": "SUM", "max": "MAX", "min": "MIN"}


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

    def begin(self, sync_op: bool) -> Any:
        """Call Paddle; with ``sync_op``, work enqueued later waits for it. Returns Paddle's task, or None."""
        with ensured_dynamic_mode():
            return self._begin(sync_op)

    def _begin(self, sync_op: bool) -> Any:
        stream, common = paddle.distributed.stream, {"group": self.group, "sync_op": sync_op}
        match self.kind:
            case "all_reduce":
                operation = getattr(paddle.distributed.ReduceOp, REDUCTIONS[self.op])
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


@dataclass(frozen=True)
class Stage:
    """Collectives that do not need one another's results; none on a rank that does not take part in this stage.

    ``more``: further collectives follow, so ending the stage early is better than ending it when the result is needed.
    Every rank yields the same number of stages, whether it takes part in each or not.
    """

    collectives: tuple[Collective, ...] = ()
    more: bool = False


HAND_OVER = Stage()
"""Yielded where the computing thread's part ends: what follows may run on another thread."""

Stages = Generator[Stage, None, T]


class Progress(Generic[T]):
    """The progress of a generator of stages: at ``stage``, or done, with its ``value``."""

    def __init__(self, stages: Stages[T]) -> None:
        self._stages = stages
        self.stage: Stage | None = None
        self.value: T | None = None
        self.go_on()

    @property
    def is_done(self) -> bool:
        return self.stage is None

    def go_on(self) -> None:
        """The collectives of ``stage`` are complete: compute up to the next one."""
        try:
            with ensured_dynamic_mode(), paddle.no_grad():
                self.stage = next(self._stages)
        except StopIteration as end:
            self.stage, self.value = None, end.value


def carry_out(progress: Progress[T], on_end: Callable[[], None] = lambda: None) -> T:
    """Run all stages on this thread, with blocking calls; returns the result.

    ``on_end`` is called when a collective has ended.
    """
    while progress.stage is not None:
        for collective in progress.stage.collectives:
            collective.begin(sync_op=True)
            on_end()
        progress.go_on()
    return progress.value  # type: ignore[return-value]
