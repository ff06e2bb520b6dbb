"""The results of a bucket's gradients by compression method, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fleet_train.plan.compressions import (
    FLOAT_BYTES,
    SPARSE_BYTES,
    Array,
    DgcSettings,
    Matrix,
    PowerSgdSettings,
    compression_of,
    dgc_kept_elements,
    dgc_settings,
    is_sparse,
    kept_elements,
    low_rank_families,
    powersgd_reduced_elements,
    powersgd_settings,
    random_factor,
    sparsity_at,
)
from fleet_train.plan.phases import (
    CollectiveSpec,
    QuantisedSettings,
    divide_up,
    gradient_settings,
    local_groups,
    phases_of,
    sent_by_rank,
)
from fleet_train.plan.plan import ITEM_BYTES, Bucket, CommPlan
from fleet_train.plan.simulate_quantised import QuantisedSum
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of


class SimulatedMethod(Protocol):
    """One bucket over all steps."""

    def average(self, gradients: Gradients) -> list[Array]:
        """``gradients[rank][position]`` of the bucket's shapes -> the result on every rank, in its order and shapes."""
        ...


class DenseMethod:
    """Everything in one buffer, unchanged or in 16 bits."""

    def __init__(self, bucket: Bucket, wire: SimulatedWire, dtype: str, between: str) -> None:
        self._bucket, self._wire, self._dtype, self._between = bucket, wire, dtype, between

    def average(self, gradients: Gradients) -> list[Array]:
        flat = [np.concatenate([np.ravel(values) for values in rank]) for rank in gradients]
        return cut(self._wire.mean(flat, self._dtype, self._between), [g.shape for g in self._bucket.gradients])


class PowerSgd:
    """Two allreduces of factors."""

    def __init__(self, bucket: Bucket, world_size: int, wire: SimulatedWire, settings: PowerSgdSettings) -> None:
        self._bucket, self._wire, self._settings = bucket, wire, settings
        self._reference = PowerSgdSimulation(bucket, world_size, settings)
        self._step = 0

    def average(self, gradients: Gradients) -> list[Array]:
        self._step += 1
        whole = self._step <= self._settings.start_step
        elements = [self._bucket.elements] if whole else powersgd_reduced_elements(self._bucket, self._settings)
        for number in elements:
            self._wire.count(CollectiveSpec("allreduce", FLOAT_BYTES * number, FLOAT_BYTES))
        return [values.astype(np.float32) for values in self._reference.step(gradients)]


class Dgc:
    """An all-gather of the largest elements, and an allreduce of gradients sent whole."""

    def __init__(self, bucket: Bucket, world_size: int, wire: SimulatedWire, settings: DgcSettings) -> None:
        self._bucket, self._wire, self._settings = bucket, wire, settings
        self._reference = DgcSimulation(bucket, world_size, settings)
        self._step = 0

    def average(self, gradients: Gradients) -> list[Array]:
        selected, whole = dgc_kept_elements(self._bucket, self._settings, self._step)
        self._step += 1
        self._wire.count(CollectiveSpec("allgather", SPARSE_BYTES * selected, SPARSE_BYTES))
        self._wire.count(CollectiveSpec("allreduce", FLOAT_BYTES * whole, FLOAT_BYTES))
        return [values.astype(np.float32) for values in self._reference.step(gradients)]


class FewBits:
    """Integers with a scale per block; between the local groups' leaders, if there are local groups."""

    def __init__(self, bucket: Bucket, plan: CommPlan, wire: SimulatedWire, settings: QuantisedSettings) -> None:
        self._bucket, self._wire = bucket, wire
        name = bucket.gradients[0].name
        self._sum = QuantisedSum(name, bucket.elements, plan.world_size, plan.team_size, settings)

    def average(self, gradients: Gradients) -> list[Array]:
        self._wire.count(self._bucket.sent[0])
        flat = [np.concatenate([np.ravel(values) for values in rank]) for rank in gradients]
        mean = self._sum.sum(flat) * np.float32(1.0 / len(flat))
        return cut(mean, [gradient.shape for gradient in self._bucket.gradients])


