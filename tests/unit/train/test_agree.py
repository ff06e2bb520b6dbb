"""Rank 0 answers for all: the same value, or the same error, on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fleet_train.errors import CheckpointError
from fleet_train.train import agree


class Ranks:
    """Stands in for the facade: two threads are the ranks, gather meets at a barrier."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._brought: list[Any] = [None, None]
        self._local = threading.local()

    def is_first_worker(self) -> bool:
        return bool(self._local.rank == 0)

    def gather(self, value: Any) -> list[Any]:
        self._brought[self._local.rank] = value
        self._barrier.wait()
        return list(self._brought)

    def run(self, action: Callable[[], Any]) -> list[Any]:
        """What each rank got: a value, or the error it was raised with."""
        results: list[Any] = [None, None]

        def on_rank(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = action()
            except CheckpointError as error:
                results[rank] = str(error)

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()
    monkeypatch.setattr(agree, "fleet", ranks)
    return ranks


def test_every_rank_gets_the_first_ones_answer(ranks: Ranks) -> None:
    answer = {"folder": "läuft", "steps": [1, 2], "none": None}
    assert ranks.run(lambda: agree.ask_first_worker(lambda: answer)) == [answer, answer]


def test_question_is_asked_once(ranks: Ranks) -> None:
    asked: list[int] = []
    ranks.run(lambda: agree.ask_first_worker(lambda: asked.append(1)))
    assert asked == [1]


def test_error_of_the_first_rank_is_raised_on_all(ranks: Ranks) -> None:
    def fail() -> None:
        raise CheckpointError("tensor 'w' is missing")

    assert ranks.run(lambda: agree.ask_first_worker(fail)) == ["tensor 'w' is missing"] * 2


def test_disk_error_of_the_first_rank_is_raised_on_all(ranks: Ranks) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    expected = (
        "rank 0 cannot use its disk: [Errno 28] No space left on device; make that writable, with room left, or give "
        "another folder"
    )
    assert ranks.run(lambda: agree.ask_first_worker(fail)) == [expected] * 2
