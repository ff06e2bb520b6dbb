"""The benchmark of starts: what its figures mean, and that its scripts and its page fit its record."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tools.bench_start import BEFORE, CHAINS, OURS, TORCH, command_of, phases, processor_seconds, summary
from tools.starting.page import page
from tools.starting.stamps import now, processes_above

# The rank, the processes above it up to the command's, and the shell: as a rank writes them down.
RANK = {
    "processes": [[14, 101.5, 2.0], [13, 101.25, 0.25], [12, 100.75, 0.5], [11, 100.0, 1.0], [1, 3.0, 50.0]],
    "ends": {"interpreter": 101.75, "import of the framework": 103.0, "first step": 104.0},
}


def test_phases_follow_one_another_from_the_command_to_the_first_steps_end() -> None:
    assert phases(CHAINS[BEFORE], 100.0, RANK) == {
        "launcher, until it starts the stock launcher": 0.75,
        "stock launcher, until it starts the wrapper": 0.5,
        "wrapper, until it starts the rank": 0.25,
        "interpreter": 0.25,
        "import of the framework": 1.25,
        "first step": 1.0,
        "total": 4.0,
    }
    found = phases(CHAINS[TORCH], 100.0, RANK)
    assert found["launcher, until it starts the rank"] == 1.5
    assert found["total"] == sum(value for name, value in found.items() if name != "total") == 4.0


def test_a_launcher_of_two_ranks_counts_once_with_what_it_had_used_last() -> None:
    other = [[15, 101.5, 3.0], [16, 101.25, 0.25], [12, 100.75, 0.5], [11, 100.0, 1.25], [1, 3.0, 50.0]]
    assert processor_seconds(CHAINS[BEFORE], [RANK, {"processes": other}]) == 2.0 + 3.0 + 0.25 + 0.25 + 0.5 + 1.25


def turn(ours: float, torch: float) -> dict[str, dict[str, float]]:
    return {
        OURS: {"total": ours, "end": ours + 1, "processor": 2 * ours},
        TORCH: {"total": torch, "end": torch + 1, "processor": torch},
    }


def test_ratios_are_taken_within_a_round_and_then_the_median() -> None:
    # The machine is half as fast in round 2: a ratio of medians would compare different rounds.
    found = summary([turn(2.0, 4.0), turn(6.0, 8.0), turn(3.0, 4.0)])
    assert found["ratios_to_torchrun"] == {
        OURS: {"total": [0.5, 0.75, 0.75], "end": [0.6, 0.778, 0.8], "processor": [1.0, 1.5, 1.5]}
    }
    assert found["median_ratio"] == {OURS: 0.75}
    assert found["medians"][OURS]["total"] == 3.0


@pytest.mark.parametrize("contestant", [OURS, BEFORE, TORCH])
def test_commands_name_scripts_that_exist(contestant: str, tmp_path: Path) -> None:
    *_, script, folder = command_of(contestant, tmp_path, 6170)
    assert Path(script).is_file()
    assert folder == str(tmp_path)


def test_a_process_knows_when_it_and_those_above_it_were_made_and_what_they_used() -> None:
    found = processes_above(os.getpid())
    assert [pid for pid, _, _ in found[:2]] == [os.getpid(), os.getppid()]
    times = [at for _, at, _ in found]
    assert times == sorted(times, reverse=True)
    assert 0 < times[0] <= now()
    used = found[0][2]
    before = time.process_time()
    while time.process_time() < before + 0.1:
        pass
    assert used + 0.08 <= processes_above(os.getpid())[0][2] <= used + 5


def test_the_page_has_a_row_for_each_and_its_phases() -> None:
    circumstances = {
        "date": "2026-11-22T10:00:00+00:00",
        "processor": "P",
        "processors": 2,
        "kernel": "6",
        "load_average_before": [0.5],
        "versions": {"torch": "2"},
        "commit": "0123456789ab",
        "uncommitted_changes": False,
        "command": "python tools/bench_start.py",
    }
    rounds = [turn(2.0, 4.0), turn(2.0, 4.0), turn(3.0, 4.0)]
    for each in rounds:
        each[OURS]["interpreter"] = 0.25
    lines = page({**circumstances, "rounds": rounds, "loads": [0.5, 1.0, 2.0], **summary(rounds)}).splitlines()
    assert "| fleet_train | 2.00 | 0.50 | 0.50 to 0.75 | 4.00 | 1.00 | 3.00 |" in lines
    assert "| torchrun + DDP | 4.00 | 1 | - | 4.00 | 1 | 5.00 |" in lines
    assert "| interpreter | 0.25 |" in lines
    assert any("0.5, 1, 2" in line for line in lines)
