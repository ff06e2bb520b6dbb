"""The compressions: every value of the knob ``compression``, and what the plan needs to know about it.

To add one, add it to the schema and here, to `fleet_train.collectives.methods.registry.METHODS`, to
`fleet_train.plan.simulate_methods.METHODS`, to the table of strategies that go together, and to the effects of knobs in
the tests. A missing entry in one of them is an error when a plan or a program is made, never another compression.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_train.plan.phases import CollectiveSpec, gradient_settings
from fleet_train.plan.plan import ITEM_BYTES, Bucket, TensorSpec
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of

Exchanges = tuple[CollectiveSpec, ...]


@dataclass(frozen=True)
class Compression:
    """``sent``: the exchanges of a bucket in a step at full strength; True = a hierarchical allreduce carries it."""

    sent: Callable[[Bucket, Profile, bool], Exchanges]
    wire_dtype: str = ""
    """The dtype on the wire; empty = the gradient's own. With local groups, only between their leaders."""
    keeps_nan: bool = False
    """Whether a NaN of a gradient would stay in the kept state and be sent later."""


def _dense(bucket: Bucket, _: Profile, __: bool) -> Exchanges:
    return (CollectiveSpec("allreduce", bucket.nbytes, ITEM_BYTES[bucket.dtype]),)


def _in_16_bits(bucket: Bucket, _: Profile, hierarchical: bool) -> Exchanges:
    if hierarchical:
        return (CollectiveSpec("allreduce", bucket.nbytes, ITEM_BYTES[bucket.dtype], between_item_bytes=2),)
    return (CollectiveSpec("allreduce", 2 * bucket.elements, 2),)


def _in_few_bits(bucket: Bucket, profile: Profile, _: bool) -> Exchanges:
    return (CollectiveSpec("quantised", bucket.nbytes, ITEM_BYTES[bucket.dtype], quantised=gradient_settings(profile)),)


def _factors(bucket: Bucket, profile: Profile, _: bool) -> Exchanges:
    elements = powersgd_reduced_elements(bucket, powersgd_settings(profile))
    return tuple(CollectiveSpec("allreduce", FLOAT_BYTES * number, FLOAT_BYTES) for number in elements)


def _largest(bucket: Bucket, profile: Profile, _: bool) -> Exchanges:
    settings = dgc_settings(profile)
    selected, whole = dgc_kept_elements(bucket, settings, settings.rampup_begin_step + settings.rampup_step)
    sparse = (CollectiveSpec("allgather", SPARSE_BYTES * selected, SPARSE_BYTES),) if selected else ()
    return sparse + ((CollectiveSpec("allreduce", FLOAT_BYTES * whole, FLOAT_BYTES),) if whole else ())


COMPRESSIONS: dict[str, Compression] = {
    "none": Compression(_dense),
    "bf16": Compression(_in_16_bits, wire_dtype="bfloat16"),
    "fp16": Compression(_in_16_bits, wire_dtype="float16"),
    "int8": Compression(_in_few_bits),
    "int4": Compression(_in_few_bits),
    "powersgd": Compression(_factors, keeps_nan=True),
    "dgc": Compression(_largest, keeps_nan=True),
}


def compression_of(name: str) -> Compression:
    """The plan's entry for a compression, by the knob's value. Raises ConversionError for an unknown one."""
    return entry_of("compression", name, COMPRESSIONS, "bytes in the plan")


def collectives_of(bucket: Bucket, profile: Profile, hierarchical: bool) -> Exchanges:
    """The exchanges of a bucket in a step at full strength, by its compression."""
    return compression_of(bucket.compression).sent(bucket, profile, hierarchical)


# The settings of gradient compression, and the compressed size of a bucket. Pure arithmetic.


Array = np.ndarray[Any, Any]

FLOAT_BYTES = 4
# A float32 value and its int32 index.
SPARSE_BYTES = 8


@dataclass(frozen=True)
class PowerSgdSettings:
    """Low-rank compression. Source: Vogels, Karimireddy, Jaggi, "PowerSGD", 2019."""

    # Columns of both factors. Higher = more bytes, closer to the gradient.
    rank: int = 1
    # Steps with whole gradients before compression starts.
    start_step: int = 0
    # A matrix is compressed when its factors are at least this many times smaller than itself. 0 = always.
    min_compression: float = 2.0
    # Start each power iteration from the last step's factor; without it from a new random one.
    warm_start: bool = True
    # Add the compression errors of earlier gradients to each gradient.
    error_feedback: bool = True
    # The seed of the first random factors; must be equal on every rank.
    seed: int = 0


@dataclass(frozen=True)
class DgcSettings:
    """Top-k compression. Source: Lin et al., "Deep Gradient Compression", 2018; names are Fleet's."""

    # The optimizer's momentum, applied here before the selection. The optimizer after it must have none.
    momentum: float = 0.9
    use_nesterov: bool = False
    # Steps with whole gradients before compression starts.
    rampup_begin_step: int = 0
    # Steps over which the sparsities are spread evenly; the last one holds from then on.
    rampup_step: int = 1
    # Shares of each gradient that are not sent.
    sparsity: tuple[float, ...] = (0.999,)
    # Bound of the L2 norm of one gradient's average: each rank clips its own at this / sqrt(ranks). None = no clip.
    local_grad_clip_norm: float | None = None
    # Gradients with fewer elements are sent whole (Fleet's bound).
    min_elements: int = 16384
    # Clear the velocity of sent elements, so that stale momentum does not accumulate.
    momentum_factor_masking: bool = True