@dataclass(frozen=True)
class _Parts:
    """The parts of a method; DGC takes over ``momentum`` and ``use_nesterov`` from the optimizer."""

    bucket: Bucket
    plan: CommPlan
    profile: Profile
    wire: SimulatedWire
    momentum: float
    use_nesterov: bool


def _dense(parts: _Parts) -> SimulatedMethod:
    sent = compression_of(parts.bucket.compression).wire_dtype or parts.bucket.dtype
    return DenseMethod(parts.bucket, parts.wire, parts.bucket.dtype if parts.plan.team_size else sent, sent)


def _in_few_bits(parts: _Parts) -> SimulatedMethod:
    return FewBits(parts.bucket, parts.plan, parts.wire, gradient_settings(parts.profile))


def _powersgd(parts: _Parts) -> SimulatedMethod:
    return PowerSgd(parts.bucket, parts.plan.world_size, parts.wire, powersgd_settings(parts.profile))


def _dgc(parts: _Parts) -> SimulatedMethod:
    settings = dgc_settings(parts.profile, parts.momentum, parts.use_nesterov)
    return Dgc(parts.bucket, parts.plan.world_size, parts.wire, settings)


METHODS: dict[str, Callable[[_Parts], SimulatedMethod]] = {
    "none": _dense,
    "bf16": _dense,
    "fp16": _dense,
    "int8": _in_few_bits,
    "int4": _in_few_bits,
    "powersgd": _powersgd,
    "dgc": _dgc,
}
"""By the bucket's compression: `fleet_train.plan.compressions.COMPRESSIONS` has the same keys."""


def make_method(
    bucket: Bucket, plan: CommPlan, profile: Profile, wire: SimulatedWire, momentum: float, use_nesterov: bool
) -> SimulatedMethod:
    """The method of one bucket. Raises ConversionError for a compression without a simulation."""
    make = entry_of("compression", bucket.compression, METHODS, "method in the simulation")
    return make(_Parts(bucket, plan, profile, wire, momentum, use_nesterov))


def cut(buffer: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into consecutive arrays of these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), shapes, strict=True)]


# Gradient compression in numpy for N ranks in one process: the reference for tests of the real methods.
#
# Written from the papers, tensor by tensor and in float64 where the real ones batch float32: a shared mistake is
# unlikely. Gradients are ``gradients[rank][position]``, float arrays of the bucket's shapes.


Gradients = Sequence[Sequence[Array]]


