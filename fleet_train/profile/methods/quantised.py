"""Gradients as integers of a few bits; LocalSGD sends its differences in the same way.

A buffer is split into blocks; each has a scale, its largest absolute value over the number of levels on one side, and
every element is sent as an integer multiple of the scale. Source of scales per block: Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2021; of error feedback: Seide et al., 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from fleet_train.profile.knobs import OnlyWith, entry_of, knob
from fleet_train.profile.methods.base import (
    ITEM_BYTES,
    ROUNDED_FOR_OWNERS,
    Bucket,
    CodingCosts,
    CollectiveSpec,
    Compression,
    Family,
    QuantisedSettings,
    goes,
)

BITS = {"int8": 8, "int4": 4}
"""Bits of an element by the value of ``compression`` and of ``local_sgd_dtype``."""
_IS_STOCHASTIC = {"nearest": False, "stochastic": True}
WHOLE = 12582912.0
"""1.5 * 2**23: a float32 of this size has no fraction, so that adding it rounds to the nearest integer (ties to even),
which is then in the lowest byte."""
SMALLEST = 2.0**-100
"""Blocks whose largest absolute value is below this are sent as zeros: the inverse of their scale would overflow."""

_QUANTISED = OnlyWith("compression", tuple(BITS), either=("local_sgd_dtype", tuple(BITS)))


class QuantisedKnobs(BaseModel):
    """How int8 and int4 round."""

    quantised_block_size: int = knob(
        512,
        unit="elements",
        ge=32,
        le=65536,
        only_with=_QUANTISED,
        meaning="Elements that share a scale in int8 or int4; a multiple of 32. Smaller = closer to the "
        "values, more bytes: a scale takes 4.",
        reason="A block's scale is its largest absolute value over 127 (int8) or 7 (int4).",
    )
    quantised_error_feedback: bool = knob(
        True,
        only_with=_QUANTISED,
        meaning="Add earlier rounding errors to what int8 or int4 sends. false = forget them.",
        reason="Costs one copy of the sent values per rank, kept in checkpoints; without it int4 may not converge.",
    )
    quantised_rounding: Literal["nearest", "stochastic"] = knob(
        "nearest",
        only_with=_QUANTISED,
        meaning="How int8 and int4 round: to the nearest level, or up with the probability of the fractional part.",
        reason="stochastic has the exact value as its mean, for use without error feedback; its random numbers depend "
        "only on parameter, rank and step, so that a resumed run draws the same ones. nearest has the smaller error.",
    )


@dataclass(frozen=True)
class QuantisedLayout:
    """How ``members`` exchange ``elements`` float32 numbers.

    Two members send each other everything and add what they read. More members split the buffer into one part each:
    every member sends each owner its part, the owners add, round the sums, and all-gather the parts.
    """

    elements: int
    members: int
    settings: QuantisedSettings
    always_in_parts: bool = False

    @property
    def parts(self) -> int:
        return self.members if self.members > 2 or self.always_in_parts else 1

    @property
    def part_blocks(self) -> int:
        return -(-self.elements // (self.settings.block * self.parts))

    @property
    def part_elements(self) -> int:
        return self.part_blocks * self.settings.block

    @property
    def part_bytes(self) -> int:
        return self.part_blocks * self.settings.block_bytes

    @property
    def padded_elements(self) -> int:
        """Elements of all parts, each padded to whole blocks."""
        return self.parts * self.part_elements


def averaging_settings(profile: Any) -> QuantisedSettings | None:
    """The settings of ``local_sgd_dtype: int8`` or ``int4``; None for others."""
    return quantised_settings(profile, profile.local_sgd_dtype) if profile.local_sgd_dtype in BITS else None


def quantised_settings(profile: Any, kind: str) -> QuantisedSettings:
    """The profile's settings for a number format, a key of ``BITS``."""
    return QuantisedSettings(
        bits=BITS[kind],
        block=profile.quantised_block_size,
        error_feedback=profile.quantised_error_feedback,
        stochastic=entry_of("quantised_rounding", profile.quantised_rounding, _IS_STOCHASTIC, "rounding"),
    )


_FAMILY = Family(
    "quantised",
    "quantised wire format",
    with_buckets=goes("each bucket is rounded, with scales per block"),
    with_local_groups=goes("inside a local group float32, between the leaders quantised values"),
    with_local_sgd=goes(
        "concerns the warm-up, at whose end the rounding errors kept (half a level of one step) are dropped; "
        "local_sgd_dtype is for the averaging"
    ),
    with_sharding=ROUNDED_FOR_OWNERS,
    reason="int8 and int4: integers with a scale per block, summed in float32 (with a hierarchical allreduce between "
    "the leaders only).",
    sources="Seide et al. 2014 (error feedback), Dettmers et al. 2021 (block scales)",
)


class Quantised(Compression):
    """A sum in float32 of values that are sent in a few bits."""

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        del hierarchical, step
        settings = quantised_settings(profile, self.name)
        return (CollectiveSpec("quantised", bucket.nbytes, ITEM_BYTES[bucket.dtype], quantised=settings),)


def _quantised(name: str, words: str, costs: CodingCosts) -> Compression:
    return Quantised(
        name,
        words,
        family=_FAMILY,
        knobs=QuantisedKnobs,
        has_error_feedback=True,
        costs=costs,
        ranks_in="fleet_train.collectives.methods.registry:quantised",
        numpy_in="fleet_train.plan.simulate_methods:QuantisedSimulation",
    )


INT8 = _quantised("int8", "a quarter", CodingCosts(0.12e-9, 0.8e-9, 2e-9, 0.8e-9))
INT4 = _quantised("int4", "an eighth", CodingCosts(0.12e-9, 0.4e-9, 2e-9, 1.1e-9))
