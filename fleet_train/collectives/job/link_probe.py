"""Time allreduces between nodes and inside a node, on the process groups that training uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.engines.stages import Collective, Stage, Stages
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.process_groups import new_group
from fleet_train.collectives.paddle_compat.modes import dynamic_mode
from fleet_train.plan.price.measure import MEASURED_BYTES, MeasuredLink, Sample, coarse, fit
from fleet_train.plan.price.predict import Link

_SMALL_BYTES, _SCALE_BYTES = 4096, 256 * 1024
_LARGE_BYTES = (4 * 2**20, 2 * 2**20, 2**20, 2**19)
_GLANCE_SECONDS = 0.25
_MOST_REPEATS = 50
_FEWEST_REPEATS = 3


@dataclass(frozen=True)
class _Sweep:
    """One kind of link: its display name, the groups measured at the same time, and this rank's group."""

    where: str
    groups: Sequence[Sequence[int]]
    own: Any

    @property
    def largest(self) -> Sequence[int]:
        return max(self.groups, key=len)


def probe(job: Job, seconds: float, say: Callable[[str], None]) -> dict[str, MeasuredLink]:
    """Latency and bandwidth ``between nodes`` and ``inside a node``, where the cluster has both; takes about
    ``seconds``.

    All ranks call it; all get the slowest rank's numbers. ``say`` gets the progress messages.
    """
    nodes = [job.cluster.ranks_on_node(node) for node in range(job.cluster.node_num)]
    sweeps = [_sweep(job, "between nodes", [[ranks[0] for ranks in nodes]]), _sweep(job, "inside a node", nodes)]
    sweeps = [sweep for sweep in sweeps if len(sweep.largest) > 1]
    return {sweep.where: fit(_measure(job, sweep, seconds / len(sweeps), say), len(sweep.largest)) for sweep in sweeps}


def glance(job: Job) -> Link:
    """The link of a ring over all ranks, from a fraction of a second of allreduces, rounded to a grid (`coarse`). All
    ranks call it; all get the slowest rank's result."""
    group = job.communicators(1)[0]
    sweep = _Sweep("the ranks", [range(job.world_size)], group)
    _timed_best(job, sweep, _SMALL_BYTES, 1)
    small = _slowest(job, sweep, _timed_best(job, sweep, _SMALL_BYTES, 8))
    scale = _slowest(job, sweep, _timed_best(job, sweep, _SCALE_BYTES, 2))
    large = next((n for n in _LARGE_BYTES if 3 * scale * n / _SCALE_BYTES < _GLANCE_SECONDS), _SCALE_BYTES)
    seconds = _slowest(job, sweep, _timed_best(job, sweep, large, 3)) if large > _SCALE_BYTES else scale
    samples = [Sample(_SMALL_BYTES, small), Sample(large, max(seconds, small))]
    return coarse(fit(samples, job.world_size).link)


def _sweep(job: Job, where: str, groups: Sequence[Sequence[int]]) -> _Sweep:
    # Every rank must create every group, in the same order.
    made = [(ranks, new_group(job, ranks)) for ranks in groups if len(ranks) > 1]
    return _Sweep(where, groups, next((group for ranks, group in made if job.cluster.rank in ranks), None))


def _measure(job: Job, sweep: _Sweep, seconds: float, say: Callable[[str], None]) -> list[Sample]:
    budget = seconds / len(MEASURED_BYTES)
    samples: list[Sample] = []
    for nbytes in MEASURED_BYTES:
        first = _slowest(job, sweep, _timed(job, sweep, nbytes, 2))
        if first > 2 * budget and len(samples) > 1:
            say(f"{sweep.where}: {nbytes // 1024} KiB and more would exceed the given time; skipped")
            break
        repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(budget / first)))
        median = _slowest(job, sweep, _timed(job, sweep, nbytes, repeats))
        samples.append(Sample(nbytes, median))
        say(f"{sweep.where}: {nbytes // 1024} KiB in {median * 1e3:.3f} ms (median of {repeats})")
    return samples


def _timed(job: Job, sweep: _Sweep, nbytes: int, repeats: int) -> float:
    """Median seconds of an allreduce on this rank; 0 on a rank in no group. All ranks start together."""
    times = _times(job, sweep, nbytes, repeats)
    return statistics.median(times) if times else 0.0


def _timed_best(job: Job, sweep: _Sweep, nbytes: int, repeats: int) -> float:
    """The shortest of several in a row, without the first one, which runs on an idle link."""
    times = _times(job, sweep, nbytes, repeats)
    return min(times[1:] or times)


def _times(job: Job, sweep: _Sweep, nbytes: int, repeats: int) -> list[float]:
    name = f"probe {job.count('probe')}"
    with dynamic_mode():
        buffer = paddle.zeros([nbytes // 4], "float32")
        job.barrier(name)
        times: list[float] = []
        if sweep.own is None:
            return times
        place = Place(name, f"measuring {sweep.where}", job.timeout_seconds)
        for _ in range(repeats):
            start = time.perf_counter()
            job.engine.run_here(_one_sum(sweep.own, buffer), place)
            job.engine.device.moment().await_passed()
            times.append(time.perf_counter() - start)
    return times


def _one_sum(group: Any, buffer: Any) -> Stages[None]:
    yield Stage((Collective("all_reduce", group, buffer),))


def _slowest(job: Job, sweep: _Sweep, seconds: float) -> float:
    """The time of the largest group; smaller ones have fewer rounds. Also the barrier before the next size."""
    everybody = job.all_gather(f"probed {job.count('probed')}", seconds)
    return max(float(everybody[rank]) for rank in sweep.largest)
