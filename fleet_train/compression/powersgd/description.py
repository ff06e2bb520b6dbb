"""Gradients as products of two thin factors: PowerSGD.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from fleet_train.profile.knobs import OnlyWith, knob
from fleet_train.profile.methods.base import (
    FLOAT_BYTES,
    NOT_WITH_LOCAL_SGD,
    Bucket,
    CodingCosts,
    CollectiveSpec,
    Compression,
    Family,
    TensorSpec,
    goes,
)

_POWERSGD = OnlyWith("compression", ("powersgd",))


class PowerSgdKnobs(BaseModel):
    """The settings of PowerSGD."""

    powersgd_rank: int = knob(
        1,
        unit="columns",
        ge=1,
        le=1024,
        only_with=_POWERSGD,
        meaning="Columns of PowerSGD's two factors. Higher = more bytes, closer to the gradient.",
        reason="A gradient [n, m] is sent as n + m numbers per column.",
    )
    powersgd_start_step: int = knob(
        0,
        unit="steps",
        ge=0,
        le=1_000_000_000,
        only_with=_POWERSGD,
        meaning="Steps with whole gradients before PowerSGD starts.",
        reason="Early gradients change fast; PyTorch's advice is a tenth of the training.",
    )
    powersgd_min_compression: float = knob(
        2.0,
        unit="times",
        ge=0,
        le=1_000_000,
        only_with=_POWERSGD,
        meaning="A gradient is compressed when its factors are at least this many times smaller than itself.",
        reason="Other gradients are sent whole, together with the first factors.",
    )
    powersgd_warm_start: bool = knob(
        True,
        only_with=_POWERSGD,
        meaning="Start each step's power iteration from the last step's factor. false = from new random numbers.",
        reason="One iteration per step then follows the gradients; without it each step starts again from "
        "random factors.",
    )
    powersgd_error_feedback: bool = knob(
        True,
        only_with=_POWERSGD,
        meaning="Add to each gradient what PowerSGD left out of earlier ones. false = forget it.",
        reason="Costs one copy of the compressed gradients per rank; without it training may not converge.",
    )


@dataclass(frozen=True)
class PowerSgdSettings:
    """Low-rank compression, as the knobs of the same names say."""

    rank: int = 1
    start_step: int = 0
    min_compression: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    seed: int = 0
    """The seed of the first random factors; must be equal on every rank."""


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


def powersgd_settings(profile: Any) -> PowerSgdSettings:
    """The profile's settings of PowerSGD."""
    knobs: PowerSgdKnobs = profile
    return PowerSgdSettings(
        rank=knobs.powersgd_rank,
        start_step=knobs.powersgd_start_step,
        min_compression=knobs.powersgd_min_compression,
        warm_start=knobs.powersgd_warm_start,
        error_feedback=knobs.powersgd_error_feedback,
    )


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


def random_factor(seed: int, name: str, shape: tuple[int, ...], step: int = 0) -> Any:
    """Standard normal float32 numbers of ``shape``: the same for the same arguments on every rank and machine."""
    import numpy as np

    generator = np.random.default_rng([seed, zlib.crc32(name.encode()), step])
    return generator.standard_normal(shape, dtype=np.float32)


class PowerSgd(Compression):
    """PowerSGD as a compression. Two allreduces: left factors with all uncompressed gradients, then right factors."""

    def on_streams(self, profile: Any) -> str:
        """Why the GPU's streams are waited for, in words: Paddle's qr makes several columns orthonormal; empty for one
        column."""
        if profile.powersgd_rank == 1:
            return ""
        return (
            f"powersgd_rank: {profile.powersgd_rank} ({profile.origin('powersgd_rank')}): Paddle's qr lets the host "
            "wait for the GPU, once for each matrix; powersgd_rank: 1 needs none"
        )

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        del hierarchical
        settings = powersgd_settings(profile)
        elements = powersgd_reduced_elements(bucket, settings)
        if step is not None and step < settings.start_step:
            elements = [bucket.elements]
        return tuple(CollectiveSpec("allreduce", FLOAT_BYTES * number, FLOAT_BYTES) for number in elements)


POWERSGD = PowerSgd(
    "powersgd",
    "low-rank factors",
    family=Family(
        "powersgd",
        "PowerSGD",
        with_buckets=goes("a bucket takes two small allreduces"),
        with_local_groups=goes("both small allreduces take the three steps"),
        with_local_sgd=NOT_WITH_LOCAL_SGD,
        sources="Vogels et al. 2019 (PowerSGD)",
    ),
    knobs=PowerSgdKnobs,
    has_error_feedback=True,
    keeps_nan=True,
    short_warm_up={"powersgd_start_step": 2},
    on_purpose="random matrices have no low rank: the worst case for powersgd; what it leaves out is sent later",
    costs=CodingCosts(0.13e-9, 1.2e-9, 5.5e-9, 2.8e-9),
    ranks_in="fleet_train.compression.powersgd.ranks:make_method",
    numpy_in="fleet_train.compression.powersgd.reference:simulation",
)
COMPRESSIONS = (POWERSGD,)
