"""The state of a sharded optimizer as one process would hold it: gathered from its owners, and cut for them.

Names on disk are those of an optimizer that is not sharded, so that a state can be loaded on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.transfer import broadcast_arrays, gather_arrays
from fleet_train.convert.program_state import Array, Arrays, ProgramState
from fleet_train.convert.sharding import ROWS

_PACKED = "the state of the owners"
_COUNTS_STEPS = "_pow_acc_"
"""In the names of Adam's powers, one element for all rows."""


class OwnedState:
    """What this rank owns of a program's optimizer state. All ranks call ``describe`` and ``gather``."""

    def __init__(self, job: Job, exchange: GradientExchange) -> None:
        self._job = job
        self._exchange = exchange

    def names(self, state: ProgramState) -> dict[str, str]:
        """This rank's variables, by the names of an optimizer that is not sharded."""
        return {whole_name(name): name for name in state.kept_of(self._exchange.trained) if not name.endswith(ROWS)}

    def describe(self, state: ProgramState) -> dict[str, tuple[str, list[int], str]]:
        """`ProgramState.describe` of the whole state, the same on every rank."""
        ours, own = state.describe(), self.names(state)
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
        listed = [[name, list(array.shape), array.dtype.str] for name, array in arrays.items()]
        owners = range(self._exchange.owners)
        by_rank = job.all_gather(f"gather state {job.count('gather state')}", listed)
        size = max(sum(map(_nbytes, by_rank[rank])) for rank in owners)
        packed = np.zeros(size, np.uint8)
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
        filled = np.concatenate(flat) if flat else packed[:0]
        packed[: filled.size] = filled
        parts: dict[str, list[Array]] = {}
        for rank, table in enumerate(gather_arrays(job, {_PACKED: packed}, self._exchange.owners_group)):
            start, buffer = 0, table[_PACKED]
            for item in by_rank[rank]:
                name, shape, dtype = item
                values = buffer[start : start + _nbytes(item)].view(dtype).reshape(shape)
                parts.setdefault(name, []).append(values)
                start += _nbytes(item)
        return {whole_name(name): self._joined(name, values) for name, values in parts.items()}

    def everywhere(self, arrays: Mapping[str, Array]) -> Arrays:
        """The same on every rank."""
        return broadcast_arrays(self._job, self.gather(arrays))

    def own_part(self, name: str, array: Array) -> Array:
        """What this rank owns of a whole array; ``name``: this rank's own."""
        if not self._is_in_rows(name, list(array.shape[1:]), array.ndim):
            return array
        first, rows, total = self._exchange.rows_of(_parameter_of(name))
        return array[first : first + rows] if array.shape[0] == total else array

    def _joined(self, name: str, values: list[Array]) -> Array:
        is_cut = self._is_in_rows(name, list(values[0].shape[1:]), values[0].ndim)
        return np.concatenate(values) if is_cut else values[0]

    def _whole_shape(self, name: str, shape: list[int]) -> list[int]:
        if not self._is_in_rows(name, shape[1:], len(shape)):
            return shape
        return [self._exchange.rows_of(_parameter_of(name))[2], *shape[1:]]

    def _is_in_rows(self, name: str, inner: list[int], dimensions: int) -> bool:
        """Whether an array of this rank has one row for each row of its parameter."""
        if ROWS not in name or _COUNTS_STEPS in name:
            return False
        shape = self._exchange.shape_of(_parameter_of(name))
        return dimensions == len(shape) and inner == list(shape[1:])


def whole_name(name: str) -> str:
    """The name of a variable without the mark of cut rows."""
    return name.replace(ROWS, "", 1)


def _parameter_of(name: str) -> str:
    return name.partition(ROWS)[0]


def _nbytes(item: Any) -> int:
    _, shape, dtype = item
    return int(prod(shape) * np.dtype(dtype).itemsize)
