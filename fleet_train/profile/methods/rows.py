"""Embeddings whose rows are sent, not tables: a rank sends the rows of a table that its batch has touched.

The gradient of an embedding's table is zero except in the rows that a batch has looked up. Which gradients are such,
the conversion finds in the program; how many bytes their rows take, and when a table takes fewer, is decided here.
"""

from __future__ import annotations

from typing import Any

from fleet_train.profile.methods.base import (
    BF16,
    FP16,
    ITEM_BYTES,
    NONE,
    Bucket,
    CollectiveSpec,
    Compression,
    TensorSpec,
)

ROWS = "rows"
"""The algorithm of a bucket of tables."""
COUNT_BYTES = 8
ASSUMED_SAMPLES = 1024
"""Samples of a rank's step that plans assume."""
WIRE_DTYPES = {compression.name: compression.wire_dtype for compression in (NONE, BF16, FP16)}
"""The dtype of rows on the wire by the compressions that they go with; empty = their own."""


class TouchedRows(Compression):
    """The indices and values of the touched rows, gathered from all ranks and added in the order of ranks."""

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        """Two all-gathers: how many rows each rank has of each table, then the rows, as many as planned: those of all
        micro-batches of an update."""
        del hierarchical, step
        rows = [min(table.rows * profile.accumulate_steps, table.shape[0]) for table in bucket.gradients]
        return exchanges_of(bucket, rows)


def exchanges_of(bucket: Bucket, rows: list[int]) -> tuple[CollectiveSpec, ...]:
    """The exchanges of a step in which the rank with most rows has ``rows`` of each table."""
    counts = CollectiveSpec("allgather", COUNT_BYTES * len(rows), COUNT_BYTES, flat=True)
    nbytes = sum(number * row_bytes(table, bucket) for table, number in zip(bucket.gradients, rows, strict=True))
    return (counts, CollectiveSpec("allgather", nbytes, 1, flat=True)) if nbytes else (counts,)


def index_dtype(table: TensorSpec) -> str:
    """The dtype of a row's index on the wire."""
    return "int32" if table.shape[0] < 2**31 else "int64"


def row_bytes(table: TensorSpec, bucket: Bucket) -> int:
    """Bytes of one row on the wire: its index and its values."""
    return ITEM_BYTES[index_dtype(table)] + table.elements // table.shape[0] * ITEM_BYTES[wire_dtype(bucket)]


def wire_dtype(bucket: Bucket) -> str:
    """The dtype of a bucket's values on the wire: the compression's, else their own."""
    return WIRE_DTYPES[bucket.compression] or bucket.dtype


def most_rows(table: TensorSpec, bucket: Bucket, world_size: int) -> int:
    """The rows of one rank from which on a step's all-gather would send more than an allreduce of the table."""
    whole = 2 * table.elements * ITEM_BYTES[wire_dtype(bucket)]
    return min(table.shape[0], whole // (world_size * row_bytes(table, bucket)))


TOUCHED_ROWS = TouchedRows(
    ROWS,
    "the rows that a batch touches",
    ranks_in="fleet_train.collectives.methods.rows:rows",
    numpy_in="fleet_train.plan.simulate_methods:RowsSimulation",
)
