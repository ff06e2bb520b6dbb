"""State of communication between steps: made equal before it is read, saved with the tensors, and restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.collectives.replica_check import digests
from fleet_train.convert.rewrite import dtype_name
from fleet_train.convert.state.program_state import PARAMETER, ProgramState, borrowed
from fleet_train.convert.state.safetensors_file import Array, Arrays
from fleet_train.errors import CheckpointError
from fleet_train.plan.plan import MEAN_DTYPES

PREFIX = "fleet_train/"
"""Names of state saved in addition to the program's tensors; a program that does not need it ignores it."""
_STEP, _NUMBERS, _ANCHOR, _VELOCITY = (
    PREFIX + name for name in ("step", "local_sgd/numbers", "local_sgd/anchor", "local_sgd/outer_velocity")
)
MAY_BE_NAN = _NUMBERS
"""Its first loss is NaN until there is one."""


def make_equal(job: Job, state: ProgramState, exchange: GradientExchange, with_optimizer: bool) -> None:
    """Average state that differs between ranks but is needed once; all ranks call it.

    This is batch norm's running statistics and, in LocalSGD's local steps, the parameters, and with ``with_optimizer``
    the optimizer's state, so that one rank's file is valid for all of them.
    """
    exchange.settle()
    averager = exchange.averager
    if averager is None or averager.schedule.is_synchronous(exchange.step):
        _average_statistics(job, state)
        return
    names = [name for name in state.drifting if with_optimizer or state.kinds[name] == PARAMETER]
    with dynamic_mode():
        tensors = {name: paddle.to_tensor(array, place=job.place) for name, array in state.read(names).items()}
        exchange.synchronise(tensors)
        state.write({name: tensor.numpy() for name, tensor in tensors.items()}, job.place)


def compare_replicas(
    state: ProgramState,
    exchange: GradientExchange,
    with_optimizer: bool,
    copies: Arrays | None = None,
) -> None:
    """Compare what one rank's file is to hold for all of them; all ranks call it after ``make_equal``.

    The parameters that are trained and, with ``with_optimizer``, what the optimizer keeps of each. Not the latter in
    LocalSGD's local steps, where ranks may have skipped different updates. Does nothing with divergence_check_steps 0.
    ``copies``: those values that are on the host already. Raises ScheduleMismatch.
    """
    if not exchange.check.is_asked_for:
        return
    names, averager = exchange.trained, exchange.averager
    if with_optimizer and (averager is None or averager.schedule.is_synchronous(exchange.step)):
        names += state.kept_of(names)
    copied = copies or {}
    values = (copied[name] if name in copied else borrowed(state.variables[name]) for name in names)
    exchange.compare_saved(names, digests(values))


def _average_statistics(job: Job, state: ProgramState) -> None:
    arrays = state.read(state.statistics)
    if not arrays:
        return
    flat = np.concatenate([array.reshape(-1) for array in arrays.values()])
    mean = job.reduce(flat, "sum") / flat.dtype.type(job.world_size)
    for array in arrays.values():
        array.reshape(-1)[:], mean = mean[: array.size], mean[array.size :]
    state.write(arrays, job.place)


def position_of(exchange: GradientExchange) -> Arrays:
    """The positions of the exchange and LocalSGD, as arrays to save; equal on every rank."""
    arrays: Arrays = {_STEP: np.array([exchange.step])}
    averager = exchange.averager
    if averager is not None:
        averager.settle()
        arrays[_NUMBERS] = np.array(averager.schedule.numbers())
        with dynamic_mode():
            for name, buffers in ((_ANCHOR, averager.anchor), (_VELOCITY, averager.velocity)):
                for buffer in buffers or ():
                    arrays[_of_dtype(name, dtype_name(buffer.dtype))] = np.array(buffer.numpy())
    return arrays


def _of_dtype(name: str, dtype: str) -> str:
    return name if dtype == MEAN_DTYPES[0] else f"{name}.{dtype}"


def _buffers(arrays: Arrays, name: str, place: Any) -> list[Any] | None:
    names = [_of_dtype(name, dtype) for dtype in MEAN_DTYPES]
    return [paddle.to_tensor(arrays[one], place=place) for one in names if one in arrays] or None


def refuse_damaged_position(arrays: Arrays, source: str) -> None:
    """Raise CheckpointError for invalid saved numbers: checked before anything is changed."""
    for name, array in arrays.items():
        is_step = name == _STEP or (name.startswith(PREFIX) and name.endswith("/step"))
        if is_step and not (array.size == 1 and array.dtype.kind in "iuf" and 0 <= float(array.reshape(-1)[0]) < 2**53):
            raise CheckpointError(f"{source}: '{name}' is not a single number of steps; load another saved state")
    numbers = arrays.get(_NUMBERS)
    if numbers is not None and not _are_of_a_schedule(numbers):
        raise CheckpointError(f"{source}: '{_NUMBERS}' is not the state of a period; load another saved state")


def _are_of_a_schedule(numbers: Array) -> bool:
    """Period, steps since the averaging, first rate and first loss (which may be NaN)."""
    if numbers.shape != (4,) or numbers.dtype.kind != "f":
        return False
    period, steps = float(numbers[0]), float(numbers[1])
    return 1 <= period < 2**53 and 0 <= steps < 2**53


def take_position(exchange: GradientExchange, arrays: Arrays, place: Any) -> None:
    """Continue from a saved position. With state saved without LocalSGD, periods start at the loaded parameters."""
    exchange.drop_averaging()
    if _STEP in arrays:
        exchange.step = int(arrays[_STEP][0])
    averager = exchange.averager
    if averager is None:
        return
    if _NUMBERS in arrays:
        averager.schedule.restore([float(number) for number in arrays[_NUMBERS]])
    with dynamic_mode():
        averager.restore(_buffers(arrays, _ANCHOR, place), _buffers(arrays, _VELOCITY, place))
