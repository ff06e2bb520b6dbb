"""Gradients as integers of a few bits: quantised sums over ranks as stages of collectives, and the bucket method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.collectives.engine import HAND_OVER, Collective, Stage, Stages
from fleet_train.collectives.groups import new_group
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.codec import Codec, make_codec, notices_of
from fleet_train.collectives.methods.dense import (
    Allreduce,
    Cut,
    FlatAllreduce,
    HierarchicalAllreduce,
    flatten,
    unflatten,
    without_cast,
)
from fleet_train.collectives.paddle_compat import backend_name, dynamic_mode
from fleet_train.plan import Bucket, CommPlan, TensorSpec
from fleet_train.plan.phases import leaders_of, local_groups
from fleet_train.profile.methods.base import ITEM_BYTES, QuantisedSettings
from fleet_train.profile.methods.quantised import QuantisedLayout


class KeptErrors:
    """The state of a `QuantisedAllreduce` whose buffer is the concatenation of ``values``."""

    own_state: tuple[str, ...] = (".error",)

    def __init__(self, kind: str, values: Sequence[TensorSpec], rounded: QuantisedAllreduce) -> None:
        self.kind = kind
        self._values = values
        self._rounded = rounded

    def state(self) -> dict[str, Any]:
        """``<first value's name>.sums``, the number of sums so far, and, with error feedback, ``<name>.error`` per
        value, [elements] float32, which differs between ranks."""
        with dynamic_mode(), paddle.no_grad():
            state = {f"{self._values[0].name}.sums": paddle.to_tensor([self._rounded.step], dtype="int64")}
            if self._rounded.has_error_feedback:
                parts = unflatten(self._rounded.residual, [[value.elements] for value in self._values])
                state |= {f"{v.name}.error": part.clone() for v, part in zip(self._values, parts, strict=True)}
            return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; errors that are missing or of another size start as zero."""
        with dynamic_mode(), paddle.no_grad():
            sums = state.get(f"{self._values[0].name}.sums")
            parts = [of_size(state.get(f"{value.name}.error"), value.elements) for value in self._values]
            self._rounded.restore(
                paddle.concat(parts), int(sums.item()) if sums is not None and sums.numel() == 1 else 0
            )


def of_size(error: Any, elements: int) -> Any:
    """A saved error as [elements] float32; zeros if there is none, or one of another size."""
    if error is None or error.numel() != elements:
        return paddle.zeros([elements], "float32")
    return error.reshape([-1])


class QuantisedMethod(KeptErrors):
    """Sends integers with a scale per block; with local groups, only between their leaders."""

    def __init__(self, bucket: Bucket, rounded_sum: RoundedSum, world_size: int, cut: Cut | None = None) -> None:
        super().__init__("quantised", bucket.gradients, rounded_sum.rounded)
        self._bucket = bucket
        self._sums = rounded_sum.allreduce
        self._scale = 1.0 / world_size
        self._cut = cut or unflatten

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        if self._sums is self._rounded:
            self._rounded.add(gradients)
            yield HAND_OVER
            total = yield from self._rounded.sum_added(self._scale)
        else:
            flat = flatten(gradients)
            yield HAND_OVER
            (total,) = yield from self._sums.sum([flat])
            total = total.scale_(self._scale)
        return self._cut(total, [gradient.shape for gradient in self._bucket.gradients])


