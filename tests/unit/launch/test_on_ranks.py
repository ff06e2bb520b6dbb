"""A command on every rank: whether a process is one, and how the subjects that its supervisors run have ended."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fleet_train.errors import WorkerFailed
from fleet_train.launch.on_ranks import Subject, SubjectEnd, first_to_fail, is_rank


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"PADDLE_LOCAL_RANK": "0"}, True),
        ({"PADDLE_RANK_IN_NODE": "0"}, True),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}, True),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1", "PADDLE_TRAINERS": "a,b"}, False),  # a pod of PaddleCloud
    ],
)
def test_a_rank_is_distinguished_from_a_shell(environ: dict[str, str], expected: bool) -> None:
    assert is_rank(environ) is expected


def test_nccls_lines_are_kept_and_its_chatter_hides_no_error(tmp_path: Path) -> None:
    text = "fleet_train: rank 1 was lost\n" + "".join(f"node:1:2 [0] NCCL INFO line {i}\n" for i in range(20))
    script = tmp_path / "talks.py"
    script.write_text(f"print({text + 'node:1:2 NCCL WARN failure'!r})")
    subject = Subject("job", {}, {"PYTHONPATH": str(tmp_path)}, tmp_path / "a.log", "talks")
    assert subject.wait(30) == 0
    assert subject.last_lines() == ("fleet_train: rank 1 was lost", "node:1:2 NCCL WARN failure")
    assert subject.lines_of_nccl()[0] == "node:1:2 [0] NCCL INFO line 11"
    assert subject.lines_of_nccl()[-1] == "node:1:2 NCCL WARN failure"
    subject.kill()


def test_a_report_is_read_once_its_line_is_complete(tmp_path: Path) -> None:
    script = tmp_path / "reports.py"
    script.write_text('import sys; open(sys.argv[2], \'a\').write(\'{"begins": "a"}\\n{"result"\')')
    subject = Subject("job", {}, {"PYTHONPATH": str(tmp_path)}, tmp_path / "a.log", "reports")
    assert subject.wait(30) == 0
    assert list(subject.reports()) == [{"begins": "a"}]
    with (tmp_path / "a.reports").open("a") as file:
        file.write(": 1}\n")
    assert list(subject.reports()) == [{"result": 1}]
    subject.kill()


GOOD = SubjectEnd(0, 9.0, "", ({"begins": "profiles"}, {"begins": ""}))
LOST = SubjectEnd(WorkerFailed.exit_code, 1.0, "", (), ("fleet_train: rank 2 was lost", "teardown"))
KILLED = SubjectEnd(-9, 1.5, "waited for a rank that had failed")
CRASHED = SubjectEnd(-11, 2.0, "", ({"begins": "profiles"},), ("Segmentation fault",))


def test_an_end_survives_json_and_is_told_in_words() -> None:
    assert SubjectEnd.from_json(json.loads(json.dumps(asdict(CRASHED)))) == CRASHED
    assert [end.began for end in (GOOD, LOST, CRASHED)] == ["", "start", "profiles"]
    assert [end.failure for end in (GOOD, LOST, KILLED, CRASHED)] == [
        "",
        "ended with exit code 11: fleet_train: rank 2 was lost",
        "waited for a rank that had failed and was killed: it printed nothing",
        "ended with signal 11: Segmentation fault",
    ]


def test_who_failed_first_is_one_that_neither_lost_another_nor_waited_for_it() -> None:
    assert first_to_fail({0: GOOD, 1: GOOD}) is None
    assert first_to_fail({0: LOST, 1: KILLED, 2: CRASHED}) == 2
    assert first_to_fail({0: GOOD, 1: KILLED, 2: LOST}) == 2
