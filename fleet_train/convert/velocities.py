"""Momentum's velocities, which DGC keeps itself: carried over between a run with DGC and one without.

DGC takes the momentum over from the optimizer, on several ranks only. So that one card goes on with a checkpoint of
many ranks, and the other way round, velocities are handed over; updates that DGC has not sent yet are not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fleet_train.convert.fitting import Described
from fleet_train.convert.local_state import PREFIX
from fleet_train.convert.persistables import State
from fleet_train.convert.program_state import OPTIMIZER
from fleet_train.convert.rank_state import mean_of_ranks

_OF_MOMENTUM, _OF_DGC = "_velocity_0", ".velocity"
_DGC = f"{PREFIX}dgc/"


def to_momentum(saved: State, ours: Described) -> State:
    """State saved with DGC, with the velocities that a program with Momentum needs: the means over the ranks."""
    missing = [name for name in ours if name.endswith(_OF_MOMENTUM) and name not in saved.arrays]
    if not missing or f"{_DGC}step" not in saved.arrays:
        return saved
    means = mean_of_ranks(saved.ranks) if saved.ranks else {}
    velocities = {}
    for name in missing:
        _, shape, dtype = ours[name]
        flat = means.get(f"{_DGC}{name.removesuffix(_OF_MOMENTUM)}{_OF_DGC}")
        velocities[name] = np.zeros(shape, dtype) if flat is None else flat.reshape(shape).astype(dtype)
    kinds = saved.kinds | dict.fromkeys(velocities, OPTIMIZER)
    return replace(saved, arrays={**saved.arrays, **velocities}, kinds=kinds)


def to_dgc(saved: State, ours: Described) -> State:
    """State saved with Momentum, with its velocities where a program with DGC looks for them."""
    left_over = [name for name in saved.kinds if name.endswith(_OF_MOMENTUM) and name not in ours]
    arrays = {name: array for name, array in saved.arrays.items() if name not in left_over}
    for name in left_over:
        velocity = saved.arrays[name].reshape(-1).astype(np.float32)
        arrays[f"{_DGC}{name.removesuffix(_OF_MOMENTUM)}{_OF_DGC}"] = velocity
    return replace(saved, arrays=arrays)
