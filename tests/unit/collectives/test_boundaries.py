"""Which runs end an update: read on the host, or counted and verified a run later if the host may not read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import paddle
import pytest

from fleet_train.collectives.engine import HostDevice
from fleet_train.collectives.exchange import Boundaries
from fleet_train.errors import ConversionError
from tests.support.late import LateDevice


@dataclass
class Engine:
    """What `Boundaries` asks of one."""

    reads_values: bool
    device: Any = field(default_factory=HostDevice)


@dataclass
class Program:
    """A program that counts micro-batches, on a device whose values the host should read a run later only."""

    size: int
    reads_values: bool = False
    counted: int = 0

    def __post_init__(self) -> None:
        self.device = LateDevice()
        self.boundaries = Boundaries(self.size, Engine(self.reads_values, self.device))  # type: ignore[arg-type]

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


def test_host_reads_along_up_to_the_first_update_and_never_again() -> None:
    program = Program(3)
    program.runs(3)
    assert program.device.early_reads == 3
    program.runs(12)
    assert program.device.early_reads == 3


def test_a_loaded_count_is_used_after_forgetting() -> None:
    program = Program(4)
    program.runs(6)
    program.counted = 3
    program.boundaries.forget()
    assert program.runs(9) == [True, False, False, False, True, False, False, False, True]
    assert program.device.early_reads == 4 + 1


@pytest.mark.parametrize(("before", "counted"), list(itertools.product((4, 5, 6), (0, 1, 2))))
def test_a_count_that_changes_between_two_steps_is_reported_a_run_after_the_first_mismatch(
    before: int, counted: int
) -> None:
    program = Program(3)
    program.runs(before)
    if program.counted == counted:
        assert program.runs(6) == [(counted + run) % 3 == 0 for run in range(1, 7)]
        return
    program.counted = counted
    known = before % 3
    # Wrong is the first run that only one of the two counts ends an update with.
    wrong = next(run for run in range(1, 4) if ((known + run) % 3 == 0) != ((counted + run) % 3 == 0))
    program.runs(wrong)
    with pytest.raises(ConversionError, match="count of micro-batches changed between two steps"):
        program.run()


def test_where_the_host_reads_a_changed_count_is_simply_read() -> None:
    program = Program(3, reads_values=True)
    program.runs(4)
    program.counted = 2
    assert program.runs(4) == [True, False, False, True]


def test_last_run_before_forgetting_is_not_compared_with_what_was_loaded() -> None:
    program = Program(2)
    program.runs(4)
    program.counted = 1
    program.boundaries.ends_update(paddle.full([1], True, "bool"))
    program.boundaries.forget()
    program.counted = 0
    assert program.runs(4) == [False, True, False, True]
