from __future__ import annotations

from typing import Any

import pytest

from fleet_train.cluster.cluster import Rank
from fleet_train.cluster.store.reports import NO_RANK, FailureReport, report_of_exit, reports_of, with_absent
from fleet_train.errors import Absence, CheckpointError, DataError, JoinTimeout, LinkFailed, WorkerFailed

THIS = Rank(2, "10.0.0.2", 6170, 1, 0)
NAME = "rank 2 (10.0.0.2:6170)"


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_exception_is_this_ranks_own_failure() -> None:
    (report,) = reports_of(raised(ValueError("bad row")), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.kind, report.what) == (2, 2, "raised", "ValueError")
    assert report.message == "rank 2 (10.0.0.2:6170) stopped with ValueError: bad row"
    assert report.exit_code == 1
    assert report.traceback[0] == "Traceback (most recent call last):"
    assert report.traceback[-1] == "ValueError: bad row"
    (report,) = reports_of(raised(DataError("x" * 999 + "\n" * 99)), THIS, NAME, "could not join")
    assert report.exit_code == 10
    assert report.message.startswith("rank 2 (10.0.0.2:6170) could not join: xxx")
    assert max(map(len, report.traceback)) <= 240


def test_a_missing_rank_has_failed_and_a_notified_one_reports_nothing() -> None:
    error = WorkerFailed("step 4: rank 0, rank 1 did not arrive within 2 s")
    with_absent(error, [Absence(0, "missing", "did not arrive"), Absence(1, "missing", "did not arrive")], " at step 4")
    reports = reports_of(error, THIS, NAME, "stopped with {kind}")
    assert [(each.rank, each.reporter, each.kind, each.what, each.exit_code) for each in reports] == [
        (0, 2, "missing", "did not arrive at step 4", 11),
        (1, 2, "missing", "did not arrive at step 4", 11),
    ]
    assert reports[0].message == str(error)
    late = with_absent(JoinTimeout("join: rank 1 did not arrive within 4 s"), [Absence(1, "missing", "did not arrive")])
    assert [each.exit_code for each in reports_of(late, THIS, NAME, "could not join")] == [6]
    assert reports_of(WorkerFailed("rank 1 stopped with ValueError: boom"), THIS, NAME, "stopped with {kind}") == []


def test_links_are_no_ranks_failure() -> None:
    (report,) = reports_of(LinkFailed("step 4: all ranks are alive"), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.is_own, report.exit_code) == (NO_RANK, 2, False, 11)
    assert report.message == "step 4: all ranks are alive"


@pytest.mark.parametrize(("rank", "name", "is_own"), [(0, "rank 0", False), (2, NAME, True)])
def test_an_error_that_all_ranks_raise_is_reported_of_the_rank_that_it_comes_from(
    rank: int, name: str, is_own: bool
) -> None:
    error = CheckpointError("the disk is full")
    error.failed_rank = rank
    (report,) = reports_of(raised(error), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.what, report.exit_code) == (rank, 2, "CheckpointError", 9)
    assert report.message == f"{name} stopped with CheckpointError: the disk is full"
    assert bool(report.traceback) == is_own


@pytest.mark.parametrize(
    ("code", "status", "message", "lines"),
    [
        (3, 3, "rank 2 (10.0.0.2:6170) stopped with sys.exit(3)", ()),
        (-1, 255, "rank 2 (10.0.0.2:6170) stopped with sys.exit(-1)", ()),
        ("no disk\nleft", 1, "rank 2 (10.0.0.2:6170) stopped with sys.exit: no disk\nleft", ("no disk", "left")),
        (0.0, 1, "rank 2 (10.0.0.2:6170) stopped with sys.exit: 0.0", ("0.0",)),  # as Python has it: no integer
    ],
)
def test_sys_exit_is_a_failure_with_its_status(code: Any, status: int, message: str, lines: tuple[str, ...]) -> None:
    report = report_of_exit(code, THIS, NAME)
    assert report is not None
    assert (report.kind, report.exit_code, report.message, report.traceback) == ("exited", status, message, lines)


@pytest.mark.parametrize("code", [None, 0, False, 256])
def test_an_exit_with_status_0_is_no_failure(code: Any) -> None:
    assert report_of_exit(code, THIS, NAME) is None


def test_a_report_survives_the_journey_as_json() -> None:
    (report,) = reports_of(raised(ValueError("bad row")), THIS, NAME, "stopped with {kind}")
    assert FailureReport.from_json(report.to_json()) == report
