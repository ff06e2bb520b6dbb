"""LocalSGD's state between steps: made equal before it is read, saved beside the tensors, taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.averaging import Held
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import broadcast
from fleet_train.collectives.job import Job
from fleet_train.collectives.modes import dynamic_mode
from fleet_train.convert.persistables import POSITION_PREFIX, Arrays

_NUMBERS, _ANCHOR, _VELOCITY = (POSITION_PREFIX + name for name in ("numbers", "anchor", "outer_velocity"))


def synchronise(exchange: GradientExchange, program: Any, scope: Any, place: Any, with_optimizer: bool) -> None:
    """Average what drifts between averagings, in the scope; all ranks call it. Without LocalSGD nothing is done.

    With ``with_optimizer`` also the optimizer's state, so that one rank's file speaks for all of them.
    """
    if exchange.averager is None:
        return
    variables = {
        name: variable
        for name, variable in program.state_dict("all" if with_optimizer else "param", scope).items()
        if np.asarray(variable).dtype in (np.float32, np.float64)
    }
    with dynamic_mode():
        tensors = {name: paddle.to_tensor(np.asarray(variable), place=place) for name, variable in variables.items()}
        exchange.synchronise(Held(list(tensors.values()), [], []))
        for name, tensor in tensors.items():
            variables[name].set(tensor.numpy(), place)


def position_of(exchange: GradientExchange) -> Arrays:
    """Where LocalSGD stands, as arrays to save; empty without LocalSGD."""
    averager = exchange.averager
    if averager is None:
        return {}
    arrays: Arrays = {_NUMBERS: np.array([float(exchange.step), *averager.schedule.numbers()])}
    for name, tensor in ((_ANCHOR, averager.anchor), (_VELOCITY, averager.outer.velocity)):
        if tensor is not None:
            arrays[name] = np.asarray(tensor.numpy())
    return arrays


def take_position(exchange: GradientExchange, arrays: Arrays, place: Any) -> None:
    """Go on from a saved position. State saved without LocalSGD starts it anew from the loaded parameters."""
    averager = exchange.averager
    if averager is None:
        return
    averager.anchor = averager.outer.velocity = None
    if _NUMBERS not in arrays:
        return
    step, *numbers = (float(number) for number in arrays[_NUMBERS])
    exchange.step = int(step)
    averager.schedule.take(numbers)
    with dynamic_mode():
        if _ANCHOR in arrays:
            averager.anchor = paddle.to_tensor(arrays[_ANCHOR], place=place)
        if _VELOCITY in arrays:
            averager.outer.velocity = paddle.to_tensor(arrays[_VELOCITY], place=place)


def share_arrays(job: Job, arrays: Arrays) -> Arrays:
    """Rank 0's arrays on every rank; what the others bring is not looked at."""
    if job.world_size == 1:
        return arrays
    described = [[name, list(array.shape), array.dtype.str] for name, array in sorted(arrays.items())]
    described = job.gather(f"arrays {job.count('arrays')}", described)[0]
    shared = {}
    with dynamic_mode():
        for name, shape, dtype in described:
            mine = arrays[name] if job.cluster.rank == 0 else np.zeros(shape, dtype)
            raw = np.frombuffer(np.ascontiguousarray(mine).tobytes(), np.uint8).copy()
            content = broadcast(job, paddle.to_tensor(raw, place=job.place), f"loading '{name}'").numpy()
            shared[name] = np.frombuffer(content.tobytes(), dtype).reshape(shape)
    return shared
