"""The benchmark of starts: what its figures mean, and that its scripts and its page fit its record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.bench_start import BEFORE, CHAINS, OURS, TORCH, command_of, phases, summary
from tools.starting.page import page
from tools.starting.stamps import made_above, now

# The rank, the processes above it up to the command's, and the shell: as a rank writes them down.
RANK = {
    "made": [[14, 101.5], [13, 101.25], [12, 100.75], [11, 100.0], [1, 3.0]],
    "ends": {"interpreter": 101.75, "import of the framework": 103.0, "first step": 104.0},
}


def test_phases_follow_one_another_from_the_command_to_the_first_steps_end() -> None:
    assert phases(CHAINS[OURS], 100.0, RANK) == {
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


def turn(ours: float, torch: float) -> dict[str, dict[str, float]]:
    return {OURS: {"total": ours, "end": ours + 1}, TORCH: {"total": torch, "end": torch + 1}}


def test_ratios_are_taken_within_a_round_and_then_the_median() -> None:
    # The machine is half as fast in round 2: a ratio of medians would compare different rounds.
    found = summary([turn(2.0, 4.0), turn(6.0, 8.0), turn(3.0, 4.0)])
    assert found["ratios_to_torchrun"] == {OURS: {"total": [0.5, 0.75, 0.75], "end": [0.6, 0.778, 0.8]}}
    assert found["median_ratio"] == {OURS: 0.75}
    assert found["medians"][OURS]["total"] == 3.0


@pytest.mark.parametrize("contestant", [OURS, BEFORE, TORCH])
def test_commands_name_scripts_that_exist(contestant: str, tmp_path: Path) -> None:
    *_, script, folder = command_of(contestant, tmp_path, 6170)
    assert Path(script).is_file()
    assert folder == str(tmp_path)


def test_a_process_knows_when_it_and_those_above_it_were_made() -> None:
    made = made_above(os.getpid())
    assert [pid for pid, _ in made[:2]] == [os.getpid(), os.getppid()]
    times = [at for _, at in made]
    assert times == sorted(times, reverse=True)
    assert 0 < times[0] <= now()


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
    assert "| fleet_train | 2.00 | 0.50 | 0.50 to 0.75 | 3.00 |" in lines
    assert "| torchrun + DDP | 4.00 | 1 | - | 5.00 |" in lines
    assert "| interpreter | 0.25 |" in lines
    assert any("0.5, 1, 2" in line for line in lines)
