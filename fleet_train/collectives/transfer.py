"""Named numpy arrays between rank 0 and the others: through the process group, bounded, no pickle.

Every call is made by all ranks in the same order. Who talks when is agreed in the job's store: Gloo's own wait ends
after 30 s, and a rank may have to wait for longer than that until it is its turn. Arrays travel in pieces for the same
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.job import Job
from fleet_train.collectives.modes import dynamic_mode

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

_PIECE_BYTES = 16 << 20


def share(job: Job, arrays: Mapping[str, Array]) -> Arrays:
    """Rank 0's arrays on every rank; what the others bring is not looked at."""
    if job.world_size == 1:
        return dict(arrays)
    is_first = job.cluster.rank == 0
    described = job.gather(f"share {job.count('share')}", _describe(arrays) if is_first else None)[0]
    received = {name: np.asarray(array, order="C") for name, array in arrays.items()} if is_first else _empty(described)

    def broadcast(piece: Array) -> None:
        wire = paddle.to_tensor(piece, place=job.place)
        paddle.distributed.broadcast(wire, src=0, group=job.communicators(1)[0])
        if not is_first:
            piece[:] = wire.numpy()

    _each_piece(job, "sharing", received, broadcast)
    return received


def collect(job: Job, arrays: Mapping[str, Array]) -> list[Arrays]:
    """Every rank's arrays, by rank, on rank 0; an empty list on the others."""
    number, rank = job.count("collect"), job.cluster.rank
    mine = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = job.gather(f"collect {number}", _describe(mine))
    collected = [mine if one == 0 else _empty(described[one]) for one in range(job.world_size)] if rank == 0 else []
    for sender in range(1, job.world_size):
        job.gather(f"collect {number} from rank {sender}")
        if rank == sender:
            _each_piece(job, "sending to rank 0", mine, partial(_send, job, 0))
        elif rank == 0:
            _each_piece(job, f"receiving from rank {sender}", collected[sender], partial(_receive, job, sender))
    return collected


def hand_out(job: Job, parts: Sequence[Mapping[str, Array]]) -> Arrays:
    """This rank's part of what rank 0 brings, one part per rank; what the others bring is not looked at."""
    number, rank = job.count("hand out"), job.cluster.rank
    described = job.gather(f"hand out {number}", [_describe(part) for part in parts] if rank == 0 else None)[0]
    mine = dict(parts[0]) if rank == 0 else _empty(described[rank])
    for receiver in range(1, job.world_size):
        job.gather(f"hand out {number} to rank {receiver}")
        if rank == receiver:
            _each_piece(job, "receiving from rank 0", mine, partial(_receive, job, 0))
        elif rank == 0:
            theirs = {name: np.asarray(array, order="C") for name, array in parts[receiver].items()}
            _each_piece(job, f"sending to rank {receiver}", theirs, partial(_send, job, receiver))
    return mine


def _send(job: Job, receiver: int, piece: Array) -> None:
    wire = paddle.to_tensor(piece, place=job.place)
    paddle.distributed.send(wire, dst=receiver, group=job.communicators(1)[0])


def _receive(job: Job, sender: int, piece: Array) -> None:
    wire = paddle.empty([piece.size], "uint8")
    paddle.distributed.recv(wire, src=sender, group=job.communicators(1)[0])
    piece[:] = wire.numpy()


def _each_piece(job: Job, what: str, arrays: Mapping[str, Array], action: Callable[[Array], None]) -> None:
    """``action`` on all memory of the arrays (C-contiguous), as flat uint8 views."""
    with dynamic_mode():
        for name, array in arrays.items():
            try:
                for piece in _pieces(array):
                    action(piece)
            except Exception as error:
                raise job.blame(what, f"{what} '{name}'", error) from error


def _pieces(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    return (flat[start : start + _PIECE_BYTES] for start in range(0, flat.size, _PIECE_BYTES))


def _describe(arrays: Mapping[str, Array]) -> list[list[Any]]:
    return [[name, list(array.shape), array.dtype.str] for name, array in arrays.items()]


def _empty(described: Sequence[Sequence[Any]]) -> Arrays:
    return {name: np.empty(shape, dtype) for name, shape, dtype in described}
