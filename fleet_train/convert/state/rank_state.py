"""State that differs between ranks: compression errors, gradient merge's sums in the middle of an update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.transfer import broadcast_arrays, gather_arrays, scatter_arrays
from fleet_train.collectives.methods import state as method_state
from fleet_train.convert.state.local_state import PREFIX
from fleet_train.convert.state.program_state import ProgramState
from fleet_train.convert.state.safetensors_file import Arrays


def read_methods(exchange: GradientExchange) -> tuple[Arrays, Arrays]:
    """The state of compression: (equal on every rank, this rank's own)."""
    alike, own = method_state.read(exchange.memories)
    return {PREFIX + name: alike[name] for name in alike}, {PREFIX + name: own[name] for name in own}


def gather_own(job: Job, state: ProgramState, own_of_methods: Arrays) -> list[Arrays]:
    """Every rank's own state on rank 0, by rank; empty on the others, and if there is none."""
    own = {**own_of_methods, **state.read(state.sums_under_way)}
    return gather_arrays(job, own) if own else []


def spread_own(job: Job, saved: Sequence[Arrays], number_saved: int) -> Arrays:
    """This rank's own part of the state that rank 0 has read (``number_saved`` ranks; every rank knows that number).

    On the same number of ranks, each restores its own. On another number each takes the mean: the total that is still
    to be added to the average of gradients stays the same.
    """
    if number_saved == 0:
        return {}
    if number_saved == job.world_size:
        return scatter_arrays(job, saved)
    return broadcast_arrays(job, mean_of_ranks(saved) if job.cluster.rank == 0 else {})


def mean_of_ranks(saved: Sequence[Arrays]) -> Arrays:
    """The mean over ranks of each array, in its dtype."""
    return {
        name: np.mean([arrays[name] for arrays in saved], axis=0, dtype=np.float64).astype(array.dtype)
        for name, array in saved[0].items()
    }
