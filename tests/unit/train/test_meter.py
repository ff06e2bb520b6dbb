"""Speed from a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

from fleet_train.train.reporter import StepMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_speed_counts_all_ranks_and_the_share_of_waiting() -> None:
    clock = Clock()

    def slow_source() -> Iterator[int]:
        for batch in range(2):
            clock.now += 1.0  # one second of reading
            yield batch

    meter = StepMeter(world_size=3, clock=clock)
    for _ in meter.timed(slow_source()):
        clock.now += 3.0  # three seconds of computing
        meter.count(samples=8)
    assert meter.read() == (2 * 8 * 3 / 8.0, 4000.0, 0.25)


def test_a_step_of_two_micro_batches_takes_the_time_of_both() -> None:
    clock = Clock()
    meter = StepMeter(3, clock, batches_per_step=2)
    for _ in range(4):
        clock.now += 0.5
        meter.count(samples=8)
    speed = meter.read()
    assert speed == (4 * 8 * 3 / 2.0, 1000.0, 0.0)
    assert speed.samples_per_second * speed.step_ms / 1000 == 2 * 8 * 3  # micro-batches, samples, ranks


def test_restart_forgets() -> None:
    clock = Clock()
    meter = StepMeter(1, clock)
    clock.now = 5.0
    meter.count(10)
    meter.restart()
    clock.now = 7.0
    meter.count(10)
    assert meter.read() == (5.0, 2000.0, 0.0)


def test_reading_before_the_first_step_is_zero() -> None:
    assert StepMeter(2, Clock()).read().samples_per_second == 0.0
