"""What a rank sends at step barriers, and what it derives from the answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import StepAnswer, StepNote
from fleet_train.collectives.averaging import Held
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Passed
from fleet_train.collectives.step_notes import StepClock, StepNotes
from tests.unit.collectives.one_of_two import OneOfTwo, exchange_of, one_of_two


@dataclass
class Now:
    """A moment of a clock that is put forward by hand."""

    at: float

    def has_passed(self) -> bool:
        return True

    def await_passed(self) -> None:
        """It has passed."""

    def seconds_since(self, earlier: Now) -> float:
        return self.at - earlier.at


@dataclass
class Told:
    """A rank of two, with its clock and what the store says of both."""

    seconds: float = 0.0
    asked: list[int] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = StepClock(lambda: Now(self.seconds))
        self.notes = StepNotes(Cluster.imagined(2, 1), self.clock, self.up_to)

    def up_to(self, barrier: int) -> dict[int, list[float]]:
        self.asked.append(barrier)
        return self.times

    def step(self, busy: float, exposed: float = 0.0) -> None:
        self.clock.begin_step()
        self.seconds += busy
        with self.clock.exposed():
            self.seconds += exposed
        self.clock.end_step()


def test_a_note_is_what_was_done_since_the_last_one() -> None:
    rank = Told()
    rank.step(0.25, exposed=1.0)
    rank.step(0.5)
    rank.clock.add_barrier(0.125)
    assert rank.notes.own() == StepNote(2, 750.0, 125.0, None)
    assert rank.notes.own() == StepNote(0, 0.0, 0.0, None)
    rank.step(0.001234567)
    assert rank.notes.own() == StepNote(1, 1.23, 0.0, None)


def test_the_first_reason_for_a_stop_counts_once_all_ranks_know_it() -> None:
    rank = Told()
    rank.notes.request_stop("the machine is needed")
    rank.notes.request_stop("not heard")
    assert rank.notes.stop is None
    assert rank.notes.own().stop == "the machine is needed"
    rank.notes.read_answer(StepAnswer(1.0, (1, "a signal"), 1))
    rank.notes.read_answer(StepAnswer(1.0, (0, "the machine is needed"), 2))
    assert rank.notes.stop == f"{Cluster.imagined(2, 1).describe(1)}: a signal"


def test_one_process_alone_stops_at_once() -> None:
    notes = StepNotes(Cluster.imagined(1, 1), StepClock(lambda: Now(0.0)), lambda _: {})
    notes.request_stop("enough")
    notes.request_stop("not heard")
    assert notes.stop == f"{Cluster.imagined(1, 1).describe(0)}: enough"


def test_the_longest_step_is_unknown_until_every_rank_has_reported_one() -> None:
    rank = Told()
    assert rank.notes.slowest_step_ms == math.inf
    rank.notes.read_answer(StepAnswer(12.5, None, 1))
    assert rank.notes.slowest_step_ms == 12.5
    rank.notes.read_answer(StepAnswer(None, None, 2))
    assert rank.notes.slowest_step_ms == math.inf


def test_a_reading_has_every_ranks_times_per_step_since_the_last_reading() -> None:
    rank = Told()
    for _ in range(4):
        rank.step(0.5, exposed=0.25)
    rank.clock.add_barrier(0.5)
    rank.clock.add_sent(1000.0)
    rank.notes.read_answer(StepAnswer(500.0, None, 7))
    rank.notes.read_answer(StepAnswer(500.0, None, 6))  # of another program's barrier, taken in later
    rank.times = {0: [4, 2000.0, 500.0], 1: [4, 400.0, 3600.0]}
    read = rank.notes.read(5)
    assert (read.steps, read.exposed_ms, read.gate_wait_ms, read.bytes_sent) == (4, 250.0, 125.0, 250.0)
    assert (read.local_sgd_period, read.rank_step_ms, read.rank_wait_ms) == (5, [500.0, 100.0], [125.0, 900.0])
    assert rank.asked == [7]
    rank.times = {0: [6, 2600.0, 520.0], 1: [6, 500.0, 3700.0]}
    read = rank.notes.read(1)
    assert (read.steps, read.exposed_ms, read.bytes_sent) == (0, 0.0, 0.0)
    assert (read.rank_step_ms, read.rank_wait_ms) == ([300.0, 50.0], [10.0, 50.0])


def test_a_reading_before_any_barrier_sends_nothing() -> None:
    rank = Told()
    rank.step(0.5)
    read = rank.notes.read(1)
    assert (read.steps, read.rank_step_ms, read.rank_wait_ms) == (1, [0.0, 0.0], [0.0, 0.0])
    assert rank.asked == []


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    with one_of_two(monkeypatch) as made:
        yield made


def local_step(exchange: GradientExchange, held: Held) -> None:
    exchange.launch(0, [paddle.ones([4])])
    exchange.wait(0)
    exchange.finish(held, ["p0"], None)


def ask_at(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, barrier: str) -> None:
    """Let rank 1 ask for a stop at that step barrier, and at no other."""
    real = job.step_barrier

    def step_barrier(name: str, timeout_seconds: float, note: StepNote | None = None) -> Passed:
        passed = real(name, timeout_seconds, note)
        stop = (1, "a signal") if name == barrier else None
        return Passed(passed.answer._replace(stop=stop), 0.25)

    monkeypatch.setattr(job, "step_barrier", step_barrier)


@pytest.mark.parametrize("overlap_steps", [0, 1, 2])
def test_a_stop_requested_at_an_averaging_takes_effect_when_the_average_is_applied(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, overlap_steps: int
) -> None:
    ask_at(job, monkeypatch, "averaging after step 3 0")
    settings = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 3}
    exchange = exchange_of(job, [(4,)], divergence_check_steps=0, local_sgd_overlap_steps=overlap_steps, **settings)
    held, known = Held([paddle.ones([4])], [], []), []
    for _ in range(6):
        local_step(exchange, held)
        known.append(job.notes.stop is not None)
    assert known == [step >= 3 + overlap_steps for step in range(1, 7)]
    assert job.clock.read().barrier_seconds == pytest.approx(0.25 * (1 if overlap_steps else 2))


def test_a_stop_takes_effect_though_the_averaging_is_dropped(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_at(job, monkeypatch, "averaging after step 2 0")
    settings = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2}
    exchange = exchange_of(job, [(4,)], divergence_check_steps=0, local_sgd_overlap_steps=1, **settings)
    held = Held([paddle.ones([4])], [], [])
    local_step(exchange, held)
    local_step(exchange, held)
    assert job.notes.stop is None
    exchange.drop_averaging()
    assert job.notes.stop == f"{job.cluster.describe(1)}: a signal"
