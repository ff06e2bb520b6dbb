"""The divergence sentinel: do all ranks still hold the same parameters?"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fleet_train.collectives.job import Job
from fleet_train.errors import ScheduleMismatch


def digests(tensors: Sequence[Any]) -> list[int]:
    """CRC-32 of each tensor's bytes (eager tensors). About 1 GB/s on one core."""
    return [zlib.crc32(np.ascontiguousarray(np.asarray(tensor.numpy())).data) for tensor in tensors]


def compare(job: Job, moment: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raise ScheduleMismatch naming the first parameter and rank that differ from the majority; all ranks call it."""
    mine = digests(tensors)
    whole = zlib.crc32(np.asarray(mine, np.uint32).tobytes())
    everybody = job.gather(f"digest at {moment}", whole)
    if len(set(everybody.values())) == 1:
        return
    details = job.gather(f"digests at {moment}", mine)
    raise ScheduleMismatch(explain_drift(job, moment, names, details))


def explain_drift(job: Job, moment: str, names: Sequence[str], details: dict[int, list[int]]) -> str:
    """Which parameter, which ranks."""
    for index, name in enumerate(names):
        found = [details[rank][index] for rank in range(job.world_size)]
        usual = max(set(found), key=lambda value: (found.count(value), value == found[0]))
        odd = [rank for rank, value in enumerate(found) if value != usual]
        if odd:
            ranks = ", ".join(job.cluster.describe(rank) for rank in odd)
            return (
                f"replicas have drifted apart at {moment}: parameter '{name}' of {ranks} is not what the other "
                f"ranks hold. "
                "Something has changed it outside the exchange: state loaded on one rank only, or an update that "
                "depends "
                "on the rank (divergence_check_steps)"
            )
    return f"replicas have drifted apart at {moment}"
