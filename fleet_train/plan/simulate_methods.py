"""Gradient compression in numpy for N ranks in one process: the reference for tests of the real methods.

Written from the papers, tensor by tensor and in float64 where the real ones batch float32: a shared mistake is
unlikely. Gradients are ``gradients[rank][position]``, float arrays of the bucket's shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_train.plan.phases import RingChunks, local_groups, phases_of, sent_by_rank
from fleet_train.plan.plan import CommPlan
from fleet_train.profile import Profile
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.base import ITEM_BYTES, Bucket, CollectiveSpec, QuantisedSettings
from fleet_train.profile.methods.quantised import SMALLEST, QuantisedLayout, quantised_settings
from fleet_train.profile.methods.rows import exchanges_of, most_rows, wire_dtype


class DenseSimulation:
    """The exchange of everything in one buffer, unchanged or in 16 bits."""

    def __init__(self, parts: SimulatedParts) -> None:
        self._parts = parts
        self._between = compression_of(parts.bucket.compression).wire_dtype or parts.bucket.dtype
        self._dtype = parts.bucket.dtype if parts.plan.group_size else self._between

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes."""
        total = self._parts.wire.added(self._parts.joined(gradients), self._dtype, self._between)
        return self._parts.split(scaled(total, len(gradients)))


