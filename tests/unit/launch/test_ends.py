from __future__ import annotations

import pytest

from fleet_train.launch.ends import RankEnd, choose_culprit, last_lines
from fleet_train.launch.report import failure_report, spans


def end(rank: int, seconds: float, code: int | None = None, signal: int | None = None, asked: bool = False) -> RankEnd:
    host = f"10.0.0.{1 + rank // 2}:{6170 + rank % 2}"
    return RankEnd(rank, host, rank // 2, code, signal, seconds, asked, f"/job/workerlog.{rank % 2}", ("last words",))


@pytest.mark.parametrize(
    ("ends", "culprit", "shell_code"),
    [
        ([end(0, 1, code=0), end(1, 2, code=0)], None, None),
        ([end(0, 2.0, code=1), end(1, 1.0, code=3)], 1, 3),  # the first one in time
        ([end(0, 1.0, code=11), end(1, 1.4, code=3)], 1, 3),  # WorkerFailed only followed, though it ended before
        ([end(0, 1.0, signal=15, asked=True), end(1, 1.4, signal=9)], 1, 137),  # we stopped it ourselves
        ([end(0, 1.0, signal=15), end(1, 1.4, code=3)], 0, 143),  # somebody else killed it
        ([end(0, 1.0, code=11), end(1, 0.5, signal=15, asked=True)], 0, 11),  # nobody better: the one we did not stop
        ([end(0, 3.0), end(1, 1.0, signal=15, asked=True)], 0, 137),  # without a trace
        ([end(0, 1.0, signal=11), end(1, 1.0, code=1)], 0, 139),  # at the same time: the lower rank
        ([end(0, 1.0, code=0, asked=True), end(1, 2.0, signal=6)], 1, 134),
    ],
)
def test_the_culprit_is_the_first_that_did_not_merely_follow(
    ends: list[RankEnd], culprit: int | None, shell_code: int | None
) -> None:
    chosen = choose_culprit(ends)
    assert (chosen and chosen.rank) == culprit
    assert (chosen and chosen.shell_code) == shell_code


def test_an_end_survives_the_journey_as_json() -> None:
    before = end(3, 1.25, signal=9)
    assert RankEnd.from_json(before.to_json()) == before


def test_last_lines_keep_what_says_something() -> None:
    text = "old\nstep 1\rstep 2\rstep 3\r\n\n  Traceback\nValueError: x\n\n"
    assert last_lines(text, count=3) == ("step 3", "  Traceback", "ValueError: x")
    assert last_lines("y" * 300, width=10) == ("yyyyyyy...",)
    assert last_lines("") == ()


def test_the_table_is_last_and_names_the_culprit_first() -> None:
    ends = [end(0, 2.31, signal=15, asked=True), end(1, 2.2, code=11), end(2, 2.05, signal=9), end(3, 1.0, code=0)]
    assert failure_report(ends, ["node 2 (10.0.0.3)"]).splitlines() == [
        "last lines of rank 2 (10.0.0.2:/job/workerlog.0):",
        "  | last words",
        "              rank  host:port      how it ended                          after  log file",
        "failed first  2     10.0.0.2:6170  killed by SIGKILL                     2.0 s  /job/workerlog.0",
        "followed      1     10.0.0.1:6171  exit code 11 (another rank was lost)  2.2 s  /job/workerlog.1",
        "followed      0     10.0.0.1:6170  stopped by SIGTERM                    2.3 s  /job/workerlog.0",
        "finished: rank 3",
        "not heard from: node 2 (10.0.0.3)",
    ]


def test_many_followers_are_counted_not_listed() -> None:
    ends = [end(0, 1.0, code=1), *(end(rank, 2.0, signal=15, asked=True) for rank in range(1, 32))]
    text = failure_report(ends)
    assert "followed: ranks 9-31" in text
    assert len(text.splitlines()) == 2 + 1 + 1 + 8 + 1


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == ""
