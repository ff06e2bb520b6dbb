"""The touched rows of embeddings' tables as a bucket method.

Instead of a table's gradient, the launch operator gets the table and, for each place that looks rows up in it, the
indices and the gradient of what was looked up. Where the host may read them (`HostRows`), a rank sends each row once,
and how many there are decides whether rows or whole tables are sent. On streams (`StreamRows`) nothing is read: a rank
sends one row for each position of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops

from fleet_train.collectives.engine import HAND_OVER, Stages
from fleet_train.collectives.methods.dense import cast_on_host
from fleet_train.collectives.methods.registry import Parts, allreduce_of
from fleet_train.collectives.paddle_compat import Array, as_dtype, dynamic_mode, host_view
from fleet_train.errors import ConversionError
from fleet_train.log import log_once
from fleet_train.plan import TensorSpec
from fleet_train.plan.phases import phases_of, sent_by_rank
from fleet_train.profile.knobs import AUTO
from fleet_train.profile.methods.base import ITEM_BYTES, CollectiveSpec
from fleet_train.profile.methods.rows import exchanges_of, index_dtype, most_rows, wire_dtype


def rows(parts: Parts) -> HostRows | StreamRows:
    """The method of a bucket of tables."""
    return HostRows(parts) if parts.reads_values else StreamRows(parts)


@dataclass(frozen=True)
class Lookups:
    """The operands of a launch operator for one table: the table, then indices and gradient of each lookup.

    ``paddings``: of each lookup the index whose row gets no gradient, -1 for none. ``rows_only``: the update reads the
    indices [n] int64 and the values [n, width] of the touched rows, instead of a gradient like the table. ``n`` is then
    the table's number of rows modulo 8: Paddle's SGD takes one of two kernels by that, whose last bits differ.
    """

    paddings: tuple[int, ...]
    rows_only: bool = False

    @property
    def operands(self) -> int:
        return 1 + 2 * len(self.paddings)


@dataclass(frozen=True)
class TableRows:
    """``ids`` [n] int64, ascending, each once; ``values`` [n, width] float32."""

    ids: Array
    values: Array


class RowChoice:
    """Whether the rows of a table or the whole table are sent in a step: what all ranks have counted decides, so that
    all decide alike.

    A step that touches more than ``limit`` rows on a rank sends the table. With ``auto``, the table is sent without
    counting once that has happened in `PATIENCE` steps in a row; every `PROBE_STEPS` steps rows are counted again, and
    sent if they are well below the limit.
    """

    PATIENCE, PROBE_STEPS, WELL_BELOW = 4, 64, 0.5

    def __init__(self, table: TensorSpec, limit: int, is_auto: bool, rank: int) -> None:
        self._table, self._limit, self._is_auto, self._rank = table, limit, is_auto, rank
        self._steps_over, self._steps = 0, 0
        self._is_whole = False

    def begin_step(self) -> bool:
        """Whether the rows of this step must be counted."""
        self._steps += 1
        return not self._is_whole or self._steps % self.PROBE_STEPS == 0

    def sends_rows(self, most: int) -> bool:
        """Whether rows are sent in this step. ``most``: the rows of the rank that has most."""
        if self._is_whole:
            self._is_whole = most > self.WELL_BELOW * self._limit
            if not self._is_whole:
                self._say(f"{most} rows of a rank in step {self._steps} are well below", "the touched rows are sent")
        else:
            self._steps_over = self._steps_over + 1 if most > self._limit else 0
            if self._is_auto and self._steps_over == self.PATIENCE:
                self._is_whole, self._steps_over = True, 0
                self._say(
                    f"{most} rows of a rank in step {self._steps}, the {self.PATIENCE}th in a row, are more than",
                    f"the whole table is sent, and rows are counted every {self.PROBE_STEPS} steps",
                )
        return not self._is_whole and most <= self._limit

    def _say(self, found: str, now: str) -> None:
        shape = list(self._table.shape)
        log_once(
            [f"embedding '{self._table.name}' {shape}: {found} the {self._limit} that pay: {now} from here on"],
            self._rank,
        )


class _TablesOfABucket:
    """What both methods know of their tables, and the gradients of micro-batches without an update."""

    kind = "rows"
    own_state: tuple[str, ...] = (".merged",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bucket, self._tables = parts.bucket, parts.bucket.gradients
        self._lookups = [parts.lookups[table.name] for table in self._tables]
        self._widths = [table.elements // table.shape[0] for table in self._tables]
        self._size, self._merged = parts.plan.world_size, parts.plan.accumulate_steps
        self._whole = allreduce_of(parts)
        parts.job.communicators(parts.plan.communicators)  # not in a step: with local groups nobody else has made them
        self._limits = [most_rows(table, parts.bucket, self._size) for table in self._tables]
        self.sent_bytes = 0.0
        """Payload that this rank sent in the last step with an exchange."""

    def idle(self, values: Sequence[Any]) -> list[Any]:
        """Keep the gradients of a micro-batch without an update; returns results that nothing reads."""
        with paddle.no_grad():
            self._keep(values)
            return [paddle.empty(list(table.shape), table.dtype) for table in self._tables]

    def without_tables(self, values: Sequence[Any]) -> list[Any]:
        """The indices and gradients of all lookups."""
        return [value for _, lookups in self._operands(values) for each in lookups for value in each[:2]]

    def _keep(self, values: Sequence[Any]) -> None:
        raise NotImplementedError

    def _operands(self, values: Sequence[Any]) -> list[tuple[Any, list[tuple[Any, Any, int]]]]:
        """List for each table: itself, and (indices [positions], gradient [positions, width], padding) of lookups."""
        found, start = [], 0
        for lookups, width in zip(self._lookups, self._widths, strict=True):
            own = values[start : start + lookups.operands]
            pairs = zip(own[1::2], own[2::2], lookups.paddings, strict=True)
            each = [(ids.reshape([-1]), grad.reshape([-1, width]), padding) for ids, grad, padding in pairs]
            found.append((own[0], each))
            start += lookups.operands
        return found

    def _count(self, rows: list[int], is_whole: Sequence[bool], counted: bool = True) -> None:
        """Note the bytes of a step's exchanges. ``rows``: sent of each table."""
        specs = list(exchanges_of(self._bucket, rows)) if counted else []
        item_bytes = ITEM_BYTES[wire_dtype(self._bucket)]
        for table, whole in zip(self._tables, is_whole, strict=True):
            if whole:
                specs.append(CollectiveSpec("allreduce", table.elements * item_bytes, item_bytes))
        phases = [phase for spec in specs for phase in phases_of(self._size, self._parts.plan.group_size, spec)]
        self.sent_bytes = sent_by_rank(phases, self._size)[self._parts.job.cluster.rank]


