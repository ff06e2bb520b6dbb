"""The step clock on a device whose events complete later than they are queried."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fleet_train.collectives.step_notes import StepClock


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


def step(clock: StepClock, waits: int = 1) -> None:
    """Asks for 2 moments per wait, and for one at the end of the step (the first step: one at its beginning)."""
    clock.begin_step()
    for _ in range(waits):
        with clock.exposed():
            pass
    clock.end_step()


def test_step_is_counted_once_the_device_has_passed_its_end(stream: Stream, clock: StepClock) -> None:
    step(clock)
    stream.work(0.0, 1.0, 1.5)
    assert clock.read_unsent().steps == clock.read().steps == 0
    stream.work(2.0)
    assert clock.read_unsent().steps == clock.read().steps == 1


def test_busy_is_the_step_without_its_waits(stream: Stream, clock: StepClock) -> None:
    step(clock, waits=2)
    step(clock, waits=2)
    # begin, two waits, end; two waits, end
    stream.work(10.0, 11.0, 11.5, 12.0, 12.25, 14.0)
    stream.work(15.0, 15.0, 16.0, 18.0, 19.0)
    told, read = clock.read_unsent(), clock.read()
    assert told.steps == read.steps == 2
    assert told.busy_seconds == pytest.approx((4.0 - 0.75) + (5.0 - 2.0))
    assert read.exposed_seconds == pytest.approx(0.75 + 2.0)


def test_host_that_is_ahead_counts_a_step_later(stream: Stream, clock: StepClock) -> None:
    step(clock)
    step(clock)
    stream.work(0.0, 1.0, 2.0, 3.0)
    told = clock.read_unsent()
    assert (told.steps, told.busy_seconds) == (1, pytest.approx(2.0))
    stream.work(3.5, 4.5)
    assert clock.read_unsent().steps == 0
    step(clock)
    stream.work(5.0)
    told = clock.read_unsent()
    assert (told.steps, told.busy_seconds) == (1, pytest.approx(1.0))


def test_wait_behind_the_last_bucket_counts_to_the_next_step(stream: Stream, clock: StepClock) -> None:
    step(clock)
    with clock.exposed():  # an averaging
        pass
    step(clock)
    stream.work(0.0, 1.0, 1.0, 2.0)
    assert clock.read().exposed_seconds == 0.0
    stream.work(2.0, 6.0, 7.0, 7.5, 8.0)
    assert clock.read().exposed_seconds == pytest.approx(4.0 + 0.5)
    assert clock.read_unsent().busy_seconds == pytest.approx(2.0 + 1.5)


def test_wait_before_the_first_step_belongs_to_it(stream: Stream, clock: StepClock) -> None:
    with clock.exposed():
        pass
    step(clock)
    stream.work(0.0, 3.0, 4.0, 4.0, 5.0)
    assert clock.read_unsent().busy_seconds == pytest.approx(2.0)
    assert clock.read().exposed_seconds == pytest.approx(3.0)


def test_reading_keeps_what_the_script_does_behind_it_out_of_the_next_step(stream: Stream, clock: StepClock) -> None:
    step(clock)
    stream.work(0.0, 1.0, 1.0, 2.0)
    clock.read()
    step(clock)
    stream.work(50.0, 51.0, 51.5, 52.0)  # the first of them: where the script went on
    assert clock.read_unsent().busy_seconds == pytest.approx(2.0 + 1.5)
    assert clock.read().exposed_seconds == pytest.approx(0.5)


@pytest.mark.parametrize("late", [False, True], ids=["passed at the reading", "passed behind it"])
def test_wait_that_is_read_before_the_device_has_passed_it_is_not_lost(
    stream: Stream, clock: StepClock, late: bool
) -> None:
    step(clock)
    stream.work(0.0, 1.0, 1.0, 2.0)
    with clock.exposed():  # an averaging, behind which the script reads
        pass
    if not late:
        stream.work(2.0, 6.0)
    first = clock.read().exposed_seconds
    if late:
        stream.work(2.0, 6.0)
    step(clock)
    stream.work(7.0, 8.0, 8.5, 9.0)
    second = clock.read().exposed_seconds
    assert (first, second) == ((0.0, pytest.approx(4.5)) if late else (pytest.approx(4.0), pytest.approx(0.5)))
    assert clock.read_unsent().busy_seconds == pytest.approx(2.0 + 1.5)


def test_telling_and_reading_restart_independently(stream: Stream, clock: StepClock) -> None:
    clock.add_barrier(0.25)
    clock.add_sent(100)
    step(clock)
    stream.work(0.0, 1.0, 2.0, 3.0)
    assert (clock.read().barrier_seconds, clock.read().barrier_seconds) == (0.25, 0.0)
    told = clock.read_unsent()
    assert (told.steps, told.barrier_seconds, told.busy_seconds) == (1, 0.25, pytest.approx(2.0))
    assert clock.read_unsent().steps == 0


def test_bytes_are_counted_when_they_are_added(clock: StepClock) -> None:
    clock.add_sent(100)
    clock.add_sent(20)
    assert (clock.read().sent_bytes, clock.read().sent_bytes) == (120, 0)


def test_on_the_host_every_step_is_counted_at_once() -> None:
    clock = StepClock()
    step(clock)
    told, read = clock.read_unsent(), clock.read()
    assert told.steps == read.steps == 1
    assert told.busy_seconds >= 0.0 <= read.exposed_seconds


def test_a_step_that_was_not_started_takes_no_time(stream: Stream, clock: StepClock) -> None:
    clock.end_step()
    stream.work(*[1.0] * stream.asked)
    told = clock.read_unsent()
    assert (told.steps, told.busy_seconds) == (1, 0.0)
