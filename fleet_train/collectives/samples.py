"""Do the ranks read the same samples? Seen in what they are fed, and in the gradients of a program's first updates.

Of each sample that a rank is fed, a number is made; those below a bound, which falls as they become more, are kept, so
that any two ranks keep the same part of what both have read (a bottom-k sketch). Before runs 2, 4, 8, ... rank 0 puts
its own into the store, and a run later the others compare: nobody waits for anybody. Ranks that go through the same
samples, in whatever order, have most of them in common before they have begun again; ranks with samples of their own
have next to none. Samples that come again soon (a few kinds of sample, draws with replacement, constants) say nothing.
The rows of the largest array are the samples; where other rows are a rank's own, those may be noise that all share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_train.collectives.job import Job
from fleet_train.collectives.replica_check import FirstGradients

Numbers = NDArray[np.uint64]
Read = tuple[int, list[int]]
"""A bound, and the numbers of the samples below it."""

_LAST_RUN = 1 << 13
_MOST_KEPT = 256
_LEAST_SAMPLES, _LEAST_ONCE, _LEAST_COMMON = 32, 0.9, 0.5
_MOST_COLUMNS = 32
_SAMPLES = ""
_EVERYTHING = (1 << 64) - 1
_ADVICE = (
    "share them: fleet_train.data.ShardedBatchSampler, paddle.io.DistributedBatchSampler, fleet.split_files, or a seed "
    "with fleet.worker_index() (docs/data.md)"
)
_GRADIENTS = f"all ranks computed the same gradient twice in a row: they read the same samples; {_ADVICE}"
_FED = f"all ranks were fed the same samples, in the same order or another one; {_ADVICE}"


class SamplesCheck:
    """What one program's rank has read, and what its next step barrier compares of it. All ranks call `fed` before each
    run of the program."""

    def __init__(self, job: Job, number: int, buckets: int) -> None:
        self._job, self._key = job, f"samples of program {number}, {job.count('samples')}"
        self.first_gradients = FirstGradients(job.engine.device, buckets)
        self._runs = 0
        self._sketches: dict[str, Sketch] = {}
        """What was read, by name: the rows of the largest array under `_SAMPLES`, and other rows."""
        self._to_compare: tuple[int, dict[str, Read]] | None = None
        """A run, and what was read up to it; empty if that of `_SAMPLES` says nothing."""
        self._has_rows_of_its_own = False
        self._reads_those_of_rank_0 = False
        self._is_over = False
        self._words = _GRADIENTS

    def fed(self, feed: Any) -> None:
        """Note what the next run is fed, as `Executor.run` takes it."""
        if self._is_over or self._runs > 2 * _LAST_RUN:
            return
        self._compare()
        self._runs += 1
        for name, numbers in numbers_of(feed).items():
            self._sketches.setdefault(name, Sketch()).keep(numbers)
        if self._runs > 1 and self._runs & (self._runs - 1) == 0:
            self._to_compare = self._runs, self._read()
            if self._job.cluster.rank == 0:
                self._job.store.set(self._key, list(self._to_compare))

    def digest(self, step: int) -> int | None:
        """What all ranks must give in one barrier to have read the same samples; None for nothing."""
        if self._reads_those_of_rank_0:
            self._reads_those_of_rank_0, self._words = False, _FED
            return 1
        return self.first_gradients.digest(step)

    def found(self) -> str:
        """Called when all ranks have given the same digest; the words for that. Nothing more is compared."""
        self._is_over = True
        return self._words

    def _read(self) -> dict[str, Read]:
        found = {name: read for name, each in self._sketches.items() if (read := each.read()) is not None}
        is_early = any(2 * each.runs > self._runs and each.is_small for each in self._sketches.values())
        return found if _SAMPLES in found and not is_early else {}

    def _compare(self) -> None:
        """Compare with what rank 0 has read, once, as soon as rank 0 has come as far: where a step has communicated in
        between, that is so."""
        if self._to_compare is None:
            return
        run, own = self._to_compare
        is_settled = not own or self._job.cluster.rank == 0
        answer: Any = [run, own] if is_settled else self._job.store.get(self._key)
        if answer is None or answer[0] != run:
            return
        self._to_compare, self._is_over = None, run >= _LAST_RUN
        if own and answer[1]:
            both = own.keys() & answer[1].keys()
            differing = {name for name in both if common(own[name], answer[1][name]) < _LEAST_COMMON}
            self._has_rows_of_its_own |= not differing <= {_SAMPLES}
            self._reads_those_of_rank_0 = not differing and not self._has_rows_of_its_own


class Sketch:
    """Numbers below a bound, and how often each was read."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}
        self._bound = _EVERYTHING
        self.runs = 0
        """The number of runs in which something was read."""

    @property
    def is_small(self) -> bool:
        """Whether too little was read to tell anything."""
        return sum(self._kept.values()) < _LEAST_SAMPLES

    def keep(self, numbers: Numbers) -> None:
        """Keep numbers of samples that were read."""
        self.runs += 1
        for number in numbers[numbers <= self._bound].tolist():
            self._kept[number] = self._kept.get(number, 0) + 1
        while len(self._kept) > _MOST_KEPT:
            self._bound //= 2
            self._kept = {number: times for number, times in self._kept.items() if number <= self._bound}

    def read(self) -> Read | None:
        """What was read; None if that is little, or if much of it came again."""
        once = len(self._kept) / max(sum(self._kept.values()), 1)
        is_telling = len(self._kept) >= _LEAST_SAMPLES and once >= _LEAST_ONCE
        return (self._bound, list(self._kept)) if is_telling else None


