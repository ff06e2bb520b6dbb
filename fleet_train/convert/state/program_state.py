"""A program's persistable values in a scope: their kinds, copies of them, and writing values back."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base.data_feeder import convert_dtype

from fleet_train.collectives.host_ops import emit_barrier, emit_broadcast, token
from fleet_train.collectives.job import Job
from fleet_train.collectives.transfer import broadcast_arrays
from fleet_train.convert.rewrite import agree, chain_in_program_order
from fleet_train.convert.state.safetensors_file import Array, Arrays
from fleet_train.errors import CheckpointError, ConversionError

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


# Makes all ranks start from rank 0's values, wherever a script creates them.


_STORES_START_VALUE = ("builtin.set_parameter", "builtin.shadow_output")


def make_start_equal(job: Job, main: Any, startup: Any, others: Sequence[Any], scope: Any) -> None:
    """Give every rank the start values of rank 0: those that ``startup`` stores, and all other parameters of ``main``.

    A script may create parameters in another startup program than its optimizer's state
    (``minimize(startup_program=...)``). They are searched in ``others``, startup programs that the script may run, and
    in ``scope``, for a startup program that has already run: those values are broadcast now. All ranks call it;
    ScheduleMismatch if they differ in this.
    """
    broadcast_start_state(job, startup)
    stored = names_stored_by(startup)
    left = {parameter.name for parameter in main.global_block().all_parameters()} - stored
    for other in others:
        if other is not startup and left & names_stored_by(other):
            broadcast_start_state(job, other)
    if left:
        _share_now(job, sorted(left), scope)


def broadcast_start_state(job: Job, startup: Any) -> None:
    """Make ``startup`` give every rank the start values of rank 0.

    Covers all that the startup program stores: parameters, statistics, moments, beta powers, the learning rate.
    Operators that an earlier call has handled are left unchanged.
    """
    stores = [operator for operator in _stores(startup) if not _is_done(operator)]
    if stores:
        with paddle.static.program_guard(startup, startup):
            _emit_broadcasts(job, stores)
        chain_in_program_order(startup.global_block().ops)  # after those of an earlier call: one order for all ranks


def _emit_broadcasts(job: Job, stores: Sequence[Any]) -> None:
    paddle.pir.set_insertion_point(stores[0])
    chain = emit_barrier(job, "startup program", token())
    for operator in stores:
        paddle.pir.set_insertion_point(operator)
        value, chain = emit_broadcast(job, _name(operator), operator.operand_source(0), chain)
        value.persistable = True
        operator.operand(0).set_source(value)
    paddle.pir.reset_insertion_point_to_end()


def _share_now(job: Job, names: Sequence[str], scope: Any) -> None:
    begun = {name: tensor for name in names if (tensor := begun_tensor(scope, name)) is not None}
    agree(job, "the parameters that have values before minimize", sorted(begun))
    if begun:
        for name, array in broadcast_arrays(job, {name: np.array(tensor) for name, tensor in begun.items()}).items():
            begun[name].set(array, job.place)


def names_stored_by(startup: Any) -> set[str]:
    """The variables that a startup program initializes: parameters, and everything else that it stores."""
    return {_name(operator) for operator in _stores(startup)}


def begun_tensor(scope: Any, name: str) -> Any:
    """The tensor of a variable that has a value in ``scope``; None if it has none."""
    variable = scope.find_var(name)
    tensor = None if variable is None else variable.get_tensor()
    return tensor if tensor is not None and tensor._is_initialized() else None


def _stores(startup: Any) -> list[Any]:
    return [operator for operator in startup.global_block().ops if operator.name() in _STORES_START_VALUE]


def _name(operator: Any) -> str:
    return str(operator.attrs().get("parameter_name") or operator.attrs().get("output_name"))


def _is_done(operator: Any) -> bool:
    source = operator.operand_source(0).get_defining_op()
    return source is not None and "fleet_train_broadcast" in source.name()


def refuse_foreign_startup(main: Any, startups: Sequence[Any]) -> None:
    """Raise ConversionError if ``startups``, that of minimize and the default one, initialize no parameter of ``main``,
    and nothing else has.

    This happens with ``minimize(loss)`` outside the ``program_guard`` in which the network was built: learning rate and
    accumulators would go into a program that the script never runs, and start values would not be made equal.
    """
    names = {parameter.name for parameter in main.global_block().all_parameters()}
    scope = paddle.static.global_scope()
    if not names or any(names & names_stored_by(startup) for startup in startups):
        return
    if any(begun_tensor(scope, name) is not None for name in names):
        return
    raise ConversionError(
        f"the startup program of minimize initializes no parameter of the loss (such as '{min(names)}'): "
        "call minimize inside `with paddle.static.program_guard(main, startup)`, or pass startup_program=startup"
    )