class PowerSgdSimulation:
    """PowerSGD of one bucket. Source: Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2.

    Left factors with linearly dependent columns keep a zero column here, where a QR decomposition puts any other
    direction: the sum is the same, the next start is not.
    """

    def __init__(self, bucket: Bucket, world_size: int, settings: PowerSgdSettings) -> None:
        families, self._whole = low_rank_families(bucket, settings)
        self._matrices = [matrix for family in families for matrix in family]
        self._settings = settings
        self._step = 0
        self.errors: list[dict[str, Array]] = [
            {m.name: np.zeros((m.rows, m.columns)) for m in self._matrices} for _ in range(world_size)
        ]
        self._rights: dict[str, Array] = {}

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes, float64."""
        self._step += 1
        results = mean(gradients)
        if self._step <= self._settings.start_step:
            return results
        for matrix in self._matrices:
            shape = results[matrix.position].shape
            local = [rank[matrix.position].reshape(matrix.rows, matrix.columns) for rank in gradients]
            results[matrix.position] = self._compress(matrix, local).reshape(shape)
        return results

    def _compress(self, matrix: Matrix, local: list[Array]) -> Array:
        corrected = [values + errors[matrix.name] for values, errors in zip(local, self.errors, strict=True)]
        joint = average(corrected)
        left = orthonormal(joint @ self._start(matrix))
        self._rights[matrix.name] = joint.T @ left
        result: Array = left @ self._rights[matrix.name].T
        if self._settings.error_feedback:
            for errors, values in zip(self.errors, corrected, strict=True):
                errors[matrix.name] = values - result
        return result

    def _start(self, matrix: Matrix) -> Array:
        shape = (matrix.rank, matrix.columns)
        step = 0 if self._settings.warm_start else self._step
        start: Array = random_factor(self._settings.seed, matrix.name, shape, step).T
        if self._settings.warm_start and matrix.name in self._rights:
            right = self._rights[matrix.name]
            start = np.where(np.abs(right).max(axis=0, keepdims=True) > 0, right, start)
        return start


def orthonormal(columns: Array) -> Array:
    """Gram-Schmidt, twice; columns that add nothing become zero. [rows, rank] float64."""
    result = np.zeros(columns.shape)
    for j in range(columns.shape[1]):
        rest = columns[:, j].astype(np.float64)
        length = np.linalg.norm(rest)
        for _ in range(2):
            rest = rest - result[:, :j] @ (result[:, :j].T @ rest)
        if np.linalg.norm(rest) > 1e-6 * length:
            result[:, j] = rest / np.linalg.norm(rest)
    return result


class DgcSimulation:
    """DGC of one bucket. Source: Lin et al. 2018, algorithms 1 to 4, with one selection per gradient."""

    def __init__(self, bucket: Bucket, world_size: int, settings: DgcSettings) -> None:
        self._gradients = bucket.gradients
        self._settings = settings
        self._world_size = world_size
        self._step = 0
        shapes = [gradient.shape for gradient in bucket.gradients]
        self.velocities: list[list[Array]] = [[np.zeros(shape) for shape in shapes] for _ in range(world_size)]
        self.pending: list[list[Array]] = [[np.zeros(shape) for shape in shapes] for _ in range(world_size)]

    def step(self, gradients: Gradients) -> list[Array]:
        """The update on every rank, including momentum, in the bucket's order and shapes, float64."""
        sparsity = sparsity_at(self._step, self._settings)
        self._step += 1
        return [
            self._select(position, [rank[position] for rank in gradients], sparsity)
            if sparsity is not None and is_sparse(gradient, self._settings)
            else self._whole(position, [rank[position] for rank in gradients])
            for position, gradient in enumerate(self._gradients)
        ]

    def _whole(self, position: int, local: list[Array]) -> Array:
        updates = [self._accelerate(rank, position, average(local)) for rank in range(self._world_size)]
        return updates[0]

    def _select(self, position: int, local: list[Array], sparsity: float) -> Array:
        total = np.zeros(local[0].shape)
        for rank, values in enumerate(local):
            pending = self.pending[rank][position]
            pending += self._accelerate(rank, position, self._clipped(values))
            kept = kept_elements(pending.size, sparsity)
            places = np.argsort(-np.abs(pending), axis=None, kind="stable")[:kept]
            total.flat[places] += pending.flat[places]
            pending.flat[places] = 0
            if self._settings.momentum_factor_masking:
                self.velocities[rank][position].flat[places] = 0
        return total / self._world_size

    def _accelerate(self, rank: int, position: int, values: Array) -> Array:
        momentum = self._settings.momentum
        velocity = self.velocities[rank][position]
        velocity *= momentum
        velocity += values
        return np.asarray(values + momentum * velocity) if self._settings.use_nesterov else velocity.copy()

    def _clipped(self, values: Array) -> Array:
        if self._settings.local_grad_clip_norm is None:
            return values
        bound = self._settings.local_grad_clip_norm / np.sqrt(self._world_size)
        norm = max(float(np.linalg.norm(values.astype(np.float64))), 1e-30)
        return np.asarray(values * min(1.0, bound / norm))


def mean(gradients: Gradients) -> list[Array]:
    """The average over the ranks, position by position, float64."""
    return [average(values) for values in zip(*gradients, strict=True)]


def average(values: Sequence[Array]) -> Array:
    """Arrays of one shape: their average, float64."""
    return np.asarray(np.mean(values, axis=0, dtype=np.float64))


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


Rounding = Callable[[Array], Array]


def rounding_of(dtype: str) -> Rounding | None:
    """How a sum sent as ``dtype`` is rounded; None for wider types, where it does not matter."""
    return {"bfloat16": to_bfloat16, "float16": to_float16}.get(dtype)