class QuantisedAllreduce:
    """Sums one flat float32 buffer over the members of ``all_to_all`` and keeps the rounding errors for the next sum.

    This rank keeps the rounding errors of its own values and of the sums in the part of the buffer that it rounds for
    all. ``name`` separates its random numbers for stochastic rounding from those of others.
    """

    def __init__(self, name: str, all_to_all: AllToAll, codec: Codec, layout: QuantisedLayout) -> None:
        self._name = name
        self._elements = layout.elements
        self._all_to_all = all_to_all
        self._codec = codec
        self._layout = layout
        self._step = 0
        self._residual: Any = None

    @property
    def stages(self) -> int:
        return min(self._layout.parts, 2)

    averages = False

    def sum(self, buffers: Sequence[Any], more: bool = False, divide_by: int = 1) -> Stages[list[Any]]:
        """The sum of one buffer [elements] over all ranks, in a list, as `Allreduce.sum` gives it."""
        (buffer,) = buffers
        self.add([buffer])
        total = yield from self.sum_added(1.0 / divide_by, more)
        return [total]

    def add(self, tensors: Sequence[Any]) -> None:
        """Pass the tensors that, concatenated, are the buffer of the next sum. They are read at once and never
        changed."""
        if self._residual is None:
            self._residual = paddle.zeros([self._layout.padded_elements], "float32")
        self._residual = self._codec.add(self._residual, tensors)

    def sum_added(self, factor: float, more: bool = False) -> Stages[Any]:
        """The sum of the buffers of all members times ``factor``, [elements]; the same bits on every member."""
        self._step += 1
        if self._layout.parts == 1:
            total = yield from self._exchange_all(factor, more)
        else:
            total = yield from self._exchange_parts(factor, more)
        if not self._layout.settings.error_feedback:
            self._residual = None
        return total if total.shape[0] == self._elements else total[: self._elements]

    @property
    def residual(self) -> Any:
        """The rounding errors kept by this rank, [elements] float32."""
        return paddle.zeros([self._elements], "float32") if self._residual is None else self._residual[: self._elements]

    def restore(self, residual: Any, step: int) -> None:
        """Continue with another ``residual``, after ``step`` sums."""
        self._step = step
        self._residual = paddle.zeros([self._layout.padded_elements], "float32")
        self._residual[: self._elements] = residual

    @property
    def step(self) -> int:
        """The number of sums so far."""
        return self._step

    @property
    def has_error_feedback(self) -> bool:
        """Whether rounding errors are added to the next sum."""
        return self._layout.settings.error_feedback

    def _exchange_all(self, factor: float, more: bool) -> Stages[Any]:
        wire, self._residual = self._codec.encode(self._residual, self._random(0))
        wires = yield from self._all_to_all.gather(wire, more)
        return self._codec.decode(wires, factor)

    def _exchange_parts(self, factor: float, more: bool) -> Stages[Any]:
        """Each owner adds its own part unrounded and keeps the rounding error of the sums."""
        layout, own = self._layout, self._all_to_all.position
        size = layout.part_elements
        mine = self._residual[own * size : (own + 1) * size].clone()
        wire, left = self._codec.encode(self._residual, self._random(0))
        received = yield from self._all_to_all.exchange(parts_of(wire, layout))
        total = self._codec.decode(received, 1.0, mine)
        sums, rest = self._codec.encode(total, self._random(1))
        self._residual = left
        self._residual[own * size : (own + 1) * size] = rest
        wires = yield from self._all_to_all.gather(sums, more)
        return paddle.concat([self._codec.decode([part], factor) for part in wires])

    def _random(self, phase: int) -> Any:
        settings = self._layout.settings
        return (
            settings.dither(self._name, self._all_to_all.position, phase, self._step) if settings.stochastic else None
        )


def parts_of(wire: Any, layout: QuantisedLayout) -> list[Any]:
    """One wire per part of ``wire``: the levels of all parts are contiguous, followed by all scales."""
    levels = layout.part_elements * layout.settings.bits // 8
    cut, scales = levels * layout.parts, layout.part_bytes - levels
    return [
        paddle.concat([wire[i * levels : (i + 1) * levels], wire[cut + i * scales : cut + (i + 1) * scales]])
        for i in range(layout.parts)
    ]


@dataclass(frozen=True)
class RoundedSum:
    """``allreduce`` sums over all ranks, and ``rounded`` where values are quantised: the same without local groups."""

    allreduce: Allreduce
    rounded: QuantisedAllreduce


class QuantisedSums:
    """Makes quantised sums over a plan's ranks, or between the leaders of its local groups.

    ``allreduces``: one per communicator; averagings use the first one. All ranks create it in the same order.
    """

    def __init__(self, job: Job, plan: CommPlan, allreduces: Sequence[Allreduce]) -> None:
        self._allreduces = [without_cast(allreduce) for allreduce in allreduces]
        self._on_host = job.engine.reads_values
        self._members = list(range(plan.world_size))
        if plan.group_size:
            self._members = leaders_of(local_groups(plan.world_size, plan.group_size))
        used = self._allreduces if any(bucket.is_quantised for bucket in plan.buckets) else self._allreduces[:1]
        self._all_to_all = [make_all_to_all(job, _group_of(allreduce), self._members) for allreduce in used]
        self.notices = notices_of(self._on_host)
        """Notes to users about the codec, once."""

    def make(self, communicator: int, name: str, elements: int, settings: QuantisedSettings) -> RoundedSum:
        """The sum of a buffer [elements], float32, on a communicator."""
        layout = QuantisedLayout(elements, len(self._members), settings)
        codec = make_codec(settings, self._on_host)
        rounded = QuantisedAllreduce(name, self._all_to_all[communicator], codec, layout)
        allreduce = self._allreduces[communicator]
        if isinstance(allreduce, HierarchicalAllreduce):
            return RoundedSum(allreduce.with_between(rounded), rounded)
        return RoundedSum(rounded, rounded)