class HostRows(_TablesOfABucket):
    """Rows by way of the host: each touched row once, with counts first; added in float32 in the ranks' order."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        is_auto = parts.profile.sparse_embeddings == AUTO
        rank = parts.job.cluster.rank
        self._choices = [
            RowChoice(table, limit, is_auto, rank) for table, limit in zip(self._tables, self._limits, strict=True)
        ]
        self._kept: list[list[TableRows]] = [[] for _ in self._tables]
        """The rows of each table in the micro-batches since the last update."""

    def average(self, values: Sequence[Any]) -> Stages[list[Any]]:
        local = self._own(values)
        yield HAND_OVER
        sends_rows, counts = yield from self._choose([len(own.ids) for own in local])
        if any(sends_rows):
            gathered = yield from self._gather(local, sends_rows, counts)
        whole = [not rows for rows in sends_rows]
        flats = [
            _like_table(own, table).reshape([-1])
            for own, table, is_whole in zip(local, self._tables, whole, strict=True)
            if is_whole
        ]
        means = iter((yield from self._whole.sum(flats, divide_by=self._size)) if flats else [])
        results: list[Any] = []
        for position, table in enumerate(self._tables):
            if whole[position]:
                results += self._of_whole(next(means).reshape(list(table.shape)), position)
                continue
            total = added([rank[position] for rank in gathered])
            total.values.__imul__(np.float32(1.0 / self._size))
            results += self._of_rows(total, position)
        return results

    def local(self, values: Sequence[Any]) -> list[Any]:
        """The results of a step in which nothing is sent: this rank's own gradient."""
        with paddle.no_grad():
            results = [self._of_rows(own, position) for position, own in enumerate(self._own(values))]
        return [value for pair in results for value in pair]

    def state(self) -> dict[str, Any]:
        """``<table>.merged``, like the table: the sum of the micro-batches since the last update, if there are any.
        Ranks differ."""
        if not self._kept[0]:
            return {}
        with dynamic_mode(), paddle.no_grad():
            kept = zip(self._tables, self._kept, strict=True)
            return {f"{table.name}.merged": _like_table(added(own), table) for table, own in kept}

    def load_state(self, state: dict[str, Any]) -> None:
        self._kept = [[] for _ in self._tables]
        for table, kept in zip(self._tables, self._kept, strict=True):
            saved = state.get(f"{table.name}.merged")
            if saved is not None and tuple(saved.shape) == table.shape:
                values = saved.numpy().reshape(table.shape[0], -1)
                ids = np.flatnonzero(values.any(axis=1))
                kept.append(TableRows(ids, values[ids]))

    def _keep(self, values: Sequence[Any]) -> None:
        for kept, (_, lookups), width in zip(self._kept, self._operands(values), self._widths, strict=True):
            kept.append(touched(lookups, width))

    def _own(self, values: Sequence[Any]) -> list[TableRows]:
        """This rank's rows since the last update: the mean of the micro-batches."""
        self._keep(values)
        local = [added(kept) for kept in self._kept]
        self._kept = [[] for _ in self._tables]
        if self._merged > 1:
            for own in local:
                own.values.__imul__(np.float32(1.0 / self._merged))
        return local

    def _choose(self, own: Sequence[int]) -> Stages[tuple[list[bool], Array]]:
        """Whether the rows of each table are sent, and how many each rank has [ranks, tables]."""
        counted = [choice.begin_step() for choice in self._choices]
        if not any(counted):
            self._count([0] * len(own), [True] * len(own), counted=False)
            return [False] * len(own), np.zeros((self._size, len(own)), np.int64)
        gathered = yield from self._parts.all_gather(paddle.to_tensor(np.array(own, np.int64)), more=True)
        counts = gathered.numpy()
        most = counts.max(axis=0).tolist()
        sends_rows = [choice.sends_rows(rows) for choice, rows in zip(self._choices, most, strict=True)]
        self._count([n if s else 0 for n, s in zip(most, sends_rows, strict=True)], [not s for s in sends_rows])
        return sends_rows, counts

    def _gather(
        self, local: Sequence[TableRows], sends_rows: Sequence[bool], counts: Array
    ) -> Stages[list[list[TableRows]]]:
        """The rows of each rank and table; of tables that go whole, none."""
        most = np.where(sends_rows, counts.max(axis=0), 0).tolist()
        if not any(most):
            return [[nothing(width) for width in self._widths] for _ in range(self._size)]
        wire = self._coded(local, most)
        gathered = yield from self._parts.all_gather(wire, more=not all(sends_rows))
        return [
            self._decoded(part, most, counts[rank].tolist())
            for rank, part in enumerate(host_view(gathered).reshape(self._size, -1))
        ]

    def _coded(self, local: Sequence[TableRows], most: Sequence[int]) -> Any:
        """This rank's rows as flat uint8: of each table the indices, then the values, padded to ``most`` rows."""
        dtype, parts = wire_dtype(self._bucket), []
        for own, table, width, rows in zip(local, self._tables, self._widths, most, strict=True):
            ids = np.zeros(rows, index_dtype(table))
            values = np.zeros((rows, width), np.float32)
            if rows:
                ids[: own.ids.size], values[: own.ids.size] = own.ids, own.values
            if dtype != "float32":
                values = host_view(cast_on_host(paddle.to_tensor(values), dtype))
            parts += [ids.view(np.uint8), values.reshape(-1).view(np.uint8)]
        return paddle.to_tensor(np.concatenate(parts))

    def _decoded(self, wire: Array, most: Sequence[int], own: Sequence[int]) -> list[TableRows]:
        found, start = [], 0
        is_narrow = wire_dtype(self._bucket) != "float32"
        for table, width, rows, count in zip(self._tables, self._widths, most, own, strict=True):
            indices = np.dtype(index_dtype(table)).itemsize * rows
            end = start + indices + rows * width * (2 if is_narrow else 4)
            ids = wire[start : start + indices].view(index_dtype(table))[:count].astype(np.int64)
            raw = wire[start + indices : end]
            bits = raw.view(np.uint16).astype(np.uint32) << 16 if is_narrow else raw.view(np.uint32)
            found.append(TableRows(ids, bits.view(np.float32).reshape(rows, width)[: len(ids)]))
            start = end
        return found

    def _of_rows(self, total: TableRows, position: int) -> list[Any]:
        table = self._tables[position]
        if not self._lookups[position].rows_only:
            return [_like_table(total, table)]
        total = filled_up(total, table.shape[0])
        return [paddle.to_tensor(total.ids), paddle.to_tensor(total.values)]

    def _of_whole(self, mean: Any, position: int) -> list[Any]:
        table = self._tables[position]
        return [paddle.arange(table.shape[0], dtype="int64"), mean] if self._lookups[position].rows_only else [mean]


