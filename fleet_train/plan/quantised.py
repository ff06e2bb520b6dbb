"""How numbers are quantised, and the resulting bytes: pure arithmetic.

A buffer is split into blocks; each has a scale, its largest absolute value over the number of levels on one side, and
every element is sent as an integer multiple of the scale. Source of scales per block: Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2021.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of

BITS = {"int8": 8, "int4": 4}
"""By the value of ``compression`` and of ``local_sgd_dtype``."""
_IS_STOCHASTIC = {"nearest": False, "stochastic": True}
SCALE_BYTES = 4
WHOLE = 12582912.0
"""1.5 * 2**23: a float32 of this size has no fraction, so that adding it rounds to the nearest integer (ties to even),
which is then in the lowest byte."""
SMALLEST = 2.0**-100
"""Blocks whose largest absolute value is below this are sent as zeros: the inverse of their scale would overflow."""


@dataclass(frozen=True)
class QuantisedSettings:
    """The settings of a quantised exchange."""

    bits: int
    block: int = 512
    """Elements that share a scale; a multiple of 32."""
    error_feedback: bool = True
    """Whether rounding errors are added to the next exchange."""
    stochastic: bool = False
    """Round up with the probability of the fractional part, so that the expected value is exact."""
    seed: int = 0

    @property
    def levels(self) -> int:
        """Integers on each side of zero."""
        return (1 << self.bits - 1) - 1

    @property
    def block_bytes(self) -> int:
        """The bytes of one block on the wire."""
        return self.block * self.bits // 8 + SCALE_BYTES

    def dither(self, name: str, member: int, phase: int, step: int) -> np.random.Generator:
        """Random numbers for one rounding; the same for the same arguments on every machine."""
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode()), member, phase, step]))


@dataclass(frozen=True)
class QuantisedLayout:
    """How ``members`` exchange ``elements`` float32 numbers.

    Two members send each other everything and add what they read. More members split the buffer into one part each:
    every member sends each owner its part, the owners add, round the sums, and all-gather the parts.
    """

    elements: int
    members: int
    settings: QuantisedSettings

    @property
    def parts(self) -> int:
        return self.members if self.members > 2 else 1

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
        """Whole blocks for every part."""
        return self.parts * self.part_elements


def gradient_settings(profile: Profile) -> QuantisedSettings:
    """Of ``compression: int8`` or ``int4``."""
    return _settings(profile, profile.compression)


def averaging_settings(profile: Profile) -> QuantisedSettings | None:
    """Of ``local_sgd_dtype: int8`` or ``int4``; None for others."""
    return _settings(profile, profile.local_sgd_dtype) if profile.local_sgd_dtype in BITS else None


def _settings(profile: Profile, kind: str) -> QuantisedSettings:
    return QuantisedSettings(
        bits=BITS[kind],
        block=profile.quantised_block_size,
        error_feedback=profile.quantised_error_feedback,
        stochastic=entry_of("quantised_rounding", profile.quantised_rounding, _IS_STOCHASTIC, "rounding"),
    )