class RowsSimulation:
    """The touched rows of tables, added in float32 in the order of ranks; a table of which a rank has touched more rows
    than pay goes whole."""

    def __init__(self, parts: SimulatedParts) -> None:
        self._parts, self._bucket = parts, parts.bucket

    def sent(self, gradients: Gradients) -> tuple[CollectiveSpec, ...]:
        """The exchanges of a step with these gradients."""
        rows = [0 if whole else most for whole, most in zip(*self._chosen(gradients), strict=True)]
        item_bytes = ITEM_BYTES[wire_dtype(self._bucket)]
        whole = [
            CollectiveSpec("allreduce", table.elements * item_bytes, item_bytes)
            for table, is_whole in zip(self._bucket.gradients, self._chosen(gradients)[0], strict=True)
            if is_whole
        ]
        return (*exchanges_of(self._bucket, rows), *whole)

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes, float32."""
        results = []
        for position, is_whole in enumerate(self._chosen(gradients)[0]):
            local = [rank[position].astype(np.float32) for rank in gradients]
            if is_whole:
                flat = self._parts.wire.added([values.ravel() for values in local], wire_dtype(self._bucket))
                total = flat.reshape(local[0].shape)
            else:
                is_rounded = wire_dtype(self._bucket) == "bfloat16"
                total = added_up([to_bfloat16(values) for values in local] if is_rounded else local)
            results.append(scaled(total, len(gradients)))
        return results

    def _chosen(self, gradients: Gradients) -> tuple[list[bool], list[int]]:
        """Decide for each table whether it goes whole; also returns the most rows that a rank has."""
        most = [
            max(int(np.any(rank[i].reshape(rank[i].shape[0], -1), axis=1).sum()) for rank in gradients)
            for i in range(len(self._bucket.gradients))
        ]
        size = len(gradients)
        limits = [most_rows(table, self._bucket, size) for table in self._bucket.gradients]
        return [rows > limit for rows, limit in zip(most, limits, strict=True)], most


class QuantisedSimulation:
    """The exchange of integers with a scale per block; between the local groups' leaders, if there are local groups."""

    def __init__(self, parts: SimulatedParts) -> None:
        bucket, plan = parts.bucket, parts.plan
        settings = quantised_settings(parts.profile, bucket.compression)
        self._parts = parts
        self._sum = QuantisedSum(bucket.gradients[0].name, bucket.elements, plan.world_size, plan.group_size, settings)

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes, float32."""
        return self._parts.split(scaled(self._sum.sum(self._parts.joined(gradients)), len(gradients)))


class QuantisedSum:
    """The sum of one flat float32 buffer over all ranks, or, with local groups, over the sums of their members.

    In float32, like the real ones: whether a value is above or below the middle of two levels can depend on the last
    bit.
    """

    def __init__(
        self,
        name: str,
        elements: int,
        world_size: int,
        group_size: int,
        settings: QuantisedSettings,
        layout: QuantisedLayout | None = None,
    ) -> None:
        self._local_groups = local_groups(world_size, group_size or 1)
        self._layout = layout or QuantisedLayout(elements, len(self._local_groups), settings)
        self._settings, self._name, self._step = settings, name, 0
        self.residuals = [np.zeros(self._layout.padded_elements, np.float32) for _ in self._local_groups]
        """The rounding errors by member."""

    def sum(self, buffers: Sequence[Array]) -> Array:
        """``buffers[rank]`` [elements] -> their sum on every rank, float32."""
        self._step += 1
        elements = self._layout.elements
        for residual, members in zip(self.residuals, self._local_groups, strict=True):
            total = np.sum([buffers[rank] for rank in members], axis=0, dtype=np.float64)
            residual[:elements] += total.astype(np.float32)
        total = self._whole() if self._layout.parts == 1 else self._in_parts()
        if not self._settings.error_feedback:
            self.residuals = [np.zeros_like(residual) for residual in self.residuals]
        return np.asarray(total[:elements])

    def sum_of_parts(self, wires: Sequence[Array]) -> Array:
        """``wires[member]`` [parts, elements of a part] -> what each owner of a part has after adding to its own part
        what the others send it, float32; nobody rounds the sums."""
        self._step += 1
        size, (parts, length) = self._layout.part_elements, wires[0].shape
        for residual, wire in zip(self.residuals, wires, strict=True):
            residual.reshape(parts, size)[:, :length] += wire
        sent = [self._rounded(residual, member, 0) for member, residual in enumerate(self.residuals)]
        sums = []
        for owner in range(parts):
            part = slice(owner * size, (owner + 1) * size)
            others = [rounded[part] for member, rounded in enumerate(sent) if member != owner]
            sums.append(added_up([self.residuals[owner][part], *others])[:length])
        for member, residual in enumerate(self.residuals):
            keep_error(residual, sent[member])
            residual[member * size : (member + 1) * size] = 0
        if not self._settings.error_feedback:
            self.residuals = [np.zeros_like(residual) for residual in self.residuals]
        return np.stack(sums)

    def _whole(self) -> Array:
        sent = [self._rounded(residual, member, 0) for member, residual in enumerate(self.residuals)]
        for residual, rounded in zip(self.residuals, sent, strict=True):
            keep_error(residual, rounded)
        return added_up(sent)

    def _in_parts(self) -> Array:
        size = self._layout.part_elements
        sent = [self._rounded(residual, member, 0) for member, residual in enumerate(self.residuals)]
        result = np.zeros(self._layout.padded_elements, np.float32)
        for owner in range(self._layout.parts):
            part = slice(owner * size, (owner + 1) * size)
            others = [rounded[part] for member, rounded in enumerate(sent) if member != owner]
            total = added_up([self.residuals[owner][part].copy(), *others])
            result[part] = self._rounded(total, owner, 1)
            keep_error(total, result[part])
            for member, residual in enumerate(self.residuals):
                if member == owner:
                    residual[part] = total
                else:
                    keep_error(residual[part], sent[member][part])
        return result

    def _rounded(self, values: Array, member: int, phase: int) -> Array:
        """The decoded ``values`` on a receiver."""
        count = np.float32(self._settings.levels)
        blocks = values.reshape(-1, self._settings.block)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            scales = np.where(largest < np.float32(SMALLEST), np.float32(0), largest / count)
            inverse = np.where(largest < np.float32(SMALLEST), np.float32(0), count / largest)
            scaled = blocks * inverse
            if self._settings.stochastic:
                scaled = scaled + self._dither(member, phase, scaled.shape)
            rounded = np.rint(scaled) * scales
        return np.asarray(np.where(np.isfinite(largest), rounded, np.float32("nan")).reshape(-1), dtype=np.float32)

    def _dither(self, member: int, phase: int, shape: tuple[int, ...]) -> Array:
        random = self._settings.dither(self._name, member, phase, self._step)
        drawn = random.integers(0, 256, size=shape, dtype=np.uint8)
        return np.asarray((drawn.astype(np.float32) - np.float32(127.5)) / np.float32(256))


def keep_error(residual: Array, sent: Array) -> None:
    """Store the rounding error in ``residual``; zero for blocks with an infinity or NaN."""
    residual[:] = np.where(np.isfinite(sent), residual - sent, np.float32(0))


def added_up(parts: Sequence[Array]) -> Array:
    """The float32 sum, one after the other."""
    total: Array = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def mean(gradients: Gradients) -> list[Array]:
    """The average over the ranks, position by position, float64."""
    return [average(values) for values in zip(*gradients, strict=True)]


def average(values: Sequence[Array]) -> Array:
    """Arrays of one shape: their average, float64."""
    return np.asarray(np.mean(values, axis=0, dtype=np.float64))


Array = np.ndarray[Any, Any]
Gradients = Sequence[Sequence[Array]]
"""``gradients[rank][position]``: arrays of a bucket's shapes."""


