"""NaN and infinity in state that is saved or loaded: what is refused, and what may contain them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fleet_train.convert.state.local_state import MAY_BE_NAN
from fleet_train.convert.state.persistables import State
from fleet_train.convert.state.program_state import OPTIMIZER, PARAMETER, float_values, is_finite, is_sum
from fleet_train.convert.state.safetensors_file import Array

_FROZEN = (
    "; this is state of the optimizer: where it is infinite, the weights never change again, or become infinite "
    "themselves (a gradient was too large)"
)


def first_not_finite(state: State, constant: Collection[str], when: str = "") -> str | None:
    """What is wrong with the first tensor that holds NaN or infinity, by name; None if there is none.

    May contain them: sums of a gradient merge in the middle of an update, which the update may skip; the first loss of
    an adaptive period; variables that a script has made itself and that belong to no parameter. ``constant``:
    parameters that are not trained, and may be infinite, such as a mask. ``when``: for the text, ``after step 4``.
    """
    parameters = [name for name, kind in state.kinds.items() if kind == PARAMETER]
    named = [("", state.arrays), *((f"rank {rank}'s ", arrays) for rank, arrays in enumerate(state.ranks))]
    for whose, arrays in named:
        for name, array in arrays.items():
            if is_finite(array) or name == MAY_BE_NAN or is_sum(name):
                continue
            values = float_values(array)
            nans = int(np.isnan(values).sum())
            if not nans and name in constant:
                continue
            kind = state.kinds.get(name)
            if kind == OPTIMIZER and not any(f"{parameter}_" in name for parameter in parameters):
                continue
            told = f"{whose}'{name}' is {_counted(values, nans)} {when}".rstrip()
            return f"{told}{_FROZEN}" if kind == OPTIMIZER and not nans else told
    return None


def _counted(values: Array, nans: int) -> str:
    """``NaN in 2 and infinite in 1 of 12 elements``."""
    infinite = int(np.isinf(values).sum())
    parts = [f"{what} in {count}" for what, count in (("NaN", nans), ("infinite", infinite)) if count]
    return f"{' and '.join(parts)} of {values.size} elements"
