"""A sharded optimizer's exchange: a bucket's gradients are summed at the owners of its parameters, and the owners' new
values are sent to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.collectives.engine import HAND_OVER, Collective, Stage, Stages
from fleet_train.collectives.groups import new_group
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.codec import Codec, make_codec
from fleet_train.collectives.methods.dense import Allreduce, FlatAllreduce, Stateless, cast_for, cut_for, divided
from fleet_train.collectives.methods.quantised import AllToAll, make_all_to_all, of_size, parts_of
from fleet_train.collectives.paddle_compat import dynamic_mode, host_view
from fleet_train.plan import Bucket, CommPlan
from fleet_train.plan.phases import local_groups
from fleet_train.plan.shards import layout_of
from fleet_train.profile import Profile
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.base import Piece
from fleet_train.profile.methods.quantised import BITS


@dataclass(frozen=True)
class Owners:
    """The groups of a communicator: ``group``, those that share one copy of the optimizer's state with this rank, and
    ``copies``, those that own the same in other groups; None if there is one copy."""

    group: Any
    all_to_all: AllToAll
    copies: Allreduce | None

    @property
    def member(self) -> int:
        """This rank's position in ``group``."""
        return self.all_to_all.position

    @property
    def number(self) -> int:
        return self.all_to_all.members


def make_owners(job: Job, plan: CommPlan) -> list[Owners]:
    """The owners' groups, one for each communicator; called by all ranks in the same order."""
    return [_owners(job, plan, whole) for whole in job.communicators(plan.communicators)]


def _owners(job: Job, plan: CommPlan, whole: Any) -> Owners:
    neighbours, rank = local_groups(plan.world_size, plan.owners), job.cluster.rank
    mine: list[tuple[Any, AllToAll]] = []
    for ranks in neighbours:
        group = whole if len(neighbours) == 1 else new_group(job, ranks)
        exchange = make_all_to_all(job, group, ranks, for_two=True)
        if rank in ranks:
            mine = [(group, exchange)]
    copies = None
    if len(neighbours) > 1:
        made = [(ranks, new_group(job, ranks)) for ranks in zip(*neighbours, strict=True)]
        copies = FlatAllreduce(next(group for ranks, group in made if rank in ranks))
    return Owners(*mine[0], copies)


