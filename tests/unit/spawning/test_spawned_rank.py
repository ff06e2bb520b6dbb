"""What the supervisor learns about a spawned rank: from its answer, and from the end of its process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fleet_train import timeouts
from fleet_train.spawning import shipping
from fleet_train.spawning.ranks import SpawnedRank
from tests.support.processes import clean_environ

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
    deadline = time.monotonic() + 60
    while (end := rank.end()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
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


def test_an_exit_with_0_and_without_an_answer_is_reported(started: Starter) -> None:
    rank = started(lambda: os._exit(0))
    assert end_of(rank)[0] == 0
    (report,) = rank.reports(0.0)
    assert (report.kind, report.exit_code) == ("exited", 1)
