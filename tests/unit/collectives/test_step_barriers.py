"""Which steps start with a barrier under ``barrier_every_steps``, and what the others skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.averaging import Held
from fleet_train.collectives.exchange import GradientExchange
from tests.unit.collectives.one_of_two import OneOfTwo, exchange_of, one_of_two

SHAPES = [(3, 2), (5,)]
STEPS = 20


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    with one_of_two(monkeypatch) as made:
        yield made


def gradients() -> list[Any]:
    return [paddle.ones(shape, "float32") for shape in SHAPES]


def run(exchange: GradientExchange, first: int = 1, last: int = STEPS, before: Callable[[int], None] = id) -> None:
    """Steps ``first`` .. ``last``; ``before`` is called between two steps with the number of the next one."""
    for step in range(first, last + 1):
        before(step)
        exchange.arrive()
        exchange.launch(0, gradients())
        exchange.wait(0)


def at(*steps: int) -> list[str]:
    return [f"step {step}" for step in steps]


def test_every_step_has_one_by_default(job: OneOfTwo) -> None:
    run(exchange_of(job, SHAPES))
    assert job.barriers == at(*range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("every", "steps"),
    [(2, [1, *range(2, STEPS + 1, 2)]), (5, [1, 2, 5, 10, 15, 20]), (7, [1, 2, 7, 14]), (50, [1, 2])],
)
def test_first_two_and_each_nth_step_have_one(job: OneOfTwo, every: int, steps: list[int]) -> None:
    run(exchange_of(job, SHAPES, barrier_every_steps=every))
    assert job.barriers == at(*steps)


def test_first_step_after_a_synchronization_point_has_one(job: OneOfTwo) -> None:
    sync_points = {
        5: lambda: job.compare("digest", 1),
        9: lambda: job.all_gather("gather", 1),
        10: lambda: job.all_gather("gather", 1),
    }
    run(exchange_of(job, SHAPES, barrier_every_steps=50), before=lambda step: sync_points.get(step, int)())
    assert job.barriers == at(1, 2, 5, 9, 10)


def test_every_synchronization_point_of_a_job_is_counted() -> None:
    """None on one rank: there is no other rank to wait for."""
    with pytest.MonkeyPatch.context() as patch, one_of_two(patch) as job:
        store: Any = type("Store", (), dict.fromkeys(("barrier", "all_gather", "broadcast", "compare"), lambda *_: []))
        job._store, real = store(), super(OneOfTwo, job)
        real.barrier("a")
        real.all_gather("b", 1)
        real.broadcast("c", 1)
        real.compare("d", 1)
        assert job.sync_points == 4
        job.reduce(np.ones(3, "float32"), "sum")
        assert job.sync_points == 5
        job._store = None


def test_steps_have_one_while_the_slowest_rank_is_slow(job: OneOfTwo) -> None:
    def told(step: int) -> None:
        job.slowest_ms = {4: 1500.0, 5: 1000.1, 6: None, 7: 1000.0}.get(step, job.slowest_ms)

    # 4 has none: what is told from then on is heard of at 5.
    run(exchange_of(job, SHAPES, barrier_every_steps=5), before=told)
    assert job.barriers == at(1, 2, 5, 6, 7, 10, 15, 20)


def test_step_after_another_programs_steps_has_one(job: OneOfTwo) -> None:
    one, other = (exchange_of(job, SHAPES, barrier_every_steps=50) for _ in range(2))
    run(one, 1, 4)
    run(other, 1, 4)
    run(one, 5, 8)
    run(other, 5, 8)
    assert job.barriers == [*at(1, 2), "step 1 of program 1", "step 2 of program 1", "step 5", "step 5 of program 1"]


def test_step_after_local_steps_of_another_program_has_one(job: OneOfTwo) -> None:
    """Nothing is sent in them, so nobody knows how far the ranks are apart."""
    one = exchange_of(job, SHAPES, barrier_every_steps=50)
    settings = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 10}
    other = exchange_of(job, SHAPES, divergence_check_steps=0, **settings)
    run(one, 1, 4)
    run(other, 1, 4)
    run(one, 5, 8)
    assert job.barriers == at(1, 2, 5)


def test_a_loaded_position_continues_and_starts_with_two(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES, barrier_every_steps=5)
    exchange.step = 101
    run(exchange, 102, 112)
    assert job.barriers == at(102, 103, 105, 110)


def test_averagings_keep_theirs(job: OneOfTwo) -> None:
    settings = {"use_local_sgd": True, "local_sgd_is_warm_steps": 4, "local_sgd_steps": 2}
    exchange = exchange_of(job, SHAPES, barrier_every_steps=50, divergence_check_steps=0, **settings)
    for step in range(1, 9):
        run(exchange, step, step)
        exchange.finish(Held(gradients(), [], []), ["p0", "p1"], None)
    assert job.barriers == [*at(1, 2), "averaging after step 6 0", "averaging after step 8 0"]


def test_bytes_and_steps_are_counted_without_one(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES, barrier_every_steps=50)
    run(exchange)
    read = job.clock.read()
    assert read.sent_bytes == pytest.approx(STEPS * 4 * 11)
    assert read.steps == STEPS


def test_note_covers_all_steps_since_the_last(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    real = job.notes.own
    monkeypatch.setattr(job.notes, "own", lambda digest: (told.append((note := real(digest)).steps), note)[1])
    exchange = exchange_of(job, SHAPES, barrier_every_steps=10)
    run(exchange)
    assert job.barriers == at(1, 2, 10, 20)
    assert sum(told) + job.clock.read_unsent().steps == STEPS
    assert told[2:] == [8, 10]
