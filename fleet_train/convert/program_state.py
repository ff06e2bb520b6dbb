"""A program's state in memory: its values in a scope, the position of its communication, and which of what was saved,
perhaps by another program, fits it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import paddle
from paddle.base.data_feeder import convert_dtype

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.passes.program import changes_statistics
from fleet_train.convert.planning import dtype_name
from fleet_train.errors import CheckpointError
from fleet_train.plan.plan import MEAN_DTYPES

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Described = Mapping[str, tuple[str, list[int], str]]
"""Kind, shape and dtype by name."""

PARAMETER, OPTIMIZER, PASS = "parameter", "optimizer", "pass"
"""Kinds: parameters and batch-norm statistics; the optimizer's state, LookAhead's counters, too; what a pass, or a
guard around it, added."""

PREFIX = "fleet_train/"
"""Names of state saved in addition to the program's tensors; a program that does not need it ignores it."""

_STEP, _NUMBERS, _ANCHOR, _VELOCITY = (
    PREFIX + name for name in ("step", "local_sgd/numbers", "local_sgd/anchor", "local_sgd/outer_velocity")
)
# Named by unique_name, so they begin with the prefix of a unique_name.guard("...") that the script may have set.
_SUMS = re.compile(r".+@gradient_merge")
_COUNT = re.compile(r".*gradient_merge_count_\d+")
_LOSS_SCALE = re.compile(r".*loss_scaling(_good_steps|_bad_steps)?_\d+")
# Paddle makes parameters of whole numbers for them.
_OF_LOOK_AHEAD = re.compile(r".*lookahead_(k|step)_\d+")
_OF_THE_TRAINER = re.compile(r".+@average|weight_average_updates|skipped_updates")
# Equal on every rank by construction: a mean over ranks could change their last bit. Sums are each rank's own.
_NOT_AVERAGED = re.compile(rf".*learning_rate_\d+|.+_pow_acc_\d+|{_SUMS.pattern}|{_LOSS_SCALE.pattern}")
# The bits of a bfloat16, as in Paddle's arrays; Paddle makes a bfloat16 tensor from them again.
_BFLOAT16 = "uint16"


class ProgramState:
    """The variables of ``program`` in Paddle's global scope, by name in sorted order: the same on every rank."""

    def __init__(self, program: Any) -> None:
        scope = paddle.static.global_scope()
        if missing := missing_in_scope(program):  # Paddle's state_dict would end the process
            raise CheckpointError(
                f"the program has no value of {_several(missing)} in this scope: run the startup program first"
            )
        values = program.state_dict("all", scope)
        if not values:
            raise CheckpointError("the program has no persistable values in this scope: run the startup program first")
        self.variables: dict[str, Any] = dict(sorted(values.items()))
        parameters = program.state_dict("param", scope)
        self.kinds = {name: kind_of(name, name in parameters) for name in self.variables}
        self._program = program

    def read(self, names: Iterable[str], into: Mapping[str, Array] | None = None) -> Arrays:
        """Copies of the values; bfloat16 as its bits in uint16. Arrays of ``into`` that fit are overwritten, reused."""
        copies = {}
        for name in names:
            value, copy = borrowed(self.variables[name]), (into or {}).get(name)
            if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
                copy = np.empty(value.shape, value.dtype)
            np.copyto(copy, value)
            copies[name] = copy
        return copies

    def write(self, arrays: Mapping[str, Array], place: Any) -> None:
        """Put arrays into the variables of these names."""
        for name, array in arrays.items():
            self.variables[name].set(array, place)

    def describe(self) -> dict[str, tuple[str, list[int], str]]:
        """Kind, shape and numpy dtype of each variable, by name."""
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

    def kept_of(self, exchange: GradientExchange) -> list[str]:
        """The optimizer's values of the parameters of an exchange, and their moving averages, which are named after
        them."""
        known = set(exchange.trained)
        return [
            name
            for name, kind in self.kinds.items()
            if kind != PARAMETER and not _SUMS.fullmatch(name) and (name in exchange.kept or belongs_to(name, known))
        ]

    def first_not_finite(self, changed: Collection[str] = (), only: Collection[str] | None = None) -> str | None:
        """The first parameter or statistic that holds NaN or infinity; one that is not trained may be infinite.

        ``changed``: what other programs train; ``only``: those that are looked at.
        """
        names = [name for name, kind in self.kinds.items() if kind == PARAMETER and (only is None or name in only)]
        values = ((name, borrowed(self.variables[name])) for name in names)
        return next((name for name, _ in not_finite(values, self.constant.difference(changed))), None)

    @property
    def constant(self) -> frozenset[str]:
        """Parameters that no step of this program changes, such as a mask."""
        frozen = {value.name for value in self._program.global_block().all_parameters() if value.stop_gradient}
        return frozenset(frozen.difference(self.statistics))

    @property
    def statistics(self) -> list[str]:
        """Batch-norm statistics that each rank computes from its own batches."""
        return sorted(statistics_of(self._program) & self.variables.keys())

    @property
    def sums_under_way(self) -> list[str]:
        """Gradient merge's sums, in the middle of an update; each rank has its own. Between updates they are zero."""
        counts = [variable for name, variable in self.variables.items() if _COUNT.fullmatch(name)]
        if not any(borrowed(count).any() for count in counts):
            return []
        return [name for name in self.variables if _SUMS.fullmatch(name)]


