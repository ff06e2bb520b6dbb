"""What a spawn returns or raises, from how the launcher saw its ranks end and what they have written."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from fleet_train.cluster.store.reports import FailureReport
from fleet_train.errors import ClusterError, LinkFailed, Preempted, RankFailed, WorkerFailed
from fleet_train.launch.attempts import Kind, RunResult
from fleet_train.launch.report import WorkerResult, choose_root_cause
from fleet_train.spawning import shipping
from fleet_train.spawning.outcome import Answer, results
from tests.support.processes import clean_environ


def ended(rank: int, status: int, *, stopped: bool = False, lines: tuple[str, ...] = ()) -> WorkerResult:
    code, number = (status, None) if status >= 0 else (None, -status)
    return WorkerResult(rank, "", 0, code, number, 3.0 + rank, stopped, f"/logs/workerlog.{rank}", lines)


def returned(rank: int) -> Answer:
    return {"result": b"%d" % rank}


def raised(message: str, kind: str = "failed", code: int = 1) -> Answer:
    return {"kind": kind, "message": message, "exit_code": code, "traceback": f"Traceback\n{message}\n"}


def failure(ends: list[WorkerResult], answers: list[Answer], keeps_logs: bool = False) -> RankFailed:
    result = RunResult(Kind.FAILED, 1, "", tuple(ends), root_cause=choose_root_cause(ends))
    with pytest.raises(RankFailed) as failed:
        results(result, answers, keeps_logs)
    return failed.value


def test_the_launchers_root_cause_is_named_with_what_it_has_written_itself() -> None:
    ends = [ended(0, 11), ended(1, 1), ended(2, -signal.SIGTERM, stopped=True)]
    answers: list[Answer] = [raised("WorkerFailed: rank 1 was lost"), raised("KeyError: 'x'\nmore"), None]
    error = failure(ends, answers, keeps_logs=True)
    assert str(error).splitlines()[0] == "rank 1 of 3 failed first: KeyError: 'x', after 4.0 s"
    assert (error.rank, error.rank_exit_code, error.signal_number) == (1, 1, None)
    assert error.traceback == "Traceback\nKeyError: 'x'\nmore\n"
    assert "\nrank 0 followed: WorkerFailed: rank 1 was lost\nrank 2 followed: stopped by SIGTERM\n" in str(error)
    assert str(error).endswith("complete output is in /logs")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_a_rank_that_was_exiting_when_it_was_stopped_has_the_code_of_its_failure() -> None:
    report = FailureReport(0, 0, "raised", "OSError", "OSError: disk full", 1, ("its last line",), 1.0)
    frozen = replace(ended(0, -signal.SIGKILL, stopped=True), report=report)
    error = failure([frozen], [raised("OSError: disk full", code=7)])
    assert (error.rank_exit_code, error.signal_number) == (7, None)
    error = failure([frozen], [None])
    assert (error.rank_exit_code, error.signal_number) == (None, signal.SIGKILL)
    assert "its traceback ends with:\n  | its last line" in str(error)


def test_a_rank_that_a_signal_ended_has_its_last_lines() -> None:
    killed = ended(1, -signal.SIGKILL, lines=("step 1", "step 2"))
    error = failure([ended(0, 11), killed], [raised("WorkerFailed: rank 1 was lost"), None])
    assert str(error).startswith(
        "rank 1 of 2 failed first: killed by SIGKILL (the kernel does this when memory runs out"
    )
    assert "  | step 2" in str(error)
    assert error.signal_number == signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "kind"), [(LinkFailed.exit_code, LinkFailed), (ClusterError.exit_code, ClusterError), (143, WorkerFailed)]
)
def test_without_a_rank_to_blame_the_launchers_message_is_the_error(code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^step 4: all ranks are alive$") as failed:
        results(RunResult(Kind.FAILED, code, "step 4: all ranks are alive", without_root_cause=True), [None], False)
    assert type(failed.value) is kind


def test_only_ranks_that_end_well_behind_their_results_are_no_failure() -> None:
    done = RunResult(Kind.DONE, 0, "", (ended(0, 0), ended(1, 0)))
    assert results(done, [returned(0), returned(1)], False) == [b"0", b"1"]
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed first: .* exit code 0 before its function had") as failed:
        results(done, [returned(0), None], False)
    assert (failed.value.rank, failed.value.rank_exit_code) == (1, 0)


def test_preempted_ranks_and_unguarded_scripts_have_errors_of_their_own() -> None:
    stopped = RunResult(Kind.PREEMPTED, 12, "a rank was asked to stop", (ended(0, 0), ended(1, 12)))
    with pytest.raises(Preempted, match="rank 1 stopped gracefully: SIGTERM"):
        results(stopped, [returned(0), raised("SIGTERM", "preempted", 12)], False)
    with pytest.raises(Preempted, match="a rank was asked to stop"):
        results(stopped, [returned(0), None], False)
    unguarded = RunResult(Kind.FAILED, 1, "", (ended(0, 1),), root_cause=ended(0, 1))
    with pytest.raises(ClusterError, match=r"^put it below a guard$"):
        results(unguarded, [raised("put it below a guard", "unguarded")], False)


def train(what: str) -> Any:
    import threading
    import time

    threading.Thread(target=time.sleep, args=(600,)).start()
    if what == "raises":
        raise ValueError("no data")
    return what


_RANK = """
import sys
from fleet_train import timeouts
from fleet_train.spawning import rank_main
timeouts.SPAWN_EXIT_SECONDS = timeouts.FAILED_RANK_EXIT_SECONDS = 0.1
sys.exit(rank_main.main(sys.argv[1]))
"""


@pytest.mark.parametrize(("what", "status"), [("returns", 0), ("raises", 1)])
def test_a_rank_ends_although_threads_of_its_function_go_on(what: str, status: int) -> None:
    with shipping.created() as greeting, shipping.created() as answer:
        message = {"train": "train", "path": sys.path, "argv": [], "sources": {}, "answers": [shipping.path_of(answer)]}
        shipping.write(greeting, message | {"call": shipping.ship(train, (what,)), "keeps_logs": False})
        command = [sys.executable, "-c", _RANK, shipping.path_of(greeting)]
        environ = clean_environ() | {"PADDLE_TRAINER_ID": "0"}
        assert subprocess.run(command, env=environ, timeout=60, check=False).returncode == status
        told = shipping.read(answer)
    if status:
        assert (told["message"], told["exit_code"]) == ("ValueError: no data", 1)
    else:
        assert shipping.unship(told["result"]) == "returns"
