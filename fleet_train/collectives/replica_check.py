"""Comparisons of the ranks: do they still hold the same parameters, and do they read different samples?"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engine import HostCopy, HostDevice
from fleet_train.collectives.job import Job
from fleet_train.errors import ScheduleMismatch

# In an error without a majority: at most this many values, and ranks of each.
_NAMED_GROUPS = 8


def digests(arrays: Iterable[Any]) -> list[int]:
    """CRC-32 of each array's bytes. About 1 GB/s on one core."""
    return [zlib.crc32(np.ascontiguousarray(array).data) for array in arrays]


def device_digests(tensors: Sequence[Any]) -> Any:
    """A number for each tensor's bits, int64 [tensors], made on the device: the host reads nothing.

    The sum over elements of bits * (2 * index + 1) modulo 2**64: exact, so the order of adding does not matter, and
    every change of one element changes it.
    """
    return paddle.stack([_weighted_sum(bits_of(tensor)) for tensor in tensors])


_PIECE = 1 << 22
"""Elements of which a digest is made at a time: each takes 24 bytes of memory meanwhile."""


def bits_of(tensor: Any) -> Any:
    """The elements' bits as integers, flat."""
    if tensor.dtype == paddle.bool:
        return tensor.reshape([-1]).cast("int64")
    integers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
    return paddle.view(tensor.reshape([-1]), integers[tensor.element_size()])


def _weighted_sum(bits: Any) -> Any:
    """A digest of bits, made in pieces: that of a large parameter must not need a multiple of its memory."""
    elements = bits.shape[0]
    pieces = range(0, elements, _PIECE) if elements else [0]
    return paddle.add_n([_weighted_piece(bits[at : at + _PIECE], at) for at in pieces])


def _weighted_piece(bits: Any, at: int) -> Any:
    places = paddle.arange(at, at + bits.shape[0], dtype="int64")
    return (bits.cast("int64") * (2 * places + 1)).sum()


