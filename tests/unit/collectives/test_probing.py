"""Timing allreduces: groups, sizes, repeats, and what is made of the times. The clock is simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import join
from fleet_train.collectives.join import glance, probe
from fleet_train.plan.choose import coarse
from fleet_train.plan.price import Link
from tests.unit.collectives.recorded import Group

LATENCY, BYTES_PER_SECOND = 1e-4, 1e8
KIB = 1024


class Clock:
    """Time goes on where an allreduce is carried out."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Probed:
    """A job whose allreduces take what a link of this latency and bandwidth needs, by a ring of two."""

    timeout_seconds = 60.0

    def __init__(self, clock: Clock, nodes: int, per_node: int, rank: int = 0) -> None:
        self.cluster = Cluster(Cluster.imagined(nodes, per_node).ranks, rank)
        self.world_size = nodes * per_node
        self.engine = SimpleNamespace(run_here=self._run, device=SimpleNamespace(moment=self._moment))
        self.clock = clock
        self.timed: list[tuple[str, int]] = []
        """Where, and bytes, of each allreduce."""
        self.formed: list[tuple[int, ...]] = []
        self.met: list[str] = []
        self.slower = 0.0
        """By how many seconds another rank is slower than this one."""
        self.wakes_up = 0.0
        """By how many seconds the first allreduce of each row is slower."""
        self.rested = 1.0
        """What share of its time the first one takes otherwise: a cloud's link has saved up credit for it."""
        self._numbers: dict[str, itertools.count[int]] = {}
        self._row = ""
        self._underway = 0.0

    def count(self, name: str) -> int:
        return next(self._numbers.setdefault(name, itertools.count()))

    def barrier(self, name: str) -> None:
        self.met.append(name)

    def communicators(self, number: int) -> list[Group]:
        return [Group(index, range(self.world_size)) for index in range(number)]

    def all_gather(self, name: str, value: Any) -> dict[int, Any]:
        self.met.append(name)
        value = value or 0.1  # of the others, where this one takes no part
        return dict.fromkeys(range(self.world_size), value) | {self.world_size - 1: value + self.slower}

    def _run(self, stages: Any, place: Any) -> None:
        (stage,) = list(stages)
        (collective,) = stage.collectives
        nbytes = 4 * collective.tensor.size
        assert (collective.kind, collective.tensor.dtype) == ("all_reduce", paddle.float32)
        self.timed.append((place.what.removeprefix("measuring "), nbytes))
        seconds = 2 * LATENCY + nbytes / BYTES_PER_SECOND
        if place.moment != self._row:
            seconds = self.rested * seconds + self.wakes_up
        self._underway = seconds
        self._row = place.moment

    def _moment(self) -> Any:
        return SimpleNamespace(await_passed=self._end)

    def _end(self) -> None:
        """On a GPU the call returns at once: it is the device that takes the time."""
        self.clock.now += self._underway
        self._underway = 0.0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Probed]:
    clock = Clock()
    monkeypatch.setattr(join, "time", clock)

    def new_group(job: Probed, ranks: Any) -> Group:
        job.formed.append(tuple(ranks))
        return Group(len(job.formed), tuple(ranks))

    monkeypatch.setattr(join, "new_group", new_group)
    return lambda *arguments, **options: Probed(clock, *arguments, **options)


def test_link_of_two_nodes_is_found_again(make: Callable[..., Probed]) -> None:
    job = make(2, 1)
    said: list[str] = []
    found = probe(job, 60.0, said.append)  # type: ignore[arg-type]
    assert list(found) == ["between nodes"]
    measured = found["between nodes"]
    assert measured.link.latency_seconds == pytest.approx(LATENCY)
    assert measured.link.bytes_per_second == pytest.approx(BYTES_PER_SECOND)
    assert [sample.nbytes / KIB for sample in measured.samples] == [4, 16, 64, 256, 1024, 4096, 16384]
    assert job.formed == [(0, 1)]
    assert said[0] == "between nodes: 4 KiB in 0.241 ms (median of 50)"
    assert job.met == [name for i in range(14) for name in (f"probe {i}", f"probed {i}")]