def held_names(program: Any) -> list[str]:
    """The variables of a scope that ``program`` keeps its values in."""
    names = []
    for operator in program.global_block().ops:
        if operator.name() == "builtin.parameter":
            names.append(str(operator.attrs()["parameter_name"]))
        elif operator.name() == "pd_op.data" and operator.result(0).persistable:
            names.append(str(operator.attrs()["name"]))
    return list(dict.fromkeys(names))


def missing_in_scope(program: Any) -> list[str]:
    """The names of a program's variables that the current scope does not have."""
    scope = paddle.static.global_scope()
    return [name for name in held_names(program) if scope.find_var(name) is None]


def statistics_of(program: Any) -> set[str]:
    """Batch-norm statistics that a run of ``program`` changes, on each rank by its own batches."""
    return {
        str(source.get_defining_op().attrs().get("parameter_name"))
        for operator in program.global_block().ops
        if changes_statistics(operator)
        for source in operator.operands_source()[1:3]
    }


def belongs_to(name: str, parameters: Collection[str]) -> bool:
    """Whether a variable is named after one of these parameters, as Paddle names the optimizer's state."""
    return any(name[:end] in parameters for end, sign in enumerate(name) if sign in "_@")


def counts_micro_batches(name: str) -> bool:
    """Whether a variable is gradient merge's count."""
    return _COUNT.fullmatch(name) is not None


def kind_of(name: str, is_parameter: bool) -> str:
    """The kind of a variable: parameter, optimizer, or pass."""
    if not is_parameter and any(pattern.fullmatch(name) for pattern in (_SUMS, _COUNT, _LOSS_SCALE, _OF_THE_TRAINER)):
        return PASS
    return PARAMETER if is_parameter and not _OF_LOOK_AHEAD.fullmatch(name) else OPTIMIZER