class ReplicaCheck:
    """The comparisons of one program's replicas that ``divergence_check_steps`` asks for. All ranks call everything in
    the same order."""

    def __init__(self, job: Job, every_steps: int) -> None:
        self._job = job
        self._every = every_steps
        self._steps = 0
        self._start_is_checked = False
        self._pending: list[tuple[str, Sequence[str], HostCopy]] = []
        """The comparisons under way: (moment, names, digests on their way to the host)."""

    @property
    def is_asked_for(self) -> bool:
        """Whether the profile asks for comparisons: then the replicas are compared before every save, too."""
        return self._every > 0

    def count(self) -> None:
        """Called once in each update, before `after_step`."""
        self._steps += 1

    def after_step(self, moment: str, names: Sequence[str], tensors: Sequence[Any], first: bool = False) -> None:
        """Compare values that are equal on all ranks after a step, if it is due."""
        if self._is_due(first):
            self._steps = 0
            self._compare(moment, names, tensors)

    def compares_after(self, first: bool) -> bool:
        """Whether the update that comes next will be compared; ``first``: whether it is a training's first one."""
        return self._is_due(first, 1)

    def _is_due(self, first: bool, more: int = 0) -> bool:
        return self._every > 0 and (first or self._steps + more >= self._every)

    def at_start(self, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Compare what training starts from, once: local steps hide differences, and an averaging mixes them."""
        if not self._start_is_checked:
            self._start_is_checked = True
            self._compare("the start", names, tensors)

    def drain_copies(self) -> None:
        """Read what the last step copied to the host. Raises ScheduleMismatch for replicas that have diverged."""
        pending, self._pending = self._pending, []
        for moment, names, copy in pending:
            compare_digests(self._job, moment, names, [int(digest) for digest in copy.read()])

    def _compare(self, moment: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Compare values now, or a step later where the host must not wait for the device."""
        engine = self._job.engine
        if engine.reads_values:
            with self._job.clock.exposed():
                compare(self._job, moment, names, tensors)
        else:
            self._pending.append((moment, names, engine.device.to_host(device_digests(tensors))))


def compare(job: Job, moment: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raise ScheduleMismatch naming the first parameter that differs, and whose it is; all ranks call it."""
    compare_digests(job, moment, names, digests(tensor.numpy() for tensor in tensors))


def compare_digests(job: Job, moment: str, names: Sequence[str], mine: list[int]) -> None:
    """Compare the replicas by the digests of their values. Raises ScheduleMismatch if they differ."""
    whole = zlib.crc32(np.asarray(mine, np.int64).tobytes())
    if not job.compare(f"digest at {moment}", whole):
        return
    details = job.all_gather(f"digests at {moment}", mine)
    error = ScheduleMismatch(explain_drift(job, moment, names, details))
    changed = _outside_majority([tuple(details[rank]) for rank in range(job.world_size)])
    error.failed_rank = changed[0] if changed else None
    raise error


def explain_drift(job: Job, moment: str, names: Sequence[str], details: dict[int, list[int]]) -> str:
    """Name the parameter and the ranks outside the majority: without one, nothing says whose value is right."""
    for index, name in enumerate(names):
        values = [details[rank][index] for rank in range(job.world_size)]
        if len(set(values)) > 1:
            return (
                f"replicas have diverged at {moment}: '{name}' {_whose(job, values)}. It was changed outside the "
                "exchange: by state loaded on one rank only, by an update that depends on the rank, or by a fault of "
                "that machine. Nothing of it has been saved: continue from the last checkpoint (divergence_check_steps)"
            )
    return f"replicas have diverged at {moment}"


def _whose(job: Job, values: Sequence[int]) -> str:
    if changed := _outside_majority(values):
        named = ", ".join(map(job.cluster.describe, changed))
        return f"of {named} differs from that of the other {len(values) - len(changed)} ranks, which agree"
    if len(values) == 2:
        both = " and ".join(map(job.cluster.describe, range(2)))
        return f"differs between {both}: one of the two was changed, and which one cannot be told"
    groups = [[rank for rank, value in enumerate(values) if value == other] for other in dict.fromkeys(values)]
    named = ", ".join(f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}" for ranks in groups[:_NAMED_GROUPS])
    return (
        f"has {len(groups)} different values, and none of them on more than half of the {len(values)} ranks, so that "
        f"the changed ones cannot be told ({named}{', ...' if len(groups) > _NAMED_GROUPS else ''})"
    )


def _outside_majority(values: Sequence[Any]) -> list[int]:
    """The ranks whose value is not that of more than half of all; empty if there is no such value."""
    usual, number = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if value != usual] if 2 * number > len(values) else []


def _listed(ranks: Sequence[int]) -> str:
    return "+".join(map(str, ranks[:_NAMED_GROUPS])) + ("+..." if len(ranks) > _NAMED_GROUPS else "")


# Two equal gradients in a row; of a tensor, at most this many values are compared.
_COMPARED_UPDATES = 2
_MOST_VALUES = 1 << 16


class FirstGradients:
    """A digest of this rank's own gradients in a program's first updates, for its next step barrier.

    Ranks with the same parameters whose gradients are equal, bit by bit, have read the same samples. Gradients without
    a value other than zero are not counted.
    """

    def __init__(self, device: HostDevice, buckets: int) -> None:
        self._device = device
        self._buckets = buckets
        self._update: list[Any] = []
        self._copies: list[HostCopy] = []
        self._seen_in = 0
        self._is_reported = False

    def see(self, gradients: Sequence[Any], step: int) -> None:
        """The local gradients of the next bucket of an update, in ``step``. The host reads nothing."""
        if len(self._copies) == _COMPARED_UPDATES or self._is_reported:
            return
        self._seen_in = step
        self._update.append(device_digests([_compared(gradient) for gradient in gradients]))
        if len(self._update) == self._buckets:
            self._copies.append(self._device.to_host(paddle.concat(self._update)))
            self._update = []

    def digest(self, step: int) -> int | None:
        """The digest, once, in a ``step`` after the last of these updates, whose copies have ended; else None."""
        if len(self._copies) < _COMPARED_UPDATES or self._is_reported or step <= self._seen_in:
            return None
        self._is_reported = True
        updates, self._copies = [copy.read() for copy in self._copies], []
        return zlib.crc32(np.concatenate(updates).tobytes()) if all(update.any() for update in updates) else None


def _compared(gradient: Any) -> Any:
    """The first values in one form for all dtypes, with zero for -0.0 and for values that are not finite."""
    values = gradient.reshape([-1])[:_MOST_VALUES].cast("float32")
    return paddle.where(paddle.isfinite(values), values, paddle.zeros_like(values)) + 0.0