class SimulatedWire:
    """The plan's collectives on arrays of all ranks, and the bytes that each rank sends for them.

    ``sent`` [ranks] float64: payload bytes since ``read_sent``.
    """

    def __init__(self, plan: CommPlan) -> None:
        self._plan = plan
        self.sent = np.zeros(plan.world_size)

    def read_sent(self) -> tuple[float, ...]:
        """The bytes that each rank has sent since the last call."""
        sent = tuple(float(nbytes) for nbytes in self.sent)
        self.sent[:] = 0
        return sent

    def count(self, payload: CollectiveSpec) -> None:
        """Count one collective over all ranks, without carrying it out."""
        phases = phases_of(self._plan.world_size, self._plan.group_size, payload)
        self.sent += sent_by_rank(phases, self._plan.world_size)

    def sum(self, buffers: Sequence[Array], dtype: str = "float32", between: str = "") -> Array:
        """The sum over the ranks of flat buffers [elements], one per rank, sent as ``dtype``.

        ``between``: the dtype between the leaders of a hierarchical allreduce, if it differs. Sums in
        float32 and float64 are rounded once (a backend rounds each partial sum, in its own order); those of 16
        bits as Gloo's ring rounds them. 16-bit sums are returned as float32.
        """
        item_bytes = ITEM_BYTES[dtype]
        between_bytes = ITEM_BYTES[between or dtype]
        self.count(CollectiveSpec("allreduce", buffers[0].size * item_bytes, item_bytes, between_bytes))
        return self.added(buffers, dtype, between)

    def added(self, buffers: Sequence[Array], dtype: str = "float32", between: str = "") -> Array:
        """``sum`` without counting its bytes."""
        if not self._plan.group_size:
            return _ring(buffers, dtype)
        members = local_groups(self._plan.world_size, self._plan.group_size)
        joined = [_ring([buffers[rank] for rank in local_group], dtype) for local_group in members]
        return _ring(joined, between or dtype)

    def mean(self, buffers: Sequence[Array], dtype: str = "float32") -> Array:
        """``sum`` over the number of ranks."""
        return scaled(self.sum(buffers, dtype), len(buffers))


@dataclass(frozen=True)
class SimulatedParts:
    """What the reference of a bucket is made from."""

    bucket: Bucket
    plan: CommPlan
    profile: Profile
    wire: SimulatedWire

    def joined(self, gradients: Gradients) -> list[Array]:
        """Each rank's gradients in one flat array."""
        return [np.concatenate([np.ravel(values) for values in rank]) for rank in gradients]

    def split(self, buffer: Array) -> list[Array]:
        """A flat array as arrays of the gradients' shapes."""
        return cut(buffer, [gradient.shape for gradient in self.bucket.gradients])


def scaled(total: Array, world_size: int) -> Array:
    """The mean of ``world_size`` summands, in the dtype of their sum."""
    return np.asarray(total * total.dtype.type(1.0 / world_size))


def cut(buffer: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into consecutive arrays of these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), shapes, strict=True)]


def _ring(buffers: Sequence[Array], dtype: str) -> Array:
    rounded = {"bfloat16": to_bfloat16, "float16": to_float16}.get(dtype)
    if rounded is not None:
        return ring_sum_16_bit(buffers, rounded)
    return np.asarray(np.sum(buffers, axis=0, dtype=np.float64).astype(dtype))


def to_bfloat16(values: Array) -> Array:
    """float32 values rounded to the nearest bfloat16 (ties to even), as float32. NaN stays NaN."""
    bits: Any = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    return np.asarray(np.where(np.isnan(values), np.float32(np.nan), rounded))


def to_float16(values: Array) -> Array:
    """float32 values rounded to the nearest float16, as float32; past 65504 infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(values, dtype=np.float32).astype(np.float16), dtype=np.float32)


def ring_sum_16_bit(values: Sequence[Array], rounded: Callable[[Array], Array]) -> Array:
    """A ring allreduce of flat 16-bit buffers (given per rank, as float32; result float32), with Gloo's chunks.

    Each chunk starts at the rank before its own and is passed down the ring; every partial sum is rounded. This makes
    N - 1 roundings, in an order that depends on the chunk, after the rounding of the inputs; a bfloat16 sum is off by
    at most ((1 + 2**-8)**N - 1) * sum(|values|). Source: gloo/allreduce.cc
    (``ring``), and tests on real ranks with bfloat16. Gloo does not sum float16; NCCL does, in a different order.
    """
    count, world_size = values[0].size, len(values)
    inputs = [rounded(value) for value in values]
    chunks = RingChunks.even(world_size, 2 * count, 2)
    chunk = chunks.segments_per_rank * chunks.segment_bytes // 2
    result = np.zeros(count, np.float32)
    for owner in range(world_size):
        part = slice(owner * chunk, (owner + 1) * chunk)
        total = inputs[(owner - 1) % world_size][part]
        for distance in range(2, world_size + 1):
            total = rounded(total + inputs[(owner - distance) % world_size][part])
        result[part] = total
    return result