def _group_of(allreduce: Allreduce) -> Any:
    if isinstance(allreduce, HierarchicalAllreduce):
        return allreduce.leaders_group
    assert isinstance(allreduce, FlatAllreduce)
    return allreduce.group


class AllToAll:
    """How the members of a sum exchange parts. Tensors are flat, of one size and dtype on all members.

    ``pairs``: by the other member's position, a group for each direction, where the backend has no all-to-all: Paddle's
    Gloo has none, and it numbers messages between two of several ranks wrongly, so one member sends the other a
    broadcast; all of them at the same time. The group of what the lower one sends comes first. ``keeps_room``: one
    exchange ends before the next one begins, and its results are read before that, so that both may use the same
    memory.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        pairs: dict[int, tuple[Any, Any]] | None = None,
        keeps_room: bool = False,
    ) -> None:
        self.members = len(ranks)
        self.position = list(ranks).index(rank) if rank in ranks else -1
        self._ranks = list(ranks)
        self._group = group
        self._pairs = pairs
        self._rounds = rounds(self.members)
        self._keeps_room = keeps_room
        self._kept: dict[int, Any] = {}

    def room(self, number: int, elements: int, dtype: Any) -> Any:
        """Memory for a result, [elements]: what it holds is lost when the next one of this number is asked for."""
        if not self._keeps_room:
            return paddle.empty([elements], dtype)
        nbytes = elements * ITEM_BYTES[str(dtype).rpartition(".")[2]]
        kept = self._kept.get(number)
        if kept is None or kept.shape[0] < nbytes:
            kept = self._kept[number] = paddle.empty([nbytes], "uint8")
        return paddle.view(_C_ops.slice(kept, [0], [0], [nbytes], [1], []), dtype)

    def gather(self, wire: Any, more: bool = False) -> Stages[list[Any]]:
        """Every member's ``wire``, uint8, in the order of members, on every member."""
        gathered = paddle.empty([self.members * wire.shape[0]], "uint8")
        yield Stage((Collective("all_gather", self._group, wire, output=gathered),), more)
        return list(paddle.split(gathered, self.members))

    def exchange(self, wires: Sequence[Any]) -> Stages[list[Any]]:
        """Send ``wires[i]`` to member i; returns what the members sent to this one, in their order."""
        if self._pairs is None:
            sent = paddle.concat(list(wires))
            parts = paddle.empty(sent.shape, sent.dtype)
            yield Stage((Collective("all_to_all", self._group, sent, output=parts),), more=True)
            return [part for i, part in enumerate(paddle.split(parts, self.members)) if i != self.position]
        received: dict[int, Any] = {}
        collectives = []
        for partners in self._rounds:
            other = partners.get(self.position)
            if other is not None:
                received[other] = self.room(other, wires[other].shape[0], wires[other].dtype)
                members = sorted((self.position, other))
                for sender, group in zip(members, self._pairs[other], strict=True):
                    tensor = wires[other] if sender == self.position else received[other]
                    collectives.append(Collective("broadcast", group, tensor, self._ranks[sender]))
        yield Stage(tuple(collectives), more=True)
        return [received[other] for other in sorted(received)]


def rounds(members: int) -> list[dict[int, int]]:
    """Rounds of a round-robin tournament: each member has at most one partner per round, and all pairs occur."""
    size = members + members % 2
    table = []
    for turn in range(size - 1):
        seats = [size - 1, *((turn + i) % (size - 1) for i in range(size - 1))]
        pairs = [(seats[i], seats[size - 1 - i]) for i in range(size // 2)]
        there = [pair for pair in pairs if max(pair) < members]
        table.append(dict(there) | {second: first for first, second in there})
    return table


def make_all_to_all(job: Job, group: Any, ranks: Sequence[int], *, for_two: bool = False) -> AllToAll:
    """The way in which ``ranks`` exchange parts over ``group`` and, on Gloo, over two groups for each pair, created
    here.

    All ranks of the job call it in the same order, including those outside ``ranks``, which must not use the result.
    ``for_two``: two ranks exchange as well, instead of gathering everything.
    """
    rank = job.cluster.rank
    if backend_name() != "gloo":
        return AllToAll(group, ranks, rank)
    pairs = list(combinations(ranks, 2)) if len(ranks) > 2 or for_two else []
    made = {pair: (new_group(job, pair), new_group(job, pair)) for pair in pairs}
    return AllToAll(
        group,
        ranks,
        rank,
        {ranks.index(sum(pair) - rank): groups for pair, groups in made.items() if rank in pair},
        job.engine.reads_values,
    )