def float_values(array: Array) -> Array:
    """The values of a copy, in which bfloat16 is its bits."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == _BFLOAT16 else array


def not_finite(arrays: Iterable[tuple[str, Array]], constant: Collection[str]) -> Iterator[tuple[str, Array]]:
    """The arrays that hold NaN, or infinity unless they are ``constant``: names and values in a float dtype."""
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


@dataclass(frozen=True)
class SavedState:
    """A state to save, or that was saved. Names that begin with ``fleet_train/`` are not tensors of the program."""

    arrays: Arrays
    kinds: dict[str, str] = field(default_factory=dict)
    """The kind of each tensor of the program: parameter (and statistics), optimizer, or pass."""
    ranks: list[Arrays] = field(default_factory=list)
    """What differs between the ranks, by rank; all have the same names. Empty if nothing differs."""

    def describe(self) -> Described:
        """The tensors of the program, including those of the ranks."""
        own = self.ranks[0] if self.ranks else {}
        return {
            name: (self.kinds.get(name, PASS), list(array.shape), array.dtype.name)
            for name, array in {**self.arrays, **own}.items()
            if not name.startswith(PREFIX)
        }


def fit(saved: Described, ours: Described, source: str) -> tuple[list[str], list[str]]:
    """Compare saved tensors with the program's own: the names of those to load, and notes to the user about the rest.

    Parameters and optimizer state must exist, with the same shapes and dtypes, and nothing may be left over; but a
    program without an optimizer (for evaluation) ignores saved optimizer state. State of the profile's passes (gradient
    merge's sums, the loss scale) may exist on one side only. CheckpointError names the first tensor that does not fit.
    """
    for name in sorted(ours):
        kind, shape, dtype = ours[name]
        if name in saved and (shape, dtype) != tuple(saved[name][1:]):
            raise CheckpointError(
                f"{source}: '{name}' is {saved[name][1]} {saved[name][2]}, this program needs {shape} {dtype}"
            )
        if name not in saved and kind != PASS:
            raise CheckpointError(
                f"{source} has no tensor '{name}', which this program needs: is it from another model?"
            )
    trains = any(kind == OPTIMIZER for kind, _, _ in ours.values())
    aside = {PASS} if trains else {PASS, OPTIMIZER}
    left_over = sorted(name for name in saved if name not in ours)
    for name in left_over:
        if saved[name][0] not in aside:
            raise CheckpointError(f"{source} has a tensor '{name}' that this program does not have")
    notes = []
    if started := sorted(name for name in ours if name not in saved):
        notes.append(f"{source} has no {_several(started)}, which keep their start values")
    if trains and left_over:
        notes.append(f"{source} has {_several(left_over)}, which this profile does not use")
    return [name for name in ours if name in saved], notes


def fitting_parameters(saved: SavedState, ours: Described, source: str) -> tuple[SavedState, list[str]]:
    """The saved parameters and statistics that the program has with the same shape and dtype, and notes to the user
    that list all others. Raises CheckpointError if there is none."""
    theirs, own = (
        {name: (shape, dtype) for name, (kind, shape, dtype) in each.items() if kind == PARAMETER}
        for each in (saved.describe(), ours)
    )
    same = [name for name in own if theirs.get(name) == own[name]]
    unlike = [
        f"'{name}' ({theirs[name][0]} {theirs[name][1]} there, {own[name][0]} {own[name][1]} here)"
        for name in own
        if name in theirs and name not in same
    ]
    kept = [f"'{name}'" for name in own if name not in theirs]
    left = [f"'{name}'" for name in theirs if name not in own]
    lists = [("of another shape or dtype", unlike), ("only in this program", kept), ("only there", left)]
    others = "; ".join(f"{what}: {_listed(names)}" for what, names in lists if names)
    if not same:
        raise CheckpointError(f"{source} has no parameter of this program ({others}): is it from another model?")
    notes = [
        f"{source}: {len(same)} of this program's {len(own)} parameters and statistics are loaded"
        + (others and f"; {others}")
    ]
    return SavedState({name: saved.arrays[name] for name in same}, dict.fromkeys(same, PARAMETER)), notes


def _listed(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _several(names: list[str]) -> str:
    return _listed([f"'{name}'" for name in names], 1)


_FROZEN = (
    "; this is state of the optimizer: where it is infinite, the weights never change again, or become infinite "
    "themselves (a gradient was too large)"
)


def what_is_not_finite(state: SavedState, constant: Collection[str], when: str = "") -> str | None:
    """What is wrong with the first tensor that holds NaN or infinity, by name; None if there is none.

    May contain them: sums of a gradient merge in the middle of an update, which the update may skip; the first loss of
    an adaptive period; variables that a script has made itself and that belong to no parameter. ``constant``:
    parameters that are not trained, and may be infinite, such as a mask. ``when``: for the text, ``after step 4``.
    """
    parameters = [name for name, kind in state.kinds.items() if kind == PARAMETER]
    named = [("", state.arrays), *((f"rank {rank}'s ", arrays) for rank, arrays in enumerate(state.ranks))]
    for whose, arrays in named:
        for name, values in not_finite(arrays.items(), constant):
            kind = state.kinds.get(name)
            if name == _NUMBERS or _SUMS.fullmatch(name):
                continue
            if kind == OPTIMIZER and not any(f"{parameter}_" in name for parameter in parameters):
                continue
            nans = int(np.isnan(values).sum())
            problem = f"{whose}'{name}' is {_counted(values, nans)} {when}".rstrip()
            return f"{problem}{_FROZEN}" if kind == OPTIMIZER and not nans else problem
    return None


def _counted(values: Array, nans: int) -> str:
    """``NaN in 2 and infinite in 1 of 12 elements``."""
    infinite = int(np.isinf(values).sum())
    parts = [f"{what} in {count}" for what, count in (("NaN", nans), ("infinite", infinite)) if count]
    return f"{' and '.join(parts)} of {values.size} elements"


_BUFFER, _ROWS, _OF_ROWS = "@gradient_merge", f"{PREFIX}rows/", ".merged"


def to_merged(saved: SavedState, ours: Described, tables: Collection[str]) -> SavedState:
    """Gradient merge's sums under the names that this program reads: variables of its own, or, of the embeddings'
    ``tables`` whose rows are sent, state of their exchange."""

    def renamed(name: str) -> str:
        variable = name.removeprefix(_ROWS).removesuffix(_OF_ROWS) + _BUFFER
        if name.startswith(_ROWS) and variable in ours:
            return variable
        table = name.removesuffix(_BUFFER)
        return f"{_ROWS}{table}{_OF_ROWS}" if table in tables and name.endswith(_BUFFER) else name

    def of(arrays: Arrays) -> Arrays:
        return {renamed(name): array for name, array in arrays.items()}

    return replace(saved, arrays=of(saved.arrays), ranks=[of(own) for own in saved.ranks])


def mean_of_ranks(saved: Sequence[Arrays]) -> Arrays:
    """The mean over ranks of each array, in its dtype."""
    return {
        name: np.mean([arrays[name] for arrays in saved], axis=0, dtype=np.float64).astype(array.dtype)
        for name, array in saved[0].items()
    }


def position_of(exchange: GradientExchange, of: str = "") -> Arrays:
    """The positions of the exchange and LocalSGD, as arrays to save; equal on every rank. ``of``: see `name_of`."""
    arrays: Arrays = {name_of(_STEP, of): np.array([exchange.step])}
    averager = exchange.averager
    if averager is not None:
        averager.drain_copies()
        arrays[name_of(_NUMBERS, of)] = np.array(averager.schedule.numbers())
        with dynamic_mode():
            for name, buffers in ((_ANCHOR, averager.anchor), (_VELOCITY, averager.velocity)):
                for buffer in buffers or ():
                    key = _of_dtype(name_of(name, of), dtype_name(buffer.dtype))
                    arrays[key] = np.array(buffer.numpy())
    return arrays


def name_of(name: str, of: str) -> str:
    """The name under which a position is saved: that of another conversion of the same program than the last one has
    its first parameter, ``of``, in it."""
    return f"{PREFIX}of {of}/{name.removeprefix(PREFIX)}" if of else name


def _of_dtype(name: str, dtype: str) -> str:
    return name if dtype == MEAN_DTYPES[0] else f"{name}.{dtype}"


def _buffers(arrays: Arrays, name: str, place: Any) -> list[Any] | None:
    saved = [arrays[key] for dtype in MEAN_DTYPES if (key := _of_dtype(name, dtype)) in arrays]
    return [paddle.to_tensor(array, place=place) for array in saved] or None


def refuse_damaged_position(arrays: Arrays, source: str) -> None:
    """Raise CheckpointError for invalid saved numbers: checked before anything is changed."""
    for name, array in arrays.items():
        is_step = name == _STEP or (name.startswith(PREFIX) and name.endswith("/step"))
        if is_step and not (array.size == 1 and array.dtype.kind in "iuf" and 0 <= float(array.reshape(-1)[0]) < 2**53):
            raise CheckpointError(f"{source}: '{name}' is not a single number of steps; load another saved state")
        is_period = name.startswith(PREFIX) and name.endswith(_NUMBERS.removeprefix(PREFIX))
        if is_period and not _are_of_a_schedule(array):
            raise CheckpointError(f"{source}: '{name}' is not the state of a period; load another saved state")


def _are_of_a_schedule(numbers: Array) -> bool:
    """Whether numbers are a schedule's: period, steps since the averaging, first rate and first loss, perhaps NaN."""
    if numbers.shape != (4,) or numbers.dtype.kind != "f":
        return False
    period, steps = float(numbers[0]), float(numbers[1])
    return 1 <= period < 2**53 and 0 <= steps < 2**53


def restore_position(exchange: GradientExchange, arrays: Arrays, place: Any, of: str = "") -> None:
    """Continue from a saved position; ``of`` as of `position_of`. With state saved without LocalSGD, periods start at
    the loaded parameters."""
    exchange.drop_averaging()
    step, numbers = name_of(_STEP, of), name_of(_NUMBERS, of)
    if step in arrays:
        exchange.step = int(arrays[step][0])
    averager = exchange.averager
    if averager is None:
        return
    if numbers in arrays:
        averager.schedule.restore([float(number) for number in arrays[numbers]])
    with dynamic_mode():
        averager.restore(*(_buffers(arrays, name_of(name, of), place) for name in (_ANCHOR, _VELOCITY)))