def gloo_sum_bfloat16(values: Sequence[Array]) -> Array:
    """The bits of Gloo's ring allreduce of flat bfloat16 buffers (given per rank, as float32; result float32).

    The result is off by at most ((1 + 2**-8)**N - 1) * sum(|values|).
    """
    return ring_sum_16_bit(values, to_bfloat16)


def ring_sum_16_bit(values: Sequence[Array], rounded: Rounding) -> Array:
    """A ring allreduce of flat 16-bit buffers (given per rank, as float32; result float32), with Gloo's chunks.

    Each chunk starts at the rank before its own and is passed down the ring; every partial sum is rounded. This makes
    N - 1 roundings, in an order that depends on the chunk, after the rounding of the inputs. Source: gloo/allreduce.cc
    (``ring``), and tests on real ranks with bfloat16. Gloo does not sum float16; NCCL does, in a different order.
    """
    count, world_size = values[0].size, len(values)
    inputs = [rounded(value) for value in values]
    chunk = _gloo_chunk_elements(count, world_size)
    result = np.zeros(count, np.float32)
    for owner in range(world_size):
        part = slice(owner * chunk, (owner + 1) * chunk)
        total = inputs[(owner - 1) % world_size][part]
        for distance in range(2, world_size + 1):
            total = rounded(total + inputs[(owner - distance) % world_size][part])
        result[part] = total
    return result


def _gloo_chunk_elements(count: int, world_size: int, item_bytes: int = 2) -> int:
    """Elements per rank's chunk: whole segments of at most 1 MiB, two or more per rank."""
    segments = max(2 * world_size, divide_up(count * item_bytes, 2**20))
    segments = divide_up(segments, world_size) * world_size
    segment_bytes = divide_up(count * item_bytes, segments)
    return segments // world_size * divide_up(segment_bytes, item_bytes)


# Sums over all ranks as computed by the plan's collectives, and the bytes that each rank sends for them.


class SimulatedWire:
    """The collectives of one plan on arrays of all ranks. ``sent`` [ranks] float64: payload bytes since ``take``."""

    def __init__(self, plan: CommPlan) -> None:
        self._plan = plan
        self.sent = np.zeros(plan.world_size)

    def take(self) -> tuple[float, ...]:
        """The bytes that each rank has sent since the last call."""
        sent = tuple(float(nbytes) for nbytes in self.sent)
        self.sent[:] = 0
        return sent

    def count(self, payload: CollectiveSpec) -> None:
        """Count one collective over all ranks, without carrying it out."""
        phases = phases_of(self._plan.world_size, self._plan.team_size, payload)
        self.sent += sent_by_rank(phases, self._plan.world_size)

    def sum(self, buffers: Sequence[Array], dtype: str = "float32", between: str = "") -> Array:
        """The sum over the ranks of flat buffers [elements], one per rank, sent as ``dtype``.

        ``between``: the dtype between the leaders of a hierarchical allreduce, if it differs. Sums in
        float32 and float64 are rounded once (a backend rounds each partial sum, in its own order); those of 16
        bits as Gloo's ring rounds them. 16-bit sums are returned as float32.
        """
        between = between or dtype
        item_bytes = ITEM_BYTES[dtype]
        self.count(CollectiveSpec("allreduce", buffers[0].size * item_bytes, item_bytes, ITEM_BYTES[between]))
        if not self._plan.team_size:
            return _ring(buffers, dtype)
        members = local_groups(self._plan.world_size, self._plan.team_size)
        return _ring([_ring([buffers[rank] for rank in local_group], dtype) for local_group in members], between)

    def mean(self, buffers: Sequence[Array], dtype: str = "float32", between: str = "") -> Array:
        """``sum`` over the number of ranks."""
        total = self.sum(buffers, dtype, between)
        return np.asarray(total * total.dtype.type(1.0 / self._plan.world_size))


def _ring(buffers: Sequence[Array], dtype: str) -> Array:
    rounded = rounding_of(dtype)
    if rounded is not None:
        return ring_sum_16_bit(buffers, rounded)
    return np.asarray(np.sum(buffers, axis=0, dtype=np.float64).astype(dtype))
