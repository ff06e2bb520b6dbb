"""Which rank is named as the root cause, what the table of a failed job says, and what is tried again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleet_train.cluster.flight.stands import Stand
from fleet_train.cluster.store.reports import FailureReport
from fleet_train.launch.attempts import Kind, RunResult, pause_seconds, why_not_again
from fleet_train.launch.logs import of_paddles_fleet
from fleet_train.launch.node import Node
from fleet_train.launch.report import WorkerResult, choose_root_cause, failure_report, last_lines, spans, with_reports
from fleet_train.launch.request import FaultPolicy
from tests.unit.launch.conftest import missed, own


def end(
    rank: int, seconds: float, code: int | None = None, signal: int | None = None, asked: bool = False
) -> WorkerResult:
    host = f"10.0.0.{1 + rank // 2}:{6170 + rank % 2}"
    return WorkerResult(
        rank, host, rank // 2, code, signal, seconds, asked, f"/job/workerlog.{rank % 2}", ("last words",)
    )


@pytest.mark.parametrize(
    ("ends", "root_cause", "shell_code"),
    [
        ([end(0, 1, code=0), end(1, 2, code=0)], None, None),
        ([end(0, 2.0, code=1), end(1, 1.0, code=3)], 1, 3),  # the first one in time
        ([end(0, 1.0, code=11), end(1, 1.4, code=3)], 1, 3),  # WorkerFailed only followed, though it ended before
        ([end(0, 1.0, signal=15, asked=True), end(1, 1.4, signal=9)], 1, 137),  # we stopped it ourselves
        ([end(0, 1.0, signal=15), end(1, 1.4, code=3)], 0, 143),  # somebody else killed it
        ([end(0, 1.0, code=11), end(1, 0.5, signal=15, asked=True)], 0, 11),  # nobody better: the one we did not stop
        ([end(0, 1.0, signal=11), end(1, 1.0, code=1)], 0, 139),  # at the same time: the lower rank
        ([end(0, 1.0, code=0, asked=True), end(1, 2.0, signal=6)], 1, 134),
    ],
)
def test_the_root_cause_is_the_first_that_did_not_merely_follow(
    ends: list[WorkerResult], root_cause: int | None, shell_code: int | None
) -> None:
    chosen = choose_root_cause(ends)
    assert (chosen and chosen.rank) == root_cause
    assert (chosen and chosen.shell_code) == shell_code


def test_a_rank_that_gloo_ends_while_it_waits_is_not_to_blame_for_one_that_is_stopped() -> None:
    stand = Stand(0, 100, 67, "wire bucket 0", True, "has ended", ())
    aborted = replace(end(0, 33.5, signal=6), stand=stand)
    waited = replace(end(2, 33.5, code=11), stand=replace(stand, rank=2))
    stopped = replace(end(1, 34.7, code=11), stand=replace(stand, rank=1, waits=False, state="is stopped by a signal"))
    assert choose_root_cause([aborted, waited, stopped]) is stopped
    assert stopped.how() == "is stopped by a signal, then exit code 11 (another rank was lost)"
    assert choose_root_cause([aborted, waited]) is aborted
    assert choose_root_cause([replace(aborted, stand=None), waited, stopped]).rank == 0  # type: ignore[union-attr]
    assert WorkerResult.from_json(json.loads(json.dumps(stopped.to_json()))) == stopped
    report = failure_report([aborted, waited, stopped])
    assert "rank 1 is stopped by a signal; ranks 0, 2 wait for it in step 67, wire bucket 0" in report


NODE = Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 2, None, "eth0")
SECONDARY = end(0, 2.0, code=11)


@pytest.mark.parametrize(
    ("guilty", "report", "shell_code", "how"),
    [
        (end(1, 9.0, signal=15, asked=True), own(1, 1.5), 1, "ValueError, then stopped by SIGTERM"),
        (end(1, 9.0, signal=9, asked=True), own(1, 1.5, "DataError", 10), 10, "DataError, then stopped by SIGKILL"),
        (end(1, 2.5, code=1), own(1, 1.5), 1, "exit code 1 (ValueError)"),
        (end(1, 2.5, code=0), own(1, 1.5), 1, "exit code 0 (ValueError)"),
        (end(1, 9.0, signal=9, asked=True), missed(1, 2.0, "missing", "froze"), 11, "froze, then stopped by SIGKILL"),
        (end(1, 1.0, code=0), missed(1, 2.0, "left", "left the job"), 11, "exit code 0 (left the job)"),
        (end(1, 1.0, code=12), missed(1, 2.0, "left", "left the job"), 11, "exit code 12 (left the job)"),
        (end(1, 2.5, code=3), missed(1, 2.0, "left", "left the job"), 3, "exit code 3 (left the job)"),
        (end(1, 1.9, signal=9), missed(1, 2.0, "lost", "was lost"), 137, "killed by SIGKILL"),
        (end(1, 1.9, code=0), missed(1, 2.0, "lost", "was lost"), 11, "exit code 0 (was lost)"),
        (end(1, 9.0, signal=9, asked=True), missed(1, 2.0, "lost", "cut off"), 11, "cut off, then stopped by SIGKILL"),
    ],
)  # fmt: skip
def test_a_reported_rank_is_the_root_cause_whichever_ended_first(
    guilty: WorkerResult, report: FailureReport, shell_code: int, how: str
) -> None:
    root_cause = choose_root_cause(with_reports([SECONDARY, guilty], [report], NODE))
    assert root_cause is not None
    assert (root_cause.rank, root_cause.shell_code, root_cause.how()) == (1, shell_code, how)
    assert root_cause.failed_seconds == min(report.seconds, guilty.seconds)


def test_a_report_of_a_rank_that_has_not_ended_names_its_place() -> None:
    (_, three) = with_reports([SECONDARY], [missed(3, 2.0, "missing", "froze")], NODE)
    assert (three.rank, three.endpoint, three.node_index, three.has_ended, three.how()) == (
        3, "10.0.0.2:6171", 1, False, "froze",
    )  # fmt: skip
    assert with_reports([SECONDARY], [missed(4, 2.0, "missing", "froze")], NODE) == [SECONDARY]  # not of this job


def test_a_ranks_own_report_has_precedence_over_others_and_the_earlier_time_counts() -> None:
    (one,) = with_reports([end(1, 9.0, code=1)], [missed(1, 2.0, "missing", "froze"), own(1, 6.0), own(1, 7.0)], NODE)
    assert one.report == own(1, 2.0)


def test_a_process_that_died_before_the_first_report_is_the_root_cause() -> None:
    ends = with_reports([end(0, 2.2, code=1), end(2, 1.9, signal=9)], [own(0, 2.0)], NODE)
    assert [(each.rank, each.failed) for each in ends] == [(0, True), (2, True)]
    root_cause = choose_root_cause(ends)
    assert root_cause is not None
    assert root_cause.rank == 2


def test_an_end_survives_the_journey_as_json() -> None:
    before = end(3, 1.25, signal=9)
    assert WorkerResult.from_json(before.to_json()) == before
    (told,) = with_reports([end(1, 1.25, code=1)], [own(1, 1.0)], NODE)
    assert WorkerResult.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_last_lines_keep_what_says_something() -> None:
    text = "old\nstep 1\rstep 2\rstep 3\r\n\n  Traceback\nValueError: x\n\n"
    assert last_lines(text, count=3) == ("step 3", "  Traceback", "ValueError: x")
    assert last_lines("y" * 300, width=10) == ("yyyyyyy...",)
    assert last_lines("") == ()


@pytest.mark.parametrize(
    "line",
    [
        "from paddle.distributed import fleet",
        "import paddle.distributed.fleet as fleet",
        "    from paddle.distributed.fleet import DistributedStrategy",
        "from paddle.distributed import ReduceOp, fleet",
    ],
)
def test_paddles_own_fleet_in_the_script_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import paddle\nimport paddle.distributed as dist\n{line}\n")
    frame = '  File "/opt/paddle/distributed/fleet/fleet.py", line 1741, in minimize\n'
    (said,) = of_paddles_fleet(f"Traceback\n{frame}TypeError: clone()\n{'operators ' * 9999}", script)
    assert f"was imported in line 3 of train.py ({line.strip()}): " in said
    assert said.endswith("from fleet_train import fleet")
    (said,) = of_paddles_fleet(frame, None)
    assert "was imported: " in said
    (said,) = of_paddles_fleet(frame, tmp_path)
    assert "was imported: " in said
    others = ['  File "/opt/paddle/distributed/fleet/fleet.py", line 9, in init\n', "TypeError: minimize\n", ""]
    assert [of_paddles_fleet(other, script) for other in others] == [[], [], []]


def test_the_table_is_last_and_names_the_root_cause_first() -> None:
    ends = [end(0, 2.31, signal=15, asked=True), end(1, 2.2, code=11), end(2, 2.05, signal=9), end(3, 1.0, code=0)]
    assert failure_report(ends, ["node 2 (10.0.0.3)"]).splitlines() == [
        "last lines of rank 2 (10.0.0.2:/job/workerlog.0):",
        "  | last words",
        "              rank  host:port      how it ended                          after  log file",
        "failed first  2     10.0.0.2:6170  killed by SIGKILL                     2.0 s  /job/workerlog.0",
        "secondary     1     10.0.0.1:6171  exit code 11 (another rank was lost)  2.2 s  /job/workerlog.1",
        "secondary     0     10.0.0.1:6170  stopped by SIGTERM                    2.3 s  /job/workerlog.0",
        "finished: rank 3",
        "not heard from: node 2 (10.0.0.3)",
    ]


def test_many_followers_are_counted_not_listed() -> None:
    ends = [end(0, 1.0, code=1), *(end(rank, 2.0, signal=15, asked=True) for rank in range(1, 32))]
    text = failure_report(ends)
    assert "secondary: ranks 9-31" in text
    assert len(text.splitlines()) == 2 + 1 + 1 + 8 + 1
    assert (spans([0, 1, 2, 5, 7, 8]), spans([])) == ("0-2, 5, 7-8", "")


THREE = FaultPolicy(max_restarts=3)


def failed(
    code: int | None = None, signal: int | None = None, *, rank: int = 1, last: str = "", seconds: float = 20.0
) -> RunResult:
    end = WorkerResult(rank, "10.0.0.2:6170", 1, code, signal, seconds, False, "log", (last,) if last else ())
    return RunResult(Kind.FAILED, end.shell_code, ends=(end,), root_cause=end)


LOST = RunResult(Kind.FAILED, 11, "the launcher of node 1 was lost", without_root_cause=True)


MISTAKES = (2, 3, 4, 5, 7, 8, 9, 10, 13, 14)


def test_what_may_go_better_next_time_is_tried_again_and_a_mistake_is_not() -> None:
    for result in (failed(1), failed(signal=9), failed(signal=11), failed(6), failed(11), LOST):
        assert why_not_again(result, [], 0, THREE) is None
    for code in MISTAKES:
        assert f"exit code {code} means a mistake" in (why_not_again(failed(code), [], 0, THREE) or "")
    # beside a silent node it may come from its loss
    assert why_not_again(replace(failed(5), silent=("node 1 (10.0.0.2)",)), [], 0, THREE) is None


def test_the_same_exception_twice_is_not_tried_a_third_time_and_ends_from_outside_may_repeat() -> None:
    first, again = failed(1, last="ValueError: bad row 17"), failed(1, last="ValueError: bad row 23")
    assert why_not_again(again, [first], 1, THREE) == "it failed twice in the same way"
    assert why_not_again(failed(1, last="OSError: full"), [first], 1, THREE) is None
    assert why_not_again(failed(1, rank=0, last="ValueError: bad row 17"), [first], 1, THREE) is None
    assert why_not_again(failed(1, last="ValueError: bad row 17", seconds=700.0), [first], 1, THREE) is None
    for result in (failed(signal=9), failed(11), LOST):
        assert why_not_again(result, [result], 1, THREE) is None
    assert why_not_again(failed(signal=11), [failed(signal=11)], 1, THREE) is not None


def test_what_a_rank_has_reported_counts_however_it_ended() -> None:
    def reported(line: str, code: int) -> RunResult:
        report = FailureReport(1, 1, "raised", "ValueError", "...", code, (line,))
        end = WorkerResult(1, "10.0.0.2:6170", 1, None, 9, 20.0, True, "log", ("cleaning up",), report)
        return RunResult(Kind.FAILED, end.shell_code, ends=(end,), root_cause=end)

    assert "exit code 10 means a mistake" in (why_not_again(reported("DataError: x", 10), [], 0, THREE) or "")
    first, again = reported("ValueError: bad row 17", 1), reported("ValueError: bad row 23", 1)
    assert why_not_again(again, [first], 1, THREE) == "it failed twice in the same way"
    assert why_not_again(reported("OSError: full", 1), [first], 1, THREE) is None


def test_restarts_are_counted_and_pauses_are_short() -> None:
    assert why_not_again(failed(signal=9), [LOST, LOST], 2, THREE) is None
    assert why_not_again(failed(signal=9), [LOST] * 3, 3, THREE) == "all restarts are used up (--max_restarts=3)"
    assert why_not_again(failed(signal=9), [], 0, FaultPolicy()) == ""
    assert why_not_again(RunResult(Kind.FAILED, 130, "stopped by Ctrl-C", final=True), [], 0, THREE) == ""
    in_vain, trained = RunResult(Kind.FAILED, 1), RunResult(Kind.FAILED, 1, has_trained=True)
    assert [pause_seconds([in_vain] * count) for count in (1, 2, 3, 4, 5, 30)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert [pause_seconds([*[in_vain] * count, trained]) for count in (0, 5)] == [0.0, 0.0]
    assert pause_seconds([in_vain, in_vain, trained, in_vain]) == 1.0  # since it last trained
