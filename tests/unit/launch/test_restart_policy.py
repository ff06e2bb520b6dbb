from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_train.cluster.store.reports import FailureReport
from fleet_train.launch.coordinator import Kind, RunResult, pause_seconds, why_not_again
from fleet_train.launch.report import WorkerResult
from fleet_train.launch.request import FaultPolicy

THREE = FaultPolicy(max_restarts=3)


def failed(
    code: int | None = None, signal: int | None = None, *, rank: int = 1, last: str = "", seconds: float = 20.0
) -> RunResult:
    end = WorkerResult(rank, "10.0.0.2:6170", 1, code, signal, seconds, False, "log", (last,) if last else ())
    return RunResult(Kind.FAILED, end.shell_code, ends=(end,), root_cause=end)


LOST = RunResult(Kind.FAILED, 11, "the launcher of node 1 was lost", without_root_cause=True)


@pytest.mark.parametrize("result", [failed(1), failed(signal=9), failed(signal=11), failed(6), failed(11), LOST])
def test_what_may_go_better_next_time_is_tried_again(result: RunResult) -> None:
    assert why_not_again(result, [], 0, THREE) is None


@pytest.mark.parametrize("code", [2, 3, 4, 5, 7, 8, 9, 10, 13, 14])
def test_a_mistake_in_flags_profile_data_or_state_is_not_tried_again(code: int) -> None:
    assert f"exit code {code} means a mistake" in (why_not_again(failed(code), [], 0, THREE) or "")


def test_a_mistake_beside_a_silent_node_may_come_from_its_loss() -> None:
    assert why_not_again(replace(failed(5), silent=("node 1 (10.0.0.2)",)), [], 0, THREE) is None


def test_the_same_exception_twice_is_not_tried_a_third_time() -> None:
    first, again = failed(1, last="ValueError: bad row 17"), failed(1, last="ValueError: bad row 23")
    assert why_not_again(again, [first], 1, THREE) == "it failed twice in the same way"
    assert why_not_again(failed(1, last="OSError: full"), [first], 1, THREE) is None
    assert why_not_again(failed(1, rank=0, last="ValueError: bad row 17"), [first], 1, THREE) is None
    assert why_not_again(failed(1, last="ValueError: bad row 17", seconds=700.0), [first], 1, THREE) is None


def test_ends_that_come_from_outside_may_repeat() -> None:
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


def test_restarts_are_counted() -> None:
    assert why_not_again(failed(signal=9), [LOST, LOST], 2, THREE) is None
    assert why_not_again(failed(signal=9), [LOST] * 3, 3, THREE) == "all restarts are used up (--max_restarts=3)"


def test_without_restarts_or_after_a_deliberate_stop_there_is_no_message() -> None:
    assert why_not_again(failed(signal=9), [], 0, FaultPolicy()) == ""
    assert why_not_again(RunResult(Kind.FAILED, 130, "stopped by Ctrl-C", final=True), [], 0, THREE) == ""


def test_pauses_are_short() -> None:
    assert [pause_seconds(restart) for restart in (1, 2, 3, 4, 5, 30)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
