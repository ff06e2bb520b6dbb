"""Compressions of gradients: one description each, and the one list of them.

To add one, describe it in a file beside this and add it to ``_LISTED``; everything else walks the list.
"""

from __future__ import annotations

from fleet_train.profile.knobs import entry_of
from fleet_train.profile.methods.base import BF16, FP16, NONE, Bucket, Compression, Family
from fleet_train.profile.methods.powersgd import POWERSGD
from fleet_train.profile.methods.quantised import INT4, INT8
from fleet_train.profile.methods.rows import ROWS, TOUCHED_ROWS

_LISTED: tuple[Compression, ...] = (NONE, BF16, FP16, INT8, INT4, POWERSGD)
COMPRESSIONS: dict[str, Compression] = {compression.name: compression for compression in _LISTED}
"""By the value of the knob, in the order of the documentation."""
FAMILIES: tuple[Family, ...] = tuple(
    dict.fromkeys(compression.family for compression in _LISTED if compression.family is not None)
)
"""The compressions as strategies, each once."""


def compression_of(name: str) -> Compression:
    """The description of a compression, by the knob's value. Raises ConversionError for an unknown one."""
    return entry_of("compression", name, COMPRESSIONS, "description")


def description_of(bucket: Bucket) -> Compression:
    """How a bucket is sent: as its compression says, or, of embeddings' tables, the rows that a batch has touched."""
    return TOUCHED_ROWS if bucket.algorithm == ROWS else compression_of(bucket.compression)