@dataclass(frozen=True)
class Matrix:
    """A gradient that is sent as two factors: [rows, rank] and [rank, columns]."""

    position: int  # in its bucket
    name: str
    rows: int
    columns: int
    rank: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.columns, self.rank


def matrix_of(position: int, gradient: TensorSpec, settings: PowerSgdSettings) -> Matrix | None:
    """The gradient as a matrix [shape[0], rest], or None if factors of the requested rank would not pay off."""
    if len(gradient.shape) < 2 or gradient.elements == 0:
        return None
    rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
    rank = min(settings.rank, rows, columns)
    if (rows + columns) * rank * settings.min_compression >= rows * columns:
        return None
    return Matrix(position, gradient.name, rows, columns, rank)


def low_rank_families(bucket: Bucket, settings: PowerSgdSettings) -> tuple[list[list[Matrix]], list[int]]:
    """Matrices of equal shape together (in order of first appearance), and the positions of uncompressed gradients."""
    families: dict[tuple[int, int, int], list[Matrix]] = {}
    whole: list[int] = []
    for position, gradient in enumerate(bucket.gradients):
        matrix = matrix_of(position, gradient, settings)
        if matrix is None:
            whole.append(position)
        else:
            families.setdefault(matrix.shape, []).append(matrix)
    return list(families.values()), whole


def powersgd_reduced_elements(bucket: Bucket, settings: PowerSgdSettings) -> list[int]:
    """float32 elements of each allreduce of a compressed step: left factors with uncompressed gradients, right
    factors."""
    families, whole = low_rank_families(bucket, settings)
    matrices = [matrix for family in families for matrix in family]
    left = sum(matrix.rows * matrix.rank for matrix in matrices)
    left += sum(bucket.gradients[position].elements for position in whole)
    return [left, sum(matrix.columns * matrix.rank for matrix in matrices)] if matrices else [left]


def random_factor(seed: int, name: str, shape: tuple[int, ...], step: int = 0) -> Array:
    """Standard normal float32 numbers of ``shape``: the same for the same arguments on every rank and machine."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode()), step])
    return generator.standard_normal(shape, dtype=np.float32)


def is_sparse(gradient: TensorSpec, settings: DgcSettings) -> bool:
    """Whether DGC selects from this gradient, rather than sending it whole."""
    return gradient.elements >= max(1, settings.min_elements)


def sparsity_at(step: int, settings: DgcSettings) -> float | None:
    """The share that is not sent in ``step`` (the first is 0); None while gradients are sent whole.

    Source: Paddle's dgc operator (``get_period_sparcity``).
    """
    since = step - settings.rampup_begin_step
    if since < 0:
        return None
    index = since * len(settings.sparsity) // settings.rampup_step
    return settings.sparsity[min(index, len(settings.sparsity) - 1)]


def kept_elements(elements: int, sparsity: float) -> int:
    """How many of a gradient's elements are sent: at least one."""
    # Rounded first: 1000 * (1 - 0.999) is 1.0000000000000009 or 0.9999999999999998, by the order of operations.
    return max(1, min(elements, int(round(elements * (1.0 - sparsity), 6))))


def dgc_kept_elements(bucket: Bucket, settings: DgcSettings, step: int) -> tuple[int, int]:
    """(elements selected by each rank, elements sent whole) of a bucket in ``step``."""
    sparsity = sparsity_at(step, settings)
    if sparsity is None:
        return 0, bucket.elements
    sparse = [gradient.elements for gradient in bucket.gradients if is_sparse(gradient, settings)]
    return sum(kept_elements(elements, sparsity) for elements in sparse), bucket.elements - sum(sparse)


def powersgd_sent_bytes(bucket: Bucket, settings: PowerSgdSettings, world_size: int) -> float:
    """Bytes that each rank sends for a bucket in a compressed step: 2 (N - 1) / N of the factors (ring allreduce)."""
    return 2 * (world_size - 1) / world_size * FLOAT_BYTES * sum(powersgd_reduced_elements(bucket, settings))


def dgc_sent_bytes(bucket: Bucket, settings: DgcSettings, world_size: int, step: int) -> float:
    """Bytes that each rank sends for a bucket in ``step``: (N - 1) of its selections, a ring allreduce of the rest."""
    selected, whole = dgc_kept_elements(bucket, settings, step)
    return (world_size - 1) * SPARSE_BYTES * selected + 2 * (world_size - 1) / world_size * FLOAT_BYTES * whole


_RAMP_UP = (0.75, 0.9375, 0.984375, 0.996)


def powersgd_settings(profile: Profile) -> PowerSgdSettings:
    """The profile's settings of PowerSGD."""
    return PowerSgdSettings(
        rank=profile.powersgd_rank,
        start_step=profile.powersgd_start_step,
        min_compression=profile.powersgd_min_compression,
        warm_start=profile.powersgd_warm_start,
        error_feedback=profile.powersgd_error_feedback,
    )


def dgc_settings(profile: Profile, momentum: float = 0.0, use_nesterov: bool = False) -> DgcSettings:
    """The profile's settings of DGC, with the momentum taken over from the optimizer."""
    stages = tuple(stage for stage in _RAMP_UP if stage < profile.dgc_sparsity) if profile.dgc_rampup_steps > 1 else ()
    return DgcSettings(
        momentum=momentum,
        use_nesterov=use_nesterov,
        rampup_begin_step=profile.dgc_rampup_begin_step,
        rampup_step=profile.dgc_rampup_steps,
        sparsity=(*stages, profile.dgc_sparsity),
        local_grad_clip_norm=profile.dgc_local_grad_clip_norm or None,
        min_elements=profile.dgc_min_elements,
        momentum_factor_masking=profile.dgc_momentum_factor_masking,
    )
