"""Comparisons of the ranks: do they still hold the same parameters, and do they read different samples?"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engines.device import Device, HostCopy
from fleet_train.collectives.job.job import Job
from fleet_train.errors import ScheduleMismatch


def digests(tensors: Sequence[Any]) -> list[int]:
    """CRC-32 of each tensor's bytes (eager tensors). About 1 GB/s on one core."""
    return [zlib.crc32(np.ascontiguousarray(np.asarray(tensor.numpy())).data) for tensor in tensors]


def device_digests(tensors: Sequence[Any]) -> Any:
    """A number for each tensor's bits, int64 [tensors], made on the device: the host reads nothing.

    The sum over elements of bits * (2 * index + 1) modulo 2**64: exact, so the order of adding does not matter, and
    every change of one element changes it.
    """
    return paddle.stack([_weighted_sum(_bits(tensor)) for tensor in tensors])


def _bits(tensor: Any) -> Any:
    """The elements' bits as int64, flat."""
    if tensor.dtype == paddle.bool:
        return tensor.reshape([-1]).cast("int64")
    integers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
    return paddle.view(tensor.reshape([-1]), integers[tensor.element_size()]).cast("int64")


def _weighted_sum(bits: Any) -> Any:
    return (bits * (2 * paddle.arange(bits.shape[0], dtype="int64") + 1)).sum()


@dataclass(frozen=True)
class Look:
    """One rank's digests, on their way to the host."""

    moment: str
    names: Sequence[str]
    digests: HostCopy


def look(device: Device, moment: str, names: Sequence[str], tensors: Sequence[Any]) -> Look:
    """Start a comparison that ``compare_looks`` ends a step later."""
    return Look(moment, names, device.to_host(device_digests(tensors)))


def compare_looks(job: Job, taken: Look) -> None:
    """As ``compare``, with digests taken before; all ranks call it."""
    _compare(job, taken.moment, taken.names, [int(one) for one in taken.digests.read()])


def compare(job: Job, moment: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raise ScheduleMismatch naming the first parameter and rank that differ from the majority; all ranks call it."""
    _compare(job, moment, names, digests(tensors))


def _compare(job: Job, moment: str, names: Sequence[str], mine: list[int]) -> None:
    whole = zlib.crc32(np.asarray(mine, np.int64).tobytes())
    if not job.compare(f"digest at {moment}", whole):
        return
    details = job.all_gather(f"digests at {moment}", mine)
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
                f"replicas have diverged at {moment}: parameter '{name}' of {ranks} differs from the other "
                "ranks'. It was changed outside the exchange: by state loaded on one rank only, or by an update that "
                "depends on the rank (divergence_check_steps)"
            )
    return f"replicas have diverged at {moment}"


# Two equal gradients in a row; of a tensor, at most this many values are compared.
_COMPARED_UPDATES = 2
_MOST_VALUES = 1 << 16


class FirstGradients:
    """A digest of this rank's own gradients in a program's first updates, for its next step barrier.

    Ranks with the same parameters whose gradients are equal, bit by bit, have read the same samples. Gradients without
    a value other than zero are not counted.
    """

    def __init__(self, device: Device, buckets: int) -> None:
        self._device = device
        self._buckets = buckets
        self._update: list[Any] = []
        self._taken: list[HostCopy] = []
        self._seen_in = 0
        self._is_told = False

    def see(self, gradients: Sequence[Any], step: int) -> None:
        """The local gradients of the next bucket of an update, in ``step``. The host reads nothing."""
        if len(self._taken) == _COMPARED_UPDATES or self._is_told:
            return
        self._seen_in = step
        self._update.append(device_digests([_compared(gradient) for gradient in gradients]))
        if len(self._update) == self._buckets:
            self._taken.append(self._device.to_host(paddle.concat(self._update)))
            self._update = []

    def tell(self, step: int) -> int | None:
        """The digest, once, in a ``step`` after the last of these updates, whose copies have ended; else None."""
        if len(self._taken) < _COMPARED_UPDATES or self._is_told or step <= self._seen_in:
            return None
        self._is_told = True
        found, self._taken = [copy.read() for copy in self._taken], []
        return zlib.crc32(np.concatenate(found).tobytes()) if all(one.any() for one in found) else None


def _compared(gradient: Any) -> Any:
    """The first values in one form for all dtypes, with zero for -0.0 and for values that are not finite."""
    values = gradient.reshape([-1])[:_MOST_VALUES].cast("float32")
    return paddle.where(paddle.isfinite(values), values, paddle.zeros_like(values)) + 0.0
