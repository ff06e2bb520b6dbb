"""Sums over ranks that are sent as integers of a few bits, as stages of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.codec.codecs import Codec, make_codec, notices_of
from fleet_train.collectives.engines.stages import Stages
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.methods.allreduce import Allreduce, FlatAllreduce, HierarchicalAllreduce, without_cast
from fleet_train.collectives.methods.parts import Links, make_links
from fleet_train.plan import CommPlan
from fleet_train.plan.hierarchy import leaders_of, local_groups
from fleet_train.plan.quantised import QuantisedLayout, QuantisedSettings


class QuantisedAllreduce:
    """Sums one flat float32 buffer over ``links.members`` and keeps the rounding errors for the next sum.

    This rank keeps the rounding errors of its own values and of the sums in the part of the buffer that it rounds for
    all. ``name`` separates its random numbers for stochastic rounding from those of others.
    """

    def __init__(self, name: str, links: Links, codec: Codec, layout: QuantisedLayout) -> None:
        self._name = name
        self._elements = layout.elements
        self._links = links
        self._codec = codec
        self._layout = layout
        self._step = 0
        self._owed: Any = None

    def sum(self, buffers: Sequence[Any], more: bool = False) -> Stages[list[Any]]:
        """As `Allreduce.sum`, of one buffer [elements]."""
        (buffer,) = buffers
        self.add([buffer])
        total = yield from self.sum_added(1.0, more)
        return [total]

    def add(self, tensors: Sequence[Any]) -> None:
        """Pass the tensors that, concatenated, are the buffer of the next sum. They are read at once and never
        changed."""
        if self._owed is None:
            self._owed = paddle.zeros([self._layout.padded_elements], "float32")
        self._owed = self._codec.add(self._owed, tensors)

    def sum_added(self, factor: float, more: bool = False) -> Stages[Any]:
        """The sum of the buffers of all members times ``factor``, [elements]; the same bits on every member."""
        self._step += 1
        if self._layout.parts == 1:
            total = yield from self._exchange_all(factor, more)
        else:
            total = yield from self._exchange_parts(factor, more)
        if not self._layout.settings.error_feedback:
            self._owed = None
        return total if total.shape[0] == self._elements else total[: self._elements]

    @property
    def owed(self) -> Any:
        """The rounding errors kept by this rank, [elements] float32."""
        return paddle.zeros([self._elements], "float32") if self._owed is None else self._owed[: self._elements]

    def take(self, owed: Any, step: int) -> None:
        """Continue with another ``owed``, after ``step`` sums."""
        self._step = step
        self._owed = paddle.zeros([self._layout.padded_elements], "float32")
        self._owed[: self._elements] = owed

    @property
    def step(self) -> int:
        """The number of sums so far."""
        return self._step

    @property
    def keeps_back(self) -> bool:
        """Whether rounding errors are added to the next sum."""
        return self._layout.settings.error_feedback

    def _exchange_all(self, factor: float, more: bool) -> Stages[Any]:
        wire, self._owed = self._codec.encode(self._owed, self._random(0))
        wires = yield from self._links.gather(wire, more)
        return self._codec.decode(wires, factor)

    def _exchange_parts(self, factor: float, more: bool) -> Stages[Any]:
        """Each owner adds its own part unrounded and keeps the rounding error of the sums."""
        layout, own = self._layout, self._links.position
        size = layout.part_elements
        mine = self._owed[own * size : (own + 1) * size].clone()
        wire, left = self._codec.encode(self._owed, self._random(0))
        received = yield from self._links.exchange(_parts_of(wire, layout))
        total = self._codec.decode(received, 1.0, mine)
        sums, rest = self._codec.encode(total, self._random(1))
        self._owed = left
        self._owed[own * size : (own + 1) * size] = rest
        wires = yield from self._links.gather(sums, more)
        return paddle.concat([self._codec.decode([part], factor) for part in wires])

    def _random(self, phase: int) -> Any:
        settings = self._layout.settings
        return settings.dither(self._name, self._links.position, phase, self._step) if settings.stochastic else None


def _parts_of(wire: Any, layout: QuantisedLayout) -> list[Any]:
    """One wire per part: the levels of all parts are contiguous, followed by all scales."""
    levels = layout.part_elements * layout.settings.bits // 8
    cut, scales = levels * layout.parts, layout.part_bytes - levels
    return [
        paddle.concat([wire[i * levels : (i + 1) * levels], wire[cut + i * scales : cut + (i + 1) * scales]])
        for i in range(layout.parts)
    ]


@dataclass(frozen=True)
class Carried:
    """``sums`` over all ranks, and ``rounded`` where values are quantised: the same without local groups."""

    sums: Allreduce
    rounded: QuantisedAllreduce


class QuantisedSums:
    """Makes quantised sums over a plan's ranks, or between the leaders of its local groups.

    ``allreduces``: one per communicator; averagings use the first one. All ranks create it in the same order.
    """

    def __init__(self, job: Job, plan: CommPlan, allreduces: Sequence[Allreduce]) -> None:
        self._allreduces = [without_cast(allreduce) for allreduce in allreduces]
        self._on_host = job.engine.reads_values
        self._members = list(range(plan.world_size))
        if plan.team_size:
            self._members = leaders_of(local_groups(plan.world_size, plan.team_size))
        used = self._allreduces if any(bucket.is_quantised for bucket in plan.buckets) else self._allreduces[:1]
        self._links = [make_links(job, _group_of(allreduce), self._members) for allreduce in used]
        self.notices = notices_of(self._on_host)
        """Notes to users about the codec, once."""

    def make(self, communicator: int, name: str, elements: int, settings: QuantisedSettings) -> Carried:
        """The sum of a buffer [elements], float32, on a communicator."""
        layout = QuantisedLayout(elements, len(self._members), settings)
        codec = make_codec(settings, self._on_host)
        rounded = QuantisedAllreduce(name, self._links[communicator], codec, layout)
        allreduce = self._allreduces[communicator]
        if isinstance(allreduce, HierarchicalAllreduce):
            return Carried(allreduce.with_between(rounded), rounded)
        return Carried(rounded, rounded)


def _group_of(allreduce: Allreduce) -> Any:
    if isinstance(allreduce, HierarchicalAllreduce):
        return allreduce.leaders_group
    assert isinstance(allreduce, FlatAllreduce)
    return allreduce.group
