"""What a spawned rank's answer and end say, and which rank is named when one has failed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fleet_train import timeouts
from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import ClusterError, LinkFailed, Preempted, RankFailed
from fleet_train.launch.node import Node
from fleet_train.launch.report import WorkerResult
from fleet_train.spawning import shipping
from fleet_train.spawning.ranks import RankOutcome, SpawnedRank, results, silent_end
from tests.support.processes import clean_environ, until

NODE = Node(("127.0.0.1",), 0, 40000, 3, None, "lo")


def ended(
    rank: int, status: int, seconds: float, *, stopped: bool = False, lines: tuple[str, ...] = ()
) -> WorkerResult:
    code, number = (status, None) if status >= 0 else (None, -status)
    return WorkerResult(rank, "", 0, code, number, seconds, stopped, "", lines)


def well(rank: int) -> RankOutcome:
    return RankOutcome(ended(rank, 0, 3.0), b"%d" % rank)


def raised(rank: int, seconds: float, what: str = "ValueError: no", ends_at: float | None = None) -> RankOutcome:
    report = FailureReport(rank, rank, "raised", what.partition(":")[0], what, 1, (), seconds)
    end = ended(rank, 1, ends_at or seconds + 1)
    return RankOutcome(end, None, (report,), "failed", what, f"Traceback\n{what}\n")


def secondary(rank: int, seconds: float) -> RankOutcome:
    return RankOutcome(ended(rank, 11, seconds), None, (), "failed", "WorkerFailed: rank 1 was lost", "Traceback\n")


def stopped(rank: int, seconds: float) -> RankOutcome:
    return RankOutcome(ended(rank, -signal.SIGTERM, seconds, stopped=True))


def failure(outcomes: list[RankOutcome], told: tuple[FailureReport, ...] = (), log_dir: str = "") -> RankFailed:
    with pytest.raises(RankFailed) as failed:
        results(outcomes, told, NODE, log_dir)
    return failed.value


def test_the_rank_that_raised_first_is_named_whichever_ended_first() -> None:
    late_end = raised(2, 1.0, "KeyError: 'x'", ends_at=9.0)
    error = failure([secondary(0, 2.0), raised(1, 1.5), late_end])
    assert str(error).splitlines()[0] == "rank 2 of 3 failed first: KeyError: 'x', after 1.0 s"
    assert (error.rank, error.rank_exit_code, error.signal_number) == (2, 1, None)
    assert error.traceback == "Traceback\nKeyError: 'x'\n"
    assert "rank 0 followed: WorkerFailed: rank 1 was lost" in str(error)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_who_followed_is_not_named_although_it_ended_first() -> None:
    killed = RankOutcome(ended(1, -signal.SIGKILL, 5.0, lines=("step 1", "step 2")))
    error = failure([secondary(0, 2.0), killed, stopped(2, 6.0)])
    assert str(error).startswith(
        "rank 1 of 3 failed first: killed by SIGKILL (the kernel does this when memory runs out"
    )
    assert "  | step 2" in str(error)
    assert "rank 2 followed: stopped by SIGTERM" in str(error)
    assert error.signal_number == signal.SIGKILL


def test_no_rank_is_named_where_living_ranks_could_not_communicate() -> None:
    link = FailureReport(NO_RANK, 0, "link", "...", "step 4: all ranks are alive", 11, (), 2.0)
    with pytest.raises(LinkFailed, match=r"^step 4: all ranks are alive$"):
        results([replace(secondary(0, 2.0), reports=(link,)), secondary(1, 2.1), stopped(2, 4.0)], (), NODE, "")
    assert failure([secondary(0, 2.0), raised(1, 1.5), stopped(2, 4.0)], (link,)).rank == 1


def test_only_ranks_that_end_well_behind_their_results_are_no_failure() -> None:
    assert results([well(0), well(1), well(2)], (), NODE, "") == [b"0", b"1", b"2"]
    silent = RankOutcome(ended(1, 0, 1.0), None, (silent_end(1, 1.0),))
    error = failure([well(0), silent, well(2)], log_dir="/logs")
    assert "rank 1 of 3 failed first: exit code 0 (its process ended with exit code 0 before its" in str(error)
    assert str(error).endswith("complete output is in /logs")
    crashed = replace(well(1), end=ended(1, -signal.SIGSEGV, 3.0))
    assert "rank 1 of 3 failed first: killed by SIGSEGV" in str(failure([well(0), crashed, well(2)]))


def test_preempted_ranks_and_unguarded_scripts_have_errors_of_their_own() -> None:
    ranks = [RankOutcome(ended(rank, 12, 3.0), kind="preempted", message="SIGTERM") for rank in (0, 1)]
    with pytest.raises(Preempted, match="rank 0 stopped gracefully: SIGTERM"):
        results(ranks, (), NODE, "")
    unguarded = replace(raised(0, 1.0), kind="unguarded", message="put it below a guard")
    with pytest.raises(ClusterError, match=r"^put it below a guard$"):
        results([unguarded, raised(1, 1.1)], (), NODE, "")


Starter = Callable[[Callable[[], object]], SpawnedRank]


@pytest.fixture
def started() -> Iterator[Starter]:
    every: list[SpawnedRank] = []

    def start(train: Callable[[], object]) -> SpawnedRank:
        greeting = shipping.create()
        header = {"train": train.__name__, "path": sys.path, "argv": sys.argv, "sources": {}}
        shipping.write(greeting, header, shipping.ship(train, ()))
        every.append(SpawnedRank(0, clean_environ() | {"PADDLE_TRAINER_ID": "0"}, greeting, None))
        os.close(greeting)
        return every[-1]

    yield start
    for rank in every:
        rank.kill_group()
        rank.wait()
        rank.close()


def end_of(rank: SpawnedRank) -> tuple[int, float]:
    end = until(rank.end)
    assert end is not None
    return end


def linger() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


def test_a_failure_is_known_from_the_answer_although_threads_go_on(started: Starter) -> None:
    def train() -> None:
        linger()
        raise ValueError("no data")

    rank = started(train)
    status, at = end_of(rank)
    assert (status, rank.has_ended, rank.failure["message"]) == (1, False, "ValueError: no data")
    (report,) = rank.reports(at - 2.0)
    assert (report.is_own, report.what, report.seconds) == (True, "ValueError", 2.0)
    rank.ask_to_stop()
    rank.kill_group()
    rank.wait()
    assert end_of(rank)[0] == 1, "how it was stopped does not count"


def test_a_call_that_has_returned_is_an_end_once_its_threads_had_time(
    started: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = started(linger)
    while rank.result is None:
        assert rank.end() is None
        time.sleep(0.01)
    assert rank.end() is None
    monkeypatch.setattr(timeouts, "SPAWN_EXIT_SECONDS", 0.0)
    assert end_of(rank)[0] == 0
    rank.ask_to_stop()
    rank.wait()
    assert (end_of(rank)[0], rank.asked_to_stop, rank.reports(0.0)) == (0, 0, [])