class ShardedMethod(Stateless):
    """One bucket: ``average`` gives this rank the averages of what it owns, ``share`` everyone the new parameters.

    A wire holds the pieces of one owner one after the other, and zeros up to the length of the longest. Sums are
    float32 (float64 for float64), in the order of ranks; on the way values may be in 16 bits.
    """

    kind = "sharded"

    def __init__(self, bucket: Bucket, owners: Owners, job: Job) -> None:
        self.bucket = bucket
        self.owners = owners
        self._on_host = job.engine.reads_values
        self._world_size = job.world_size
        self._wire_dtype = compression_of(bucket.compression).wire_dtype
        self._cast, self._cut = cast_for(self._on_host), cut_for(self._on_host)

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        """Average gradients over all ranks; returns what this rank owns, in the order and the shapes of its pieces."""
        wires = self.to_wires([_C_ops.reshape(gradient, [-1]) for gradient in gradients])
        yield HAND_OVER
        total = yield from self.summed(wires)
        del wires
        if self.owners.copies is not None:
            (total,) = yield from self.owners.copies.sum([total])
        (mean,) = divided([total], self._world_size)
        return self._cut_own(mean)

    def summed(self, wires: Any) -> Stages[Any]:
        """The sum of the owners' wires for this rank, [elements of a wire]."""
        dtype, sent = self.bucket.dtype, wires
        if self._wire_dtype:
            sent = self._cast(wires, self._wire_dtype)
        member, size = self.owners.member, self.bucket.part_elements
        values = yield from self.owners.all_to_all.exchange(self._cut(sent, [[size]] * self.owners.number))
        if self._wire_dtype:
            values = [self._cast(each, dtype) for each in values]
        values.insert(member, _C_ops.slice(wires, [0], [member * size], [(member + 1) * size], [1], []))
        total = values[0] + values[1]
        for other in values[2:]:
            total.add_(other)
        return total

    def owned(self, gradients: Sequence[Any]) -> list[Any]:
        """What this rank owns of ``gradients``, which are not sent in this run."""
        flats = [_C_ops.reshape(gradient, [-1]) for gradient in gradients]
        parts = [self._piece(piece, flats) for piece in self.bucket.shards[self.owners.member]]
        return [
            _C_ops.reshape(part.clone(), list(spec.shape)) for part, spec in zip(parts, self._own_specs, strict=True)
        ]

    def share(self, parameters: Sequence[Any], own: Sequence[Any]) -> Stages[None]:
        """Write every owner's new values into ``parameters``, the bucket's. ``own``: this rank's pieces, updated."""
        size, own_wire = self.bucket.part_elements, self.owners.member
        wire = _C_ops.concat(self._with_padding([_C_ops.reshape(value, [-1]) for value in own]), 0)
        held = [parameter.view(parameter.shape) for parameter in parameters]
        yield HAND_OVER
        gathered = self.owners.all_to_all.room(-1, self.owners.number * wire.shape[0], wire.dtype)
        yield Stage((Collective("all_gather", self.owners.group, wire, output=gathered),))
        for piece, start in self.pieces_on_wires():
            if start // size != own_wire or piece.rows:
                elements = piece.of(self.bucket.gradients[piece.gradient]).elements
                self._put(held[piece.gradient], piece, gathered[start : start + elements])

    def to_wires(self, flats: Sequence[Any]) -> Any:
        """Flat tensors of the bucket's gradients -> [owners x elements of a wire]: a copy."""
        parts = [
            part
            for pieces in self.bucket.shards
            for part in self._with_padding([self._piece(piece, flats) for piece in pieces])
        ]
        return _C_ops.concat(parts, 0)

    def pieces_on_wires(self) -> Iterator[tuple[Piece, int]]:
        """Every piece, and where it starts in the result of ``to_wires``."""
        for member, pieces in enumerate(self.bucket.shards):
            start = member * self.bucket.part_elements
            for piece in pieces:
                yield piece, start
                start += piece.of(self.bucket.gradients[piece.gradient]).elements

    @property
    def _own_specs(self) -> tuple[Any, ...]:
        return self.bucket.owned_by(self.owners.member)

    def _cut_own(self, total: Any) -> list[Any]:
        shapes = [spec.shape for spec in self._own_specs]
        if not shapes:
            return []
        used = sum(prod(shape) for shape in shapes)
        return self._cut(total if used == total.shape[0] else total[:used], shapes)

    def _piece(self, piece: Piece, flats: Sequence[Any]) -> Any:
        flat, spec = flats[piece.gradient], self.bucket.gradients[piece.gradient]
        if not piece.rows:
            return flat
        width = prod(spec.shape[1:])
        return _C_ops.slice(flat, [0], [piece.first * width], [(piece.first + piece.rows) * width], [1], [])

    def _with_padding(self, flats: Sequence[Any]) -> list[Any]:
        """The flat gradients with zeros up to a wire's length."""
        missing = self.bucket.part_elements - sum(flat.shape[0] for flat in flats)
        return [*flats, *([paddle.zeros([missing], self.bucket.dtype)] if missing else [])]

    def _put(self, parameter: Any, piece: Piece, values: Any) -> None:
        """Write ``values`` [elements] into the memory of a parameter."""
        width = prod(parameter.shape[1:]) if piece.rows else 0
        if self._on_host:
            start = piece.first * width
            host_view(parameter)[start : start + values.shape[0]] = host_view(values.contiguous())
        elif piece.rows:
            rows = values.reshape([piece.rows, *parameter.shape[1:]])
            end = piece.first + piece.rows
            parameter[piece.first : end] = rows
        else:
            _C_ops.assign_out_(values.reshape(parameter.shape), parameter)