def _gradient(ids: Any, table: Any, gradient: Any) -> Any:
    """A gradient of ``table``'s shape: ``gradient`` [positions, width] added up in its rows ``ids`` [positions]."""
    made: Any = _C_ops.embedding_grad
    return made(ids, table, gradient, -1, False)


def touched(lookups: Sequence[tuple[Any, Any, int]], width: int) -> TableRows:
    """Each looked up row of a table once, with the sum of its gradients in the order of positions, by the operator that
    makes the gradient of a table."""
    every_id, gradients = [], []
    for ids, gradient, padding in lookups:
        own = ids.numpy().astype(np.int64, copy=False)
        kept = np.flatnonzero(own != padding)
        if kept.size < own.size:
            own, gradient = own[kept], _C_ops.gather(gradient, paddle.to_tensor(kept), 0) if kept.size else None
        if own.size:
            every_id.append(own)
            gradients.append(gradient)
    if not every_id:
        return nothing(width)
    ids, places = np.unique(np.concatenate(every_id), return_inverse=True)
    like = paddle.empty([ids.size, width], "float32")
    joined = _C_ops.concat(gradients, 0) if len(gradients) > 1 else gradients[0]
    values = _gradient(paddle.to_tensor(places.reshape(-1)), like, joined)
    return TableRows(ids, host_view(values).reshape(-1, width))


