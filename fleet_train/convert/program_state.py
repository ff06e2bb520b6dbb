"""A program's persistable values in a scope: their kinds, copies of them, and writing values back."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from paddle.base.data_feeder import convert_dtype

from fleet_train.errors import CheckpointError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

PARAMETER, OPTIMIZER, PASS = "parameter", "optimizer", "pass"
"""Kinds: parameters and batch-norm statistics; the optimizer's state; what a pass, or a guard around it, added."""

# Named by unique_name, so they begin with the prefix of a unique_name.guard("...") that the script may have set.
_SUMS = re.compile(r".+@gradient_merge")
_COUNT = re.compile(r".*gradient_merge_count_\d+")
_LOSS_SCALE = re.compile(r".*loss_scaling(_good_steps|_bad_steps)?_\d+")
_OF_THE_TRAINER = re.compile(r".+@average|weight_average_updates|skipped_updates")
# Equal on every rank by construction: a mean over ranks could change their last bit. Sums are each rank's own.
_NOT_AVERAGED = re.compile(rf".*learning_rate_\d+|.+_pow_acc_\d+|{_SUMS.pattern}|{_LOSS_SCALE.pattern}")
# The bits of a bfloat16, as in Paddle's arrays; Paddle makes a bfloat16 tensor from them again.
_BFLOAT16 = "uint16"
# Running mean and variance are the second and third operand.
_WITH_STATISTICS = ("pd_op.batch_norm_", "pd_op.sync_batch_norm_")


class ProgramState:
    """The variables of ``program`` in ``scope``, by name in sorted order: the same on every rank."""

    def __init__(self, program: Any, scope: Any) -> None:
        found = program.state_dict("all", scope)
        if not found:
            raise CheckpointError("the program has no persistable values in this scope: run the startup program first")
        self.variables: dict[str, Any] = {name: found[name] for name in sorted(found)}
        parameters = program.state_dict("param", scope)
        self.kinds = {name: _kind(name, name in parameters) for name in self.variables}
        self._program = program

    def read(self, names: Iterable[str], into: Mapping[str, Array] | None = None) -> Arrays:
        """Copies; bfloat16 as its bits in uint16. Arrays of ``into`` that fit are overwritten and reused."""
        copies = {}
        for name in names:
            value, kept = borrowed(self.variables[name]), (into or {}).get(name)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                kept = np.empty(value.shape, value.dtype)
            np.copyto(kept, value)
            copies[name] = kept
        return copies

    def write(self, arrays: Mapping[str, Array], place: Any) -> None:
        """Put arrays into the variables of these names."""
        for name, array in arrays.items():
            self.variables[name].set(array, place)

    def describe(self) -> dict[str, tuple[str, list[int], str]]:
        """Kind, shape and numpy dtype of each."""
        return {
            name: (self.kinds[name], list(variable.shape()), _numpy_dtype(variable))
            for name, variable in self.variables.items()
        }

    @property
    def drifting(self) -> list[str]:
        """The values that differ between ranks in LocalSGD's local steps and that a mean makes equal."""
        floats = ("float32", "float64", "float16", _BFLOAT16)
        return [
            name
            for name, variable in self.variables.items()
            if _numpy_dtype(variable) in floats and (self.kinds[name] == PARAMETER or not _NOT_AVERAGED.fullmatch(name))
        ]

    def kept_of(self, parameters: Iterable[str]) -> list[str]:
        """The optimizer's values of these parameters (Paddle names them after it) and their moving averages."""
        known = set(parameters)
        return [
            name
            for name, kind in self.kinds.items()
            if kind != PARAMETER
            and not _SUMS.fullmatch(name)
            and any(name[:end] in known for end, sign in enumerate(name) if sign in "_@")
        ]

    def first_not_finite(self) -> str | None:
        """The first parameter or statistic that holds NaN or infinity; one that is not trained may be infinite."""
        values = ((name, borrowed(self.variables[name])) for name, kind in self.kinds.items() if kind == PARAMETER)
        return next((name for name, _ in not_finite(values, self.constant)), None)

    @property
    def constant(self) -> frozenset[str]:
        """Parameters that no step changes, such as a mask."""
        frozen = {one.name for one in self._program.global_block().all_parameters() if one.stop_gradient}
        return frozenset(frozen.difference(self.statistics))

    @property
    def statistics(self) -> list[str]:
        """Batch-norm statistics that each rank computes from its own batches."""
        names = {
            str(source.get_defining_op().attrs().get("parameter_name"))
            for operator in self._program.global_block().ops
            if operator.name() in _WITH_STATISTICS and not _is_frozen(operator.attrs())
            for source in operator.operands_source()[1:3]
        }
        return sorted(names & self.variables.keys())

    @property
    def sums_under_way(self) -> list[str]:
        """Gradient merge's sums, in the middle of an update; each rank has its own. Between updates they are zero."""
        counts = [variable for name, variable in self.variables.items() if _COUNT.fullmatch(name)]
        if not any(borrowed(count).any() for count in counts):
            return []
        return [name for name in self.variables if _SUMS.fullmatch(name)]


def _kind(name: str, is_parameter: bool) -> str:
    if not is_parameter and any(pattern.fullmatch(name) for pattern in (_SUMS, _COUNT, _LOSS_SCALE, _OF_THE_TRAINER)):
        return PASS
    return PARAMETER if is_parameter else OPTIMIZER


def is_sum(name: str) -> bool:
    """Whether it is a sum of gradient merge: saved only in the middle of an update."""
    return _SUMS.fullmatch(name) is not None


def float_values(array: Array) -> Array:
    """The values of a copy, in which bfloat16 is its bits."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == _BFLOAT16 else array


def not_finite(arrays: Iterable[tuple[str, Array]], constant: Collection[str]) -> Iterator[tuple[str, Array]]:
    """Those that hold NaN, or infinity unless they are ``constant``: names and values in a float dtype."""
    for name, array in arrays:
        if not is_finite(array):
            values = float_values(array)
            if name not in constant or np.isnan(values).any():
                yield name, values


def is_finite(values: Array) -> bool:
    """Whether no element is NaN or infinite; ``values`` as `ProgramState.read` gives them."""
    if values.dtype == _BFLOAT16:
        return not bool(((values & 0x7F80) == 0x7F80).any())  # all bits of the exponent
    if values.dtype.kind != "f":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(values, axis=None)  # one pass; a sum can overflow although its terms are finite
    return bool(np.isfinite(total)) or bool(np.isfinite(values).all())


def _is_frozen(attributes: Mapping[str, Any]) -> bool:
    return bool(attributes.get("use_global_stats") or attributes.get("is_test"))


def borrowed(variable: Any) -> Array:
    """A variable's values, to be read before the program runs again: on a CPU its own memory, without a copy."""
    if not variable._place().is_cpu_place():
        return np.array(variable)
    dtype = np.dtype(_numpy_dtype(variable))
    size = int(np.prod(variable.shape(), dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_ubyte * size).from_address(variable._ptr())
    values: Array = np.ctypeslib.as_array(memory).view(dtype)
    return values.reshape(list(variable.shape()))


def _numpy_dtype(variable: Any) -> str:
    name = str(convert_dtype(variable._dtype()))
    return _BFLOAT16 if name == "bfloat16" else name
