"""Steps of a job: their clock, their barriers and the notes that are sent there, and which runs end an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import StepAnswer, StepNote
from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Passed
from fleet_train.collectives.step_notes import StepClock, StepNotes
from fleet_train.collectives.training import Boundaries
from fleet_train.errors import ConversionError
from tests.support.late import LateDevice
from tests.unit.collectives.played import OneOfTwo, exchange_of


@dataclass
class Stream:
    """A calculation stream: the host puts moments on it, the device passes them later, at the times it is given."""

    passed: list[float] = field(default_factory=list)
    asked: int = 0

    def moment(self) -> LateMoment:
        self.asked += 1
        return LateMoment(self, self.asked - 1)

    def work(self, *times: float) -> None:
        """The next moments pass at these times."""
        self.passed.extend(times)
        assert len(self.passed) <= self.asked, "the device is ahead of the host"


@dataclass
class LateMoment:
    stream: Stream
    number: int

    def has_passed(self) -> bool:
        return self.number < len(self.stream.passed)

    def await_passed(self) -> None:
        assert self.has_passed(), "nobody may wait for the device here"

    def seconds_since(self, earlier: LateMoment) -> float:
        assert self.has_passed(), "a moment was read before it has passed"
        assert earlier.has_passed(), "a moment was read before it has passed"
        return self.stream.passed[self.number] - self.stream.passed[earlier.number]


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def clock(stream: Stream) -> StepClock:
    return StepClock(stream.moment)


def pass_step(clock: StepClock, waits: int = 1) -> None:
    """Asks for 2 moments per wait, and for one at the end of the step (the first step: one at its beginning)."""
    clock.begin_step()
    for _ in range(waits):
        with clock.exposed():
            pass
    clock.end_step()


@pytest.mark.parametrize(
    ("did", "told", "read"),
    [
        (
            [2, 2, (10.0, 11.0, 11.5, 12.0, 12.25, 14.0), (15.0, 15.0, 16.0, 18.0, 19.0), "tell", "read"],
            [(2, (4.0 - 0.75) + (5.0 - 2.0))],
            [(2, 0.75 + 2.0)],
        ),
        (
            ["step", "step", (0.0, 1.0, 2.0, 3.0), "tell", (3.5, 4.5), "tell", "step", (5.0,), "tell"],
            [(1, 2.0), (0, 0.0), (1, 1.0)],
            [],
        ),
        (
            ["step", "wait", "step", (0.0, 1.0, 1.0, 2.0), "read", (2.0, 6.0, 7.0, 7.5, 8.0), "read", "tell"],
            [(2, 2.0 + 1.5)],
            [(1, 0.0), (1, 4.0 + 0.5)],
        ),
        (
            ["step", (0.0, 1.0, 1.0, 2.0), "read", "step", (50.0, 51.0, 51.5, 52.0), "tell", "read"],
            [(2, 2.0 + 1.5)],
            [(1, 0.0), (1, 0.5)],
        ),
        (
            ["step", (0.0, 1.0, 1.0, 2.0), "wait", "read", (2.0, 6.0), "step", (7.0, 8.0, 8.5, 9.0), "read", "tell"],
            [(2, 2.0 + 1.5)],
            [(1, 0.0), (1, 4.5)],
        ),
    ],
    ids=[
        "busy is the step without its waits",
        "a host that is ahead counts a step later",
        "a wait behind the last bucket counts to the next step",
        "what the script does behind a reading belongs to no step",
        "a wait that it passes behind the reading",
    ],
)
def test_steps_and_waits_count_when_the_device_has_passed_them(
    stream: Stream, clock: StepClock, did: list[Any], told: list[Any], read: list[Any]
) -> None:
    """Steps with one wait or so many, other waits, and times at which moments are passed; then (steps, seconds)."""
    found_told, found_read = [], []
    for action in did:
        if isinstance(action, tuple):
            stream.work(*action)
        elif action == "wait":
            with clock.exposed():
                pass
        elif action == "tell":
            one = clock.read_unsent()
            found_told.append((one.steps, one.busy_seconds))
        elif action == "read":
            other = clock.read()
            found_read.append((other.steps, other.exposed_seconds))
        else:
            pass_step(clock, 1 if action == "step" else action)
    assert (found_told, found_read) == (told, read)


@dataclass
class Now:
    """A moment of a clock that is put forward by hand."""

    at: float

    def has_passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Now) -> float:
        return self.at - earlier.at


def test_a_reading_has_every_ranks_times_per_step_since_the_last_reading() -> None:
    seconds, asked, times = 0.0, list[int](), dict[int, list[float]]()
    clock = StepClock(lambda: Now(seconds))
    notes = StepNotes(Cluster.imagined(2, 1), clock, lambda barrier: (asked.append(barrier), times)[1])

    def step(exposed: float) -> None:
        nonlocal seconds
        clock.begin_step()
        seconds += 0.5
        with clock.exposed():
            seconds += exposed
        clock.end_step()

    step(0.0)
    before = notes.read(1)
    assert (before.steps, before.rank_step_ms, before.rank_wait_ms, asked) == (1, [0.0, 0.0], [0.0, 0.0], [])
    for _ in range(4):
        step(0.25)
    clock.add_barrier(0.5)
    clock.add_sent(1000.0)
    assert notes.slowest_step_ms == math.inf
    notes.read_answer(StepAnswer(500.0, None, 7))
    assert notes.slowest_step_ms == 500.0
    notes.read_answer(StepAnswer(None, None, 6))  # of another program's barrier, taken in later
    assert notes.slowest_step_ms == math.inf
    times = {0: [4, 2000.0, 500.0], 1: [4, 400.0, 3600.0]}
    read = notes.read(5)
    assert (read.steps, read.exposed_ms, read.gate_wait_ms, read.bytes_sent) == (4, 250.0, 125.0, 250.0)
    assert (read.local_sgd_period, read.rank_step_ms, read.rank_wait_ms) == (5, [500.0, 100.0], [125.0, 900.0])
    assert asked == [7]
    times = {0: [6, 2600.0, 520.0], 1: [6, 500.0, 3700.0]}
    read = notes.read(1)
    assert (read.steps, read.exposed_ms, read.bytes_sent) == (0, 0.0, 0.0)
    assert (read.rank_step_ms, read.rank_wait_ms) == ([300.0, 50.0], [10.0, 50.0])
    assert notes.own() == StepNote(5, 2500.0, 500.0, None)
    assert notes.own() == StepNote(0, 0.0, 0.0, None)


def local_step(exchange: GradientExchange, held: HeldValues) -> None:
    exchange.launch(0, [paddle.ones([4])])
    exchange.wait(0)
    exchange.finish(held, ["p0"], None)


LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "divergence_check_steps": 0}


@pytest.mark.parametrize(("overlap_steps", "is_dropped"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_stop_requested_at_an_averaging_takes_effect_when_the_average_is_applied_or_dropped(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, overlap_steps: int, is_dropped: bool
) -> None:
    """Rank 1 asks for it at that step barrier, and at no other."""
    real = job.step_barrier

    def step_barrier(name: str, timeout_seconds: float, note: StepNote | None = None) -> Passed:
        passed = real(name, timeout_seconds, note)
        stop = (1, "a signal") if name == "averaging after step 3 0" else None
        return Passed(passed.answer._replace(stop=stop), 0.25)

    monkeypatch.setattr(job, "step_barrier", step_barrier)
    exchange = exchange_of(job, [(4,)], local_sgd_steps=3, local_sgd_overlap_steps=overlap_steps, **LOCAL)
    held, known = HeldValues([paddle.ones([4])], [], []), []
    for _ in range(3 if is_dropped else 6):
        local_step(exchange, held)
        known.append(job.notes.stop is not None)
    if is_dropped:
        exchange.drop_averaging()
    else:
        assert job.clock.read().barrier_seconds == pytest.approx(0.25 * (1 if overlap_steps else 2))
    assert known == [step >= 3 + overlap_steps for step in range(1, len(known) + 1)]
    assert job.notes.stop == f"{job.cluster.describe(1)}: a signal"


SHAPES = [(3, 2), (5,)]
STEPS = 20


def run(exchange: GradientExchange, first: int = 1, last: int = STEPS, before: Callable[[int], None] = id) -> None:
    """Steps ``first`` .. ``last``; ``before`` is called between two steps with the number of the next one."""
    for step in range(first, last + 1):
        before(step)
        exchange.arrive()
        exchange.launch(0, [paddle.ones(shape, "float32") for shape in SHAPES])
        exchange.wait(0)


def at(*steps: int) -> list[str]:
    return [f"step {step}" for step in steps]


def test_steps_have_one_while_the_slowest_rank_is_slow(job: OneOfTwo) -> None:
    def told(step: int) -> None:
        job.slowest_ms = {4: 1500.0, 5: 1000.1, 6: None, 7: 1000.0}.get(step, job.slowest_ms)

    # 4 has none: what is told from then on is heard of at 5.
    run(exchange_of(job, SHAPES, barrier_every_steps=5), before=told)
    assert job.barriers == at(1, 2, 3, 5, 6, 7, 10, 15, 20)


def test_step_after_another_programs_steps_has_one(job: OneOfTwo) -> None:
    one, other = (exchange_of(job, SHAPES, barrier_every_steps=50) for _ in range(2))
    run(one, 1, 4)
    run(other, 1, 4)
    run(one, 5, 8)
    run(other, 5, 8)
    others = [f"step {step} of program 1" for step in (1, 2, 3, 5)]
    assert job.barriers == [*at(1, 2, 3), *others[:3], "step 5", others[3]]


def test_step_after_local_steps_of_another_program_has_one(job: OneOfTwo) -> None:
    """Nothing is sent in them, so nobody knows how far the ranks are apart."""
    one = exchange_of(job, SHAPES, barrier_every_steps=50)
    other = exchange_of(job, SHAPES, local_sgd_steps=10, **LOCAL)
    run(one, 1, 4)
    run(other, 1, 4)
    run(one, 5, 8)
    assert job.barriers == at(1, 2, 3, 5)


def test_a_loaded_position_continues_and_starts_with_three(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES, barrier_every_steps=5)
    exchange.step = 101
    run(exchange, 102, 112)
    assert job.barriers == at(102, 103, 104, 105, 110)


@dataclass
class Program:
    """A program that counts micro-batches, on a device whose values the host should read a run later only."""

    size: int
    reads_values: bool = False
    counted: int = 0

    def __post_init__(self) -> None:
        self.device = LateDevice()
        engine: Any = SimpleNamespace(reads_values=self.reads_values, device=self.device)
        self.boundaries = Boundaries(self.size, engine)

    def run(self) -> bool:
        self.counted = (self.counted + 1) % self.size
        ends = self.boundaries.ends_update(paddle.full([1], self.counted == 0, "bool"))
        self.device.step += 1
        return ends

    def runs(self, number: int) -> list[bool]:
        return [self.run() for _ in range(number)]


@pytest.mark.parametrize("reads_values", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("counted", range(3))
def test_every_run_is_what_the_program_has_counted(size: int, counted: int, reads_values: bool) -> None:
    program = Program(size, reads_values, counted % size)
    expected = [(program.counted + run) % size == 0 for run in range(1, 4 * size + 1)]
    assert program.runs(4 * size) == expected


def test_a_loaded_count_is_used_after_forgetting() -> None:
    program = Program(4)
    program.runs(6)
    program.counted = 3
    program.boundaries.forget()
    assert program.runs(9) == [True, False, False, False, True, False, False, False, True]
    assert program.device.early_reads == 4 + 1


@pytest.mark.parametrize(
    ("before", "counted", "wrong"), [(4, 0, 2), (4, 2, 1), (5, 0, 1), (5, 1, 1), (6, 1, 2), (6, 2, 1)]
)
def test_a_count_that_changes_between_two_steps_is_reported_a_run_after_the_first_mismatch(
    before: int, counted: int, wrong: int
) -> None:
    """``wrong``: the first run that only one of the two counts ends an update with."""
    program = Program(3)
    program.runs(before)
    program.counted = counted
    program.runs(wrong)
    with pytest.raises(ConversionError, match="count of micro-batches changed between two steps"):
        program.run()


def test_last_run_before_forgetting_is_not_compared_with_what_was_loaded() -> None:
    program = Program(2)
    program.runs(4)
    program.counted = 1
    program.boundaries.ends_update(paddle.full([1], True, "bool"))
    program.boundaries.forget()
    program.counted = 0
    assert program.runs(4) == [False, True, False, True]