def added(parts: Sequence[TableRows]) -> TableRows:
    """The sum of rows, in the order of ``parts``; the same part if there is one."""
    if len(parts) == 1:
        return parts[0]
    ids, places = np.unique(np.concatenate([part.ids for part in parts]), return_inverse=True)
    values, start = np.zeros((ids.size, parts[0].values.shape[1]), np.float32), 0
    for part in parts:
        values[places[start : start + part.ids.size]] += part.values
        start += part.ids.size
    return TableRows(ids, values)


def nothing(width: int) -> TableRows:
    return TableRows(np.zeros(0, np.int64), np.zeros((0, width), np.float32))


def filled_up(total: TableRows, height: int) -> TableRows:
    """Rows with as many zeros for an untouched row as `Lookups.rows_only` says; at least one row if there is none."""
    number = total.ids.size
    fill = (height - number) % 8 or 8 * (number == 0)
    if not fill:
        return total
    gap = np.flatnonzero(total.ids != np.arange(number))
    untouched = int(gap[0]) if gap.size else number
    ids = np.concatenate([total.ids, np.full(fill, untouched, np.int64)])
    return TableRows(ids, np.concatenate([total.values, np.zeros((fill, total.values.shape[1]), np.float32)]))


def _like_table(own: TableRows, table: TensorSpec) -> Any:
    """A gradient of the table's shape, float32. Not memory of numpy: the executor's threads need Python's lock to free
    that, and ranks hung with it on busy machines."""
    dense = paddle.zeros(list(table.shape), "float32")
    host_view(dense).reshape(table.shape)[own.ids] = own.values
    return dense