def common(own: Read, other: Read) -> float:
    """The part (0 to 1) of what a rank has read that another one has read, too."""
    bound = min(own[0], other[0])
    mine = {number for number in own[1] if number <= bound}
    return len(mine & set(other[1])) / len(mine) if len(mine) >= _LEAST_SAMPLES // 2 else 0.0


def numbers_of(feed: Any) -> dict[str, Numbers]:
    """A number for each sample of a feed, by `_SAMPLES`: of its rows in all arrays that have as many as the largest
    one; likewise for those with other numbers of rows, by their names. Empty if nothing with rows is in the host's
    memory."""
    given = feed[0] if isinstance(feed, list | tuple) and len(feed) == 1 else feed
    if not isinstance(given, Mapping):
        return {}
    arrays = {name: array for name in sorted(given) if (array := array_of(given[name])) is not None and array.ndim}
    arrays = {name: array for name, array in arrays.items() if array.dtype.kind in "biuf" and array.itemsize <= 8}
    by_rows: dict[int, list[str]] = {}
    for name, array in arrays.items():
        by_rows.setdefault(array.shape[0], []).append(name)
    most = max(arrays.values(), key=lambda array: array.size).shape[0] if arrays else 0
    return {
        _SAMPLES if rows == most else ",".join(names): _mixed(
            [arrays[name] for name in names if arrays[name].size], rows
        )
        for rows, names in by_rows.items()
        if rows == most or rows > 1
    }


def array_of(value: Any) -> NDArray[Any] | None:
    """What was fed, if it is in the host's memory and has one shape."""
    if isinstance(value, np.ndarray):
        return value
    place = value.place if isinstance(value, paddle.Tensor) else getattr(value, "_place", lambda: None)()
    return np.asarray(value) if place is not None and place.is_cpu_place() else None


def _mixed(arrays: Sequence[NDArray[Any]], rows: int) -> Numbers:
    total = np.zeros(rows, np.uint64)
    for array in arrays:
        flat = array.reshape(rows, -1)
        flat = flat[:, :: -(-flat.shape[1] // _MOST_COLUMNS)]
        bits = np.ascontiguousarray(flat).view(f"u{array.itemsize}").astype(np.uint64)
        total = _scattered(total + bits @ _FACTORS[: bits.shape[1]])
    return total


def _scattered(values: Numbers) -> Numbers:
    """Numbers scattered over all 64 bits, by the last step of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = values ^ (values >> np.uint64(31))
    return mixed


_FACTORS: Numbers = np.random.default_rng(0).integers(1, 1 << 63, _MOST_COLUMNS, np.uint64) * np.uint64(2) + np.uint64(
    1
)
