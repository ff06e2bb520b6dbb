"""Reports of failures, and the words in which a member hears why it waits in vain."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fleet_train.cluster.cluster import Rank
from fleet_train.cluster.store.reports import (
    NO_RANK,
    FailureReport,
    Messages,
    checked_report,
    report_of_exit,
    reports_of,
    with_absent,
)
from fleet_train.cluster.store.wire import (
    ProtocolError,
)
from fleet_train.errors import (
    Absence,
    CheckpointError,
    ClusterError,
    DataError,
    FleetTrainError,
    JoinTimeout,
    LinkFailed,
    ScheduleMismatch,
    WorkerFailed,
)


def checked(value: object) -> dict[str, Any]:
    return checked_report(json.dumps(value).encode())


def test_reports_are_small_and_of_known_types() -> None:
    report = {"message": "a\x1b", "lines": ["x"] * 101, "ok": None, "share": 0.5, "n": 1 << 53, "k" * 101: True}
    kept = {"message": "a\\x1b", "lines": ["x"] * 100, "ok": None, "share": 0.5, "n": 1 << 53, "k" * 100: True}
    assert checked(report) == kept
    assert checked({"message": "m" * 9000})["message"] == "m" * 8000 + "... (9000 characters)"
    longest = '{"a":"' + "x" * ((1 << 18) - len('{"a":""}')) + '"}'
    assert checked_report(longest.encode())["a"].startswith("xxx")
    with pytest.raises(ProtocolError, match="too long"):
        checked_report(longest.encode() + b" ")


@pytest.mark.parametrize("value", [{}, [1], ["x", 1], (1 << 53) + 1, -(1 << 53) - 1])
def test_a_report_of_something_else_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        checked({"a": value})


@pytest.mark.parametrize(
    ("code", "kept"), [(0, 1), (1, 1), (256, 1), (257, 1), (258, 2), (-9, 247), ("7", 1), (True, 1)]
)
def test_a_report_never_has_the_exit_code_of_success(code: object, kept: int) -> None:
    assert checked({"exit_code": code}) == {"exit_code": kept}


# answers in words


def said(answer: dict[str, Any], body: object = None) -> FleetTrainError:
    words = Messages("10.0.0.1:6170", "rank", lambda member: f"rank {member}")
    return words.error(answer, json.dumps(body).encode())


def test_few_are_named_and_many_are_counted() -> None:
    eight = ", ".join(f"rank {member}" for member in (0, 1, 2, 3, 6, 7, 8, 9))
    assert str(said({"error": "timeout", "missing": [[0, 3], [6, 9]]})) == f"{eight} did not arrive"
    error = said({"error": "timeout", "missing": [[0, 3], [6, 6], [8, 11]]})
    assert str(error) == "ranks 0-3, 6, 8-11 (9 in all) did not arrive"
    assert isinstance(error, JoinTimeout)
    assert [absence.member for absence in error.absent] == [0, 1, 2, 3, 6, 8, 9, 10]
    assert error.absent[0] == Absence(0, "missing", "did not arrive")
    many = said({"error": "timeout", "missing": [[2 * number, 2 * number] for number in range(9)]})
    assert str(many) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (9 in all) did not arrive"


def test_lost_members_are_named_with_the_reason_and_many_are_grouped() -> None:
    error = said({"error": "gone"}, [[[[3, 3]], "left"], [[[1, 2]], "its connection broke"]])
    assert str(error) == (
        "rank 3 finished and left the job while others still wait for it (unequal numbers of steps, or an exit?); "
        "rank 1 was lost (its connection broke: the process ended or its machine cannot be reached); "
        "rank 2 was lost (its connection broke: the process ended or its machine cannot be reached)"
    )
    assert isinstance(error, WorkerFailed)
    assert [(one.member, one.kind) for one in error.absent] == [(3, "left"), (1, "lost"), (2, "lost")]
    left = said({"error": "gone", "call": "fleet.save"}, [[[[3, 3]], "left"]])
    assert "rank 3 finished and left the job while others wait for it in fleet.save; call fleet.save on" in str(left)
    many = said({"error": "gone"}, [[[[0, 4]], "silent"], [[[6, 9]], "left"]])
    assert str(many).startswith("rank 0, rank 1, rank 2, rank 3, rank 4: was lost (silent: ")
    assert len(many.absent) == 8


def test_members_at_different_places_get_the_fix() -> None:
    steps = said({"error": "crossed"}, [[[[1, 1]], "step 2", ""], [[[0, 0]], "step 3", ""]])
    assert str(steps) == (
        "the ranks wait for each other at different points: rank 0 at 'step 3', rank 1 at 'step 2'; every rank must "
        "make the same steps and calls in the same order (unequal numbers of batches?)"
    )
    assert isinstance(steps, ScheduleMismatch)
    calls = said({"error": "crossed"}, [[[[1, 1]], "a", "fleet.save"], [[[0, 0]], "b", "fleet.save"]])
    assert str(calls).endswith("rank 1 in fleet.save; every rank must make the same calls in the same order")
    mixed = said({"error": "crossed"}, [[[[1, 8]], "a", "fleet.save"], [[[0, 0]], "b", ""]])
    eight = ", ".join(f"rank {member}" for member in range(1, 9))
    assert f"points: rank 0 at 'b', {eight} in fleet.save; call" in str(mixed)
    few = said({"error": "crossed"}, [[[[1, 7]], "a", "fleet.save"], [[[0, 0]], "b", ""]])
    each = ", ".join(f"rank {member} in fleet.save" for member in range(1, 8))
    assert f"points: rank 0 at 'b', {each}; call" in str(few)
    assert "; call fleet.save on all ranks, without `if rank == 0` around it; if all of them do" in str(mixed)
    many = said({"error": "crossed"}, [[[[0, 8]], "step 2", ""], [[[9, 9]], "step 3", ""]])
    assert "points: ranks 0-8 (9 in all) at 'step 2', rank 9 at 'step 3'; every rank" in str(many)


@pytest.mark.parametrize(
    ("answer", "body", "kind", "words"),
    [
        ({"error": "count", "counts": [[3, 8], [5, 9]]}, None, ScheduleMismatch, "rank 3 .* 8 ranks, rank 5 says 9"),
        ({"error": "store", "why": "gone"}, None, WorkerFailed, r"10.0.0.1:6170 no longer answers \(gone\)"),
        ({"error": "large"}, None, ClusterError, "exceed what the rendezvous store can hold"),
        ({"error": "full"}, None, ClusterError, "10.0.0.1:6170 can hold no more values"),
        ({"error": "odd"}, None, ClusterError, "answered 'odd'"),
        ({"error": "failed"}, {"message": "out of memory"}, WorkerFailed, "^out of memory$"),
        ({"error": "failed"}, {"exit_code": 7}, WorkerFailed, "^{'exit_code': 7}$"),
    ],
)
def test_messages_of_other_refusals(
    answer: dict[str, Any], body: object, kind: type[FleetTrainError], words: str
) -> None:
    error = said(answer, body)
    assert type(error) is kind
    assert re.search(words, str(error))


# the reports of an exception

THIS = Rank(2, "10.0.0.2", 6170, 1, 0)
NAME = "rank 2 (10.0.0.2:6170)"


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_exception_is_this_ranks_own_failure_and_that_of_a_link_is_nobodys() -> None:
    (report,) = reports_of(raised(ValueError("bad row")), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.kind, report.what) == (2, 2, "raised", "ValueError")
    assert report.message == "rank 2 (10.0.0.2:6170) stopped with ValueError: bad row"
    assert report.exit_code == 1
    assert report.traceback[0] == "Traceback (most recent call last):"
    assert report.traceback[-1] == "ValueError: bad row"
    assert FailureReport.from_json(report.to_json()) == report
    (report,) = reports_of(raised(DataError("x" * 999 + "\n" * 99)), THIS, NAME, "could not join")
    assert report.exit_code == 10
    assert report.message.startswith("rank 2 (10.0.0.2:6170) could not join: xxx")
    assert max(map(len, report.traceback)) <= 240
    (report,) = reports_of(LinkFailed("step 4: all ranks are alive"), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.is_own, report.exit_code) == (NO_RANK, 2, False, 11)
    assert report.message == "step 4: all ranks are alive"


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
    ("code", "status", "words", "lines"),
    [
        (3, 3, "sys.exit(3)", ()),
        (-1, 255, "sys.exit(-1)", ()),
        ("no disk\nleft", 1, "sys.exit: no disk\nleft", ("no disk", "left")),
        (0.0, 1, "sys.exit: 0.0", ("0.0",)),  # as Python has it: no integer
        *((code, 0, "", ()) for code in (None, 0, False, 256)),
    ],
)
def test_sys_exit_is_a_failure_with_its_status(code: Any, status: int, words: str, lines: tuple[str, ...]) -> None:
    report = report_of_exit(code, THIS, NAME)
    if status == 0:
        assert report is None
        return
    assert report is not None
    assert (report.kind, report.exit_code, report.traceback) == ("exited", status, lines)
    assert report.message == f"rank 2 (10.0.0.2:6170) stopped with {words}"
