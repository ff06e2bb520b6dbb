"""Transfers named numpy arrays between one rank and the others: over the process group, with a timeout, no pickle.

Every call is made by all ranks in the same order, and all of them take part in every collective. Point-to-point
messages are not used: Paddle's Gloo numbers the operations of a group on each rank, and a message between two of three
ranks waits for one with a different number. Arrays are sent in pieces, so that none takes the 30 s after which Gloo
gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engine import HAND_OVER, CallContext, Collective, Stage, Stages
from fleet_train.collectives.job import Job
from fleet_train.errors import ScheduleMismatch

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

_PIECE_BYTES = 16 << 20
"""What the root sends or receives at a time, over all ranks."""


def broadcast_arrays(job: Job, arrays: Mapping[str, Array], root: int = 0) -> Arrays:
    """The arrays of rank ``root`` on every rank; the others' arrays are ignored."""
    return dict(broadcast_each(job, arrays, root))


def broadcast_each(job: Job, arrays: Mapping[str, Array], root: int = 0) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of rank ``root``, one by one: what a rank does not keep of one is gone before the next one
    arrives. All ranks take all of them."""
    if job.world_size == 1:
        yield from arrays.items()
        return
    is_root = job.cluster.rank == root
    described = job.broadcast(f"share {job.count('share')}", _describe(arrays) if is_root else None, root)
    group = job.communicators(1)[0]

    def broadcast(pieces: Sequence[Array]) -> Stages[None]:
        yield HAND_OVER
        wire = _tensor(job, pieces[0])
        yield Stage((Collective("broadcast", group, wire, root),))
        if not is_root:
            pieces[0][:] = wire.numpy()

    for each in described:
        mine = _contiguous({each[0]: arrays[each[0]]}) if is_root else _empty([each])
        _each_piece(job, "sharing", [mine], _PIECE_BYTES, broadcast)
        yield each[0], mine[each[0]]


def gather_arrays(job: Job, arrays: Mapping[str, Array], group: Any = None) -> list[Arrays]:
    """Every rank's arrays, by rank, on rank 0; an empty list on the others. All ranks call it with the same names and
    shapes. ``group``: this rank's, if only those of rank 0's group are sent."""
    rank = job.cluster.rank
    described = _describe(arrays)
    variants = job.compare(f"collect {job.count('collect')}", described)
    if variants:
        (first, state), (second, other_state) = variants[:2]
        raise ScheduleMismatch(
            f"{job.cluster.describe(first[0][0])} and {job.cluster.describe(second[0][0])} have different state of "
            f"their own to save: {state} and {other_state}"
        )
    group = group or job.communicators(1)[0]
    if 0 not in group.ranks:
        return []
    mine, size = _contiguous(arrays), len(group.ranks)
    parts = [mine, *(_empty(described) for _ in range(1, size))] if rank == 0 else [mine]

    def gather(pieces: Sequence[Array]) -> Stages[None]:
        yield HAND_OVER
        wires: list[Any] = []
        yield Stage((Collective("gather", group, _tensor(job, pieces[0]), 0, output=wires),))
        for piece, wire in zip(pieces[1:], wires[1:], strict=True):
            piece[:] = wire.numpy()

    _each_piece(job, "collecting", parts, _PIECE_BYTES // size, gather)
    return parts if rank == 0 else []


def scatter_arrays(job: Job, parts: Sequence[Mapping[str, Array]]) -> Arrays:
    """This rank's part of rank 0's arrays: one part per rank, with the same names and shapes."""
    is_first, group = job.cluster.rank == 0, job.communicators(1)[0]
    described = job.broadcast(f"hand out {job.count('hand out')}", _describe(parts[0]) if is_first else None)
    own = [_contiguous(part) for part in parts] if is_first else [_empty(described)]

    def scatter(pieces: Sequence[Array]) -> Stages[None]:
        yield HAND_OVER
        wire = paddle.empty([pieces[0].size], "uint8")
        sent = [_tensor(job, piece) for piece in pieces] if is_first else None
        yield Stage((Collective("scatter", group, wire, 0, parts=sent),))
        if not is_first:
            pieces[0][:] = wire.numpy()

    _each_piece(job, "handing out", own, _PIECE_BYTES // job.world_size, scatter)
    return own[0]


def _each_piece(
    job: Job,
    what: str,
    parts: Sequence[Mapping[str, Array]],
    size: int,
    action: Callable[[Sequence[Array]], Stages[None]],
) -> None:
    """Run ``action`` over the memory of arrays with the same names and shapes, as flat uint8 views of ``size`` bytes.

    Runs in the engine: an averaging still under way uses the same group.
    """
    for name in parts[0]:
        flat = [part[name].reshape(-1).view(np.uint8) for part in parts]
        context = CallContext(f"{what} '{name}'", f"{what} '{name}'", job.timeout_seconds, what)
        for start in range(0, flat[0].size, size):
            job.engine.start(action([array[start : start + size] for array in flat]), context).result()


def _tensor(job: Job, piece: Array) -> Any:
    return paddle.to_tensor(piece, place=job.place)


def _contiguous(arrays: Mapping[str, Array]) -> Arrays:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _describe(arrays: Mapping[str, Array]) -> list[list[Any]]:
    return [[name, list(array.shape), array.dtype.str] for name, array in arrays.items()]


def _empty(described: Sequence[Sequence[Any]]) -> Arrays:
    return {name: np.empty(shape, dtype) for name, shape, dtype in described}
