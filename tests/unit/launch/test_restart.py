from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_train.cluster.failure_report import FailureReport
from fleet_train.launch.ends import RankEnd
from fleet_train.launch.request import FaultPolicy
from fleet_train.launch.restart import Kind, Outcome, pause_seconds, why_not_again

THREE = FaultPolicy(max_restarts=3)


def failed(
    code: int | None = None, signal: int | None = None, *, rank: int = 1, last: str = "", seconds: float = 20.0
) -> Outcome:
    end = RankEnd(rank, "10.0.0.2:6170", 1, code, signal, seconds, False, "log", (last,) if last else ())
    return Outcome(Kind.FAILED, end.shell_code, ends=(end,), culprit=end)


LOST = Outcome(Kind.FAILED, 11, "the launcher of node 1 was lost", without_culprit=True)


@pytest.mark.parametrize("outcome", [failed(1), failed(signal=9), failed(signal=11), failed(6), failed(11), LOST])
def test_what_may_go_better_next_time_is_tried_again(outcome: Outcome) -> None:
    assert why_not_again(outcome, [], THREE) is None


@pytest.mark.parametrize("code", [2, 3, 4, 5, 7, 8, 9, 10, 13])
def test_a_mistake_in_flags_profile_data_or_state_is_not_tried_again(code: int) -> None:
    assert f"exit code {code} stands for a mistake" in (why_not_again(failed(code), [], THREE) or "")


def test_a_mistake_beside_a_silent_node_may_come_from_its_loss() -> None:
    assert why_not_again(replace(failed(5), silent=("node 1 (10.0.0.2)",)), [], THREE) is None


def test_the_same_exception_twice_is_not_tried_a_third_time() -> None:
    first, again = failed(1, last="ValueError: bad row 17"), failed(1, last="ValueError: bad row 23")
    assert why_not_again(again, [first], THREE) == "it has failed twice in the same way"
    assert why_not_again(failed(1, last="OSError: full"), [first], THREE) is None
    assert why_not_again(failed(1, rank=0, last="ValueError: bad row 17"), [first], THREE) is None
    assert why_not_again(failed(1, last="ValueError: bad row 17", seconds=700.0), [first], THREE) is None


def test_ends_that_come_from_outside_may_repeat() -> None:
    for outcome in (failed(signal=9), failed(11), LOST):
        assert why_not_again(outcome, [outcome], THREE) is None
    assert why_not_again(failed(signal=11), [failed(signal=11)], THREE) is not None


def test_what_a_rank_has_reported_counts_however_it_ended() -> None:
    def reported(line: str, code: int) -> Outcome:
        report = FailureReport(1, 1, "raised", "ValueError", "...", code, (line,))
        end = RankEnd(1, "10.0.0.2:6170", 1, None, 9, 20.0, True, "log", ("cleaning up",), report)
        return Outcome(Kind.FAILED, end.shell_code, ends=(end,), culprit=end)

    assert "exit code 10 stands for a mistake" in (why_not_again(reported("DataError: x", 10), [], THREE) or "")
    first, again = reported("ValueError: bad row 17", 1), reported("ValueError: bad row 23", 1)
    assert why_not_again(again, [first], THREE) == "it has failed twice in the same way"
    assert why_not_again(reported("OSError: full", 1), [first], THREE) is None


def test_restarts_are_counted() -> None:
    assert why_not_again(failed(signal=9), [LOST, LOST], THREE) is None
    assert why_not_again(failed(signal=9), [LOST] * 3, THREE) == "all restarts are used up (--max_restarts=3)"


def test_without_restarts_or_after_a_stop_on_purpose_nothing_needs_to_be_said() -> None:
    assert why_not_again(failed(signal=9), [], FaultPolicy()) == ""
    assert why_not_again(Outcome(Kind.FAILED, 130, "stopped by Ctrl-C", final=True), [], THREE) == ""


def test_pauses_are_short() -> None:
    assert [pause_seconds(restart) for restart in (1, 2, 3, 4, 5, 30)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
