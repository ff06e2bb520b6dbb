"""Compressions of gradients: one description each, and the one list of them.

To add one, describe it in a folder of `fleet_train.compression` and add the folder to ``_FOLDERS``; everything else
walks the list.
"""

from __future__ import annotations

from fleet_train.lazy import part_if_there
from fleet_train.profile.knobs import entry_of
from fleet_train.profile.methods.base import BF16, FP16, NONE, Bucket, Compression, Family
from fleet_train.profile.methods.quantised import INT4, INT8
from fleet_train.profile.methods.rows import ROWS, TOUCHED_ROWS

_FOLDERS = ("powersgd",)
"""Folders in `fleet_train.compression`, each with ``COMPRESSIONS`` in its ``description.py``. A copy may lack one."""
_FOUND = {name: part_if_there(f"fleet_train.compression.{name}.description") for name in _FOLDERS}
_LISTED: tuple[Compression, ...] = (
    *(NONE, BF16, FP16, INT8, INT4),
    *(compression for folder in _FOUND.values() if folder is not None for compression in folder.COMPRESSIONS),
)
NOT_HERE = {
    name: f"this copy of the package is without fleet_train.compression.{name}"
    for name, folder in _FOUND.items()
    if folder is None
}
"""Compressions that this copy is without, and the reason of their refusal."""
COMPRESSIONS: dict[str, Compression] = {compression.name: compression for compression in _LISTED}
"""All compressions by the value of the knob, in the order of the documentation."""
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
