"""Momentum's velocities, which DGC keeps itself: converted between a run with DGC and one without.

DGC takes over the optimizer's momentum only on several ranks. Velocities are converted so that one card can continue a
checkpoint of many ranks, and vice versa; updates that DGC has not sent yet are dropped.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fleet_train.convert.state.fitting import Described
from fleet_train.convert.state.local_state import PREFIX
from fleet_train.convert.state.persistables import State
from fleet_train.convert.state.program_state import OPTIMIZER, PARAMETER
from fleet_train.convert.state.rank_state import mean_of_ranks
from fleet_train.errors import CheckpointError

_OF_MOMENTUM, _OF_DGC = "_velocity_0", ".velocity"
_DGC = f"{PREFIX}dgc/"


def to_momentum(saved: State, ours: Described) -> State:
    """State saved with DGC, plus the velocities that a program with Momentum needs: the means over the ranks."""
    missing = [name for name in ours if name.endswith(_OF_MOMENTUM) and name not in saved.arrays]
    if not missing or f"{_DGC}step" not in saved.arrays:
        return saved
    means = mean_of_ranks(saved.ranks) if saved.ranks else {}
    velocities = {}
    for name in missing:
        _, shape, dtype = ours[name]
        flat = means.get(_dgc_name(name, ours))
        if flat is not None and flat.size != math.prod(shape):
            raise CheckpointError(
                f"the velocity of '{name}' was saved with {flat.size} elements, this program has {shape}"
            )
        velocities[name] = np.zeros(shape, dtype) if flat is None else flat.reshape(shape).astype(dtype)
    kinds = saved.kinds | dict.fromkeys(velocities, OPTIMIZER)
    return replace(saved, arrays={**saved.arrays, **velocities}, kinds=kinds)


def to_dgc(saved: State, ours: Described) -> State:
    """State saved with Momentum, with its velocities under the names that a program with DGC reads."""
    left_over = [
        name for name in saved.kinds if name.endswith(_OF_MOMENTUM) and name not in ours and name in saved.arrays
    ]
    arrays = {name: array for name, array in saved.arrays.items() if name not in left_over}
    for name in left_over:
        velocity = saved.arrays[name].reshape(-1).astype(np.float32)
        arrays[_dgc_name(name, ours)] = velocity
    return replace(saved, arrays=arrays)


def _dgc_name(velocity: str, ours: Described) -> str:
    """DGC's name of what Momentum calls ``velocity``: its parameter's, without the prefix of a name guard that Paddle
    has added a second time.
    """
    stem = velocity.removesuffix(_OF_MOMENTUM)
    owners = [name for name, (kind, _, _) in ours.items() if kind == PARAMETER and stem.endswith(name)]
    return f"{_DGC}{max(owners, key=len, default=stem)}{_OF_DGC}"
