"""What tools/kills.py compares: each printed step of all attempts of each rank, and how a rank ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kills import Job, compared, is_right

WHOLE = ["step 0 loss a\nstep 1 loss b\ndigest D numpy 1\n"]


def job(folder: Path, of_ranks: list[list[str]]) -> Job:
    """A job whose ranks have printed, in their attempts, these texts."""
    made = Job(folder, "steps", ranks=len(of_ranks), port=1, kills=1)
    (folder / "log").mkdir()
    for rank, attempts in enumerate(of_ranks):
        for number, text in enumerate(attempts):
            suffix = "" if number + 1 == len(attempts) else f".attempt{number}"
            (folder / "log" / f"workerlog.{rank}{suffix}").write_text(text)
    return made


@pytest.mark.parametrize(
    ("second", "is_same"),
    [
        (WHOLE, True),
        (["step 0 loss a\nstep 1 lo", "step 0 loss a\nstep 1 loss b\ndigest D numpy 1\n"], True),
        (["step 0 loss a\nstep 1 loss c\n", "step 1 loss b\ndigest D numpy 1\n"], False),
        (["step 0 loss a\n", "digest D numpy 1\n"], False),
        (["step 0 loss a\nstep 1 loss b\nstep 2 loss c\ndigest D numpy 1\n"], False),
        (["step 0 loss a\nstep 1 loss b\ndigest D numpy 2\n"], False),
        (["step 0 loss a\nstep 1 loss b\n"], False),
    ],
)
def test_a_job_is_right_if_every_step_of_every_attempt_and_the_end_are_the_same(
    tmp_path: Path, second: list[str], is_same: bool
) -> None:
    whole, killed = job(tmp_path / "whole", [WHOLE, WHOLE]), job(tmp_path / "killed", [WHOLE, second])
    assert is_right({"comparison": compared(whole, killed, 2)}) is is_same