def test_sizes_are_repeated_as_often_as_their_share_of_the_time_allows(make: Callable[..., Probed]) -> None:
    """7 s over 7 sizes: 1 s each. 16 MiB take 0.168 s: twice to begin with, and then 5 times; small ones 50 times."""
    job = make(2, 1)
    probe(job, 7.0, lambda _: None)  # type: ignore[arg-type]
    times = {nbytes: [one for _, one in job.timed].count(nbytes) for _, nbytes in job.timed}
    assert list(times.values()) == [52, 52, 52, 52, 52, 25, 7]


def test_sizes_that_take_too_long_are_left_out_but_for_the_first_two(make: Callable[..., Probed]) -> None:
    job = make(2, 1)
    said: list[str] = []
    found = probe(job, 7 * 0.001, said.append)  # type: ignore[arg-type]
    # 1 ms each: 256 KiB take 2.8 ms.
    assert [sample.nbytes / KIB for sample in found["between nodes"].samples] == [4, 16, 64]
    assert said[-1] == "between nodes: 256 KiB and more would exceed the given time; skipped"
    assert [one for _, one in job.timed].count(64 * KIB) == 2 + 3
    found = probe(job, 1e-9, said.append)  # type: ignore[arg-type]
    assert [sample.nbytes / KIB for sample in found["between nodes"].samples] == [4, 16]


def test_nodes_are_linked_by_their_first_ranks_and_measured_inside_at_the_same_time(
    make: Callable[..., Probed],
) -> None:
    job = make(2, 2, rank=3)
    found = probe(job, 14.0, lambda _: None)  # type: ignore[arg-type]
    assert list(found) == ["between nodes", "inside a node"]
    assert job.formed == [(0, 2), (0, 1), (2, 3)]
    assert {where for where, _ in job.timed} == {"inside a node"}  # this rank is no first one
    assert [found[where].group_size for where in found] == [2, 2]
    # Half of 14 s for each of two: as often as with 7 s for one.
    assert [one for _, one in job.timed].count(16384 * KIB) == 7


def test_one_node_has_nothing_between(make: Callable[..., Probed]) -> None:
    assert list(probe(make(1, 2), 7.0, lambda _: None)) == ["inside a node"]  # type: ignore[arg-type]


def test_slowest_rank_is_the_one_that_counts(make: Callable[..., Probed]) -> None:
    job = make(2, 1)
    job.slower = 0.05
    found = probe(job, 60.0, lambda _: None)  # type: ignore[arg-type]
    assert found["between nodes"].samples[0].seconds == pytest.approx(0.05 + 2 * LATENCY + 4 * KIB / BYTES_PER_SECOND)


def test_a_glance_finds_the_link_on_its_grid_whatever_the_first_of_a_row_takes(make: Callable[..., Probed]) -> None:
    job = make(2, 1)
    job.wakes_up = 0.04
    assert glance(job) == coarse(Link(LATENCY, BYTES_PER_SECOND))  # type: ignore[arg-type]
    assert job.formed == []
    # 256 KiB in 2.8 ms: three of 4 MiB would take 0.135 s, which is within a quarter of a second.
    assert [nbytes / KIB for _, nbytes in job.timed] == [4] * 9 + [256] * 2 + [4096] * 3


@pytest.mark.parametrize(("slower", "largest"), [(0.0, 4096), (0.004, 2048), (0.012, 1024), (0.03, 512), (0.05, 256)])
def test_a_glance_at_a_slow_link_is_content_with_less(make: Callable[..., Probed], slower: float, largest: int) -> None:
    """Three of 4 MiB take 48 times what 256 KiB take, of 2 MiB 24 times, ..: within 0.25 s."""
    for rested in (1.0, 0.1):
        job = make(2, 1)
        job.slower, job.rested = slower, rested
        glance(job)  # type: ignore[arg-type]
        assert [nbytes / KIB for _, nbytes in job.timed][11:] == ([largest] * 3 if largest > 256 else [])
