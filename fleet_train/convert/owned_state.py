"""The state of a sharded optimizer as one process would hold it: gathered from its owners, and cut for them.

Names on disk are those of an optimizer that is not sharded, so that a state can be loaded on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from fleet_train.collectives.exchange import UNKNOWN_ROWS, GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.transfer import broadcast_arrays, gather_arrays
from fleet_train.convert.program_state import Array, Arrays, Described, ProgramState
from fleet_train.convert.sharding import ROWS
from fleet_train.errors import CheckpointError

_PACKED = "the state of the owners"


class OwnedState:
    """What this rank owns of a program's optimizer state. All ranks call ``describe`` and ``gather``."""

    def __init__(self, job: Job, exchange: GradientExchange) -> None:
        self._job = job
        self._exchange = exchange

    def names(self, state: ProgramState) -> dict[str, str]:
        """This rank's variables, by the names of an optimizer that is not sharded."""
        return {whole_name(name): name for name in state.kept_of(self._exchange) if not name.endswith(ROWS)}

    def describe(self, state: ProgramState, ours: Described) -> dict[str, tuple[str, list[int], str]]:
        """``ours``, `ProgramState.describe`, of the whole state, the same on every rank."""
        own = self.names(state)
        self._refuse_unknown_rows(own.values())
        described = {
            whole: [ours[name][0], self._whole_shape(name, ours[name][1]), ours[name][2]] for whole, name in own.items()
        }
        for_all = {name: each for name, each in ours.items() if name not in own.values() and not name.endswith(ROWS)}
        for theirs in self._job.all_gather(f"own state {self._job.count('own state')}", described).values():
            for_all |= {name: (kind, list(shape), dtype) for name, (kind, shape, dtype) in theirs.items()}
        return for_all

    def gather(self, arrays: Mapping[str, Array]) -> Arrays:
        """The owners' arrays, by this rank's names, as whole ones on rank 0; empty on the others."""
        job = self._job
        self._refuse_unknown_rows(arrays)
        listed = [[name, list(array.shape), array.dtype.str, self._axis(name)] for name, array in arrays.items()]
        owners = range(self._exchange.owners)
        by_rank = job.all_gather(f"gather state {job.count('gather state')}", listed)
        size = max(sum(map(_nbytes, by_rank[rank])) for rank in owners)
        packed = np.zeros(size, np.uint8)
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
        filled = np.concatenate(flat) if flat else packed[:0]
        packed[: filled.size] = filled
        parts: dict[str, list[Array]] = {}
        axes: dict[str, int | None] = {}
        for rank, table in enumerate(gather_arrays(job, {_PACKED: packed}, self._exchange.owners_group)):
            start, buffer = 0, table[_PACKED]
            for item in by_rank[rank]:
                name, shape, dtype, axes[name] = item
                values = buffer[start : start + _nbytes(item)].view(dtype).reshape(shape)
                parts.setdefault(name, []).append(values)
                start += _nbytes(item)
        return {whole_name(name): _joined(values, axes[name]) for name, values in parts.items()}

    def everywhere(self, arrays: Mapping[str, Array]) -> Arrays:
        """Gather the whole state from its owners, on every rank."""
        return broadcast_arrays(self._job, self.gather(arrays))

    def own_part(self, name: str, array: Array) -> Array:
        """What this rank owns of a whole array; ``name``: this rank's own."""
        axis = self._axis(name)
        if axis is None:
            return array
        first, rows, total = self._exchange.rows_of(self._parameter_of(name))
        return array.take(range(first, first + rows), axis) if array.shape[axis] == total else array

    def _whole_shape(self, name: str, shape: list[int]) -> list[int]:
        axis = self._axis(name)
        if axis is None:
            return shape
        return [*shape[:axis], self._exchange.rows_of(self._parameter_of(name))[2], *shape[axis + 1 :]]

    def _axis(self, name: str) -> int | None:
        """The axis of a variable that has the rows of a parameter that is cut; None for none."""
        if ROWS not in name:
            return None
        kept = self._exchange.kept.get(name)
        return 0 if kept is None else kept.axis  # a moving average has its parameter's shape

    def _parameter_of(self, name: str) -> str:
        kept = self._exchange.kept.get(name)
        return (name if kept is None else kept.parameter).partition(ROWS)[0]

    def _refuse_unknown_rows(self, names: Iterable[str]) -> None:
        for name in names:
            if self._axis(name) == UNKNOWN_ROWS:
                raise CheckpointError(
                    f"'{name}' is state of the optimizer whose shape does not say which part is of which rows of its "
                    "parameter, which sharding has cut: it can neither be saved nor loaded; train without sharding"
                )


def _joined(values: list[Array], axis: int | None) -> Array:
    return values[0] if axis is None else np.concatenate(values, axis)


def whole_name(name: str) -> str:
    """The name of a variable without the mark of cut rows."""
    return name.replace(ROWS, "", 1)


def _nbytes(item: Any) -> int:
    _, shape, dtype, _ = item
    return int(prod(shape) * np.dtype(dtype).itemsize)