class StreamRows(_TablesOfABucket):
    """One row for each position of a batch, as many on every rank and in every step as in the largest first batch.

    The host reads no value: it knows the number of positions alone. Which tables are sent so follows from it once.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._kept: list[list[tuple[Any, Any]]] = [[] for _ in self._tables]
        self._capacity: list[int] = []
        self._last: list[int] = []
        """Positions of the last micro-batch, by table."""
        self._has_sums = False
        """Whether the first micro-batches of this update are a sum, with fewer positions than they had."""

    def average(self, values: Sequence[Any]) -> Stages[list[Any]]:
        tables = [table.view(table.shape) for table, _ in self._operands(values)]
        local = self._padded(self._own(values))
        yield HAND_OVER
        results: list[Any] = []
        for position, ((ids, gradient), table) in enumerate(zip(local, tables, strict=True)):
            is_last = position == len(tables) - 1
            if self._capacity[position] > self._limits[position]:
                flat = _gradient(ids, table, gradient).reshape([-1])
                (mean,) = yield from self._whole.sum([flat], more=not is_last, divide_by=self._size)
                results.append(mean.reshape(table.shape))
                continue
            index, dtype = index_dtype(self._tables[position]), wire_dtype(self._bucket)
            every_id = yield from self._parts.all_gather(as_dtype(ids, index), more=True)
            sent = as_dtype(gradient, dtype).reshape([-1])
            every_row = yield from self._parts.all_gather(sent, more=not is_last)
            wide = as_dtype(every_row, "float32").reshape([-1, self._widths[position]])
            total = _gradient(as_dtype(every_id.reshape([-1]), "int64"), table, wide)
            results.append(total.scale_(1.0 / self._size))
        return results

    def local(self, values: Sequence[Any]) -> list[Any]:
        """The results of a step in which nothing is sent: this rank's own gradients, like the tables."""
        with paddle.no_grad():
            tables = [table for table, _ in self._operands(values)]
            return [
                _gradient(ids, table, gradient)
                for (ids, gradient), table in zip(self._own(values), tables, strict=True)
            ]

    def state(self) -> dict[str, Any]:
        """``<table>.merged``, as of `HostRows`: the sum of the micro-batches since the last update. Ranks differ."""
        if not self._kept[0]:
            return {}
        with dynamic_mode(), paddle.no_grad():
            sums = {}
            for table, kept in zip(self._tables, self._kept, strict=True):
                total = paddle.zeros(list(table.shape), table.dtype)
                for ids, gradient in kept:
                    total = total + _gradient(ids, total, gradient)
                sums[f"{table.name}.merged"] = total
            return sums

    def load_state(self, state: dict[str, Any]) -> None:
        self._kept = [[] for _ in self._tables]
        for table, kept in zip(self._tables, self._kept, strict=True):
            saved = state.get(f"{table.name}.merged")
            if saved is not None and tuple(saved.shape) == table.shape:
                ids = paddle.nonzero(saved.reshape([table.shape[0], -1]).abs().sum(1)).reshape([-1])
                kept.append((ids, saved.gather(ids)))
                self._has_sums = True

    def _keep(self, values: Sequence[Any]) -> None:
        for kept, (_, lookups) in zip(self._kept, self._operands(values), strict=True):
            for ids, gradient, padding in lookups:
                keeps = (ids != padding).unsqueeze(-1)
                kept.append((ids.cast("int64"), paddle.where(keeps, gradient, paddle.zeros_like(gradient))))

    def _own(self, values: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Indices and gradients of all positions since the last update, padded to what was agreed on."""
        self._keep(values)
        kept, self._kept = self._kept, [[] for _ in self._tables]
        self._last = [
            sum(int(ids.shape[0]) for ids, _ in each[-len(lookups.paddings) :])
            for each, lookups in zip(kept, self._lookups, strict=True)
        ]
        own = [(_C_ops.concat([i for i, _ in each], 0), _C_ops.concat([g for _, g in each], 0)) for each in kept]
        if self._merged > 1:
            own = [(ids, gradient * (1.0 / self._merged)) for ids, gradient in own]
        return own

    def _padded(self, own: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Pad with zeros for row 0 up to the number of positions that the ranks agree on in the first step."""
        positions = [int(ids.shape[0]) for ids, _ in own]
        if not self._capacity:
            as_last = [self._merged * last if self._has_sums else 0 for last in self._last]
            found = list(map(max, positions, as_last))
            every = self._parts.job.all_gather(f"positions of bucket {self._bucket.index}", found)
            self._capacity = [max(each) for each in zip(*every.values(), strict=True)]
            whole = [most > limit for most, limit in zip(self._capacity, self._limits, strict=True)]
            self._count([0 if w else n for n, w in zip(self._capacity, whole, strict=True)], whole)
        padded = []
        for (ids, gradient), table, most in zip(own, self._tables, self._capacity, strict=True):
            missing = most - int(ids.shape[0])
            if missing < 0:
                raise ConversionError(
                    f"embedding '{table.name}': this batch looks up {ids.shape[0]} rows, the largest first batch of a "
                    f"rank {most}, and on GPUs all steps send as many; let the first batch be the largest, or set "
                    "sparse_embeddings: false"
                )
            if missing:
                ids = _C_ops.concat([ids, paddle.zeros([missing], "int64")], 0)
                gradient = _C_ops.concat([gradient, paddle.zeros([missing, gradient.shape[1]], "float32")], 0)
            padded.append((ids, gradient))
        return padded