class QuantisedShardedMethod(ShardedMethod):
    """A sharded optimizer's exchange with integers of a few bits on the way to the owners, who add their own values
    unrounded. Each rank keeps the rounding errors of what it sends."""

    kind = "quantised"
    own_state = (".error",)

    def __init__(self, bucket: Bucket, owners: Owners, job: Job, profile: Profile) -> None:
        super().__init__(bucket, owners, job)
        self._layout = layout_of(bucket, profile)
        self._codec: Codec = make_codec(self._layout.settings, self._on_host)
        self._residual: Any = None
        self._step = 0

    def summed(self, wires: Any) -> Stages[Any]:
        layout, member = self._layout, self.owners.member
        size, length = layout.part_elements, self.bucket.part_elements
        self._step += 1
        padded = wires if size == length else _lengthened(wires, self.owners.number, size)
        if self._residual is None:
            self._residual = paddle.zeros([layout.padded_elements], "float32")
        values = self._codec.add(self._residual, [padded])
        mine = values[member * size : (member + 1) * size].clone()
        settings = layout.settings
        random = settings.dither(self.bucket.gradients[0].name, member, 0, self._step) if settings.stochastic else None
        wire, left = self._codec.encode(values, random)
        left[member * size : (member + 1) * size] = 0.0
        self._residual = left if settings.error_feedback else None
        received = yield from self.owners.all_to_all.exchange(parts_of(wire, layout))
        return self._codec.decode(received, 1.0, mine)[:length]

    def state(self) -> dict[str, Any]:
        """The number of sums and, with error feedback, each gradient's error, named as by `KeptErrors`."""
        with dynamic_mode(), paddle.no_grad():
            state = {f"{self.bucket.gradients[0].name}.sums": paddle.to_tensor([self._step], dtype="int64")}
            if self._layout.settings.error_feedback:
                errors = [paddle.zeros([spec.elements], "float32") for spec in self.bucket.gradients]
                for piece, start, end, kept in self._kept():
                    errors[piece.gradient][start:end] = kept
                names = [spec.name for spec in self.bucket.gradients]
                state |= {f"{name}.error": error for name, error in zip(names, errors, strict=True)}
            return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; errors that are missing or of another size start as zero."""
        with dynamic_mode(), paddle.no_grad():
            sums = state.get(f"{self.bucket.gradients[0].name}.sums")
            self._step = int(sums.item()) if sums is not None and sums.numel() == 1 else 0
            errors = [of_size(state.get(f"{spec.name}.error"), spec.elements) for spec in self.bucket.gradients]
            wires = self.to_wires(errors)
            size, length = self._layout.part_elements, self.bucket.part_elements
            self._residual = wires if size == length else _lengthened(wires, self.owners.number, size)

    def _kept(self) -> Iterator[tuple[Piece, int, int, Any]]:
        """Every piece, where it lies in its flat gradient, and the errors kept of it."""
        if self._residual is None:
            return
        size, length = self._layout.part_elements, self.bucket.part_elements
        for piece, start in self.pieces_on_wires():
            spec = self.bucket.gradients[piece.gradient]
            elements, first = piece.of(spec).elements, piece.first * prod(spec.shape[1:])
            position = start // length * size + start % length
            yield piece, first, first + elements, self._residual[position : position + elements]


def _lengthened(wires: Any, number: int, length: int) -> Any:
    """Every wire of ``wires`` with zeros up to ``length``."""
    table = wires.reshape([number, -1])
    padding = paddle.zeros([number, length - table.shape[1]], wires.dtype)
    return paddle.concat([table, padding], axis=1).reshape([-1])


def make_sharded(bucket: Bucket, owners: Owners, job: Job, profile: Profile) -> ShardedMethod:
    """The method of a bucket with owners."""
    if bucket.compression in BITS:
        return QuantisedShardedMethod(bucket, owners, job, profile)
    return ShardedMethod(bucket, owners, job)


def summed_in_order(group: Any, values: Any) -> Stages[Any]:
    """The sum of ``values`` ([elements], a float) over a group, in the order of its ranks: the same bits on all."""
    flat = values.clone()
    yield HAND_OVER
    gathered = paddle.empty([len(group.ranks) * flat.shape[0]], flat.dtype)
    yield Stage((Collective("all_gather", group, flat, output=gathered),))
    parts = paddle.split(gathered, len(group.ranks))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
