"""The thread engine on collectives that only take time: which thread runs what, in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import paddle
import pytest

from fleet_train import timeouts
from fleet_train.collectives import engines as thread
from fleet_train.collectives.engine import HAND_OVER, Collective, Stage, Stages
from fleet_train.collectives.engines import ThreadEngine
from fleet_train.errors import ScheduleMismatch, WorkerFailed
from tests.unit.collectives.recorded import PLACE, Attributed, Group, stages

SECONDS = 60
GROUP = Group(0)


class Blocking(Collective):
    """A collective that calls its ``tensor`` and blocks for as long as that takes."""

    def begin(self, sync_op: bool) -> None:
        assert sync_op, "the thread engine's calls block"
        self.tensor()


def calling(action: Callable[[], object], more: bool = False) -> Stage:
    return Stage((Blocking("all_reduce", GROUP, action),), more)


@pytest.fixture
def blamed() -> Attributed:
    return Attributed()


@pytest.fixture
def engine(blamed: Attributed) -> Iterator[ThreadEngine]:
    made = ThreadEngine(paddle.CPUPlace(), blamed)
    yield made
    made.stop()


def test_one_communicator_keeps_the_order_of_the_calls(engine: ThreadEngine) -> None:
    released, order = threading.Event(), list[str]()

    def first() -> None:
        released.wait(SECONDS)
        order.append("first")

    running = [engine.start(stages(calling(first), result=1), PLACE)]
    running.append(engine.start(stages(calling(lambda: order.append("second")), result=2), PLACE))
    assert order == []
    released.set()
    assert [one.result() for one in running] == [1, 2]
    assert order == ["first", "second"]


def test_another_communicator_continues_meanwhile(engine: ThreadEngine) -> None:
    released = threading.Event()
    held = engine.start(stages(calling(lambda: released.wait(SECONDS))), PLACE, communicator=0)
    assert engine.start(stages(calling(lambda: None), result=2), PLACE, communicator=2).result() == 2
    assert not held.done()
    released.set()
    held.result()


def test_all_stages_of_a_start_are_carried_out_before_the_next_one_of_its_communicator(engine: ThreadEngine) -> None:
    order = list[str]()
    two = stages(calling(lambda: order.append("a1"), more=True), Stage(more=True), calling(lambda: order.append("a2")))
    running = [engine.start(two, PLACE), engine.start(stages(calling(lambda: order.append("b"))), PLACE)]
    for one in running:
        one.result()
    assert order == ["a1", "a2", "b"]
    engine.step_on()
    assert order == ["a1", "a2", "b"]


def test_first_part_runs_where_it_is_started_and_the_rest_on_the_thread(engine: ThreadEngine) -> None:
    threads = list[threading.Thread]()

    def method() -> Stages[bool]:
        threads.append(threading.current_thread())
        yield HAND_OVER
        threads.append(threading.current_thread())
        yield calling(lambda: threads.append(threading.current_thread()))
        return paddle.in_dynamic_mode()

    assert engine.start(method(), PLACE).result()
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, False]
    assert threads[1] is threads[2]


def test_start_returns_before_the_barrier_is_passed_and_the_first_collective_waits_for_it(engine: ThreadEngine) -> None:
    barrier, begun = Future[None](), threading.Event()
    running = engine.start(stages(calling(begun.set), result="done"), PLACE, barrier=barrier)
    assert not begun.wait(0.3)
    barrier.set_result(None)
    assert running.result() == "done"
    assert begun.is_set()


def test_a_failed_barrier_is_raised_by_the_result_and_nothing_is_started(
    engine: ThreadEngine, blamed: Attributed
) -> None:
    barrier, begun = Future[None](), list[int]()
    barrier.set_exception(ScheduleMismatch("another step"))
    running = engine.start(stages(calling(lambda: begun.append(1))), PLACE, barrier=barrier)
    with pytest.raises(ScheduleMismatch, match="another step"):
        running.result()
    assert (begun, blamed.places) == ([], [])


def lose() -> None:
    raise RuntimeError("connection reset")


@pytest.mark.parametrize("here", [False, True], ids=["on a thread", "here"])
def test_collective_that_fails_is_blamed_once_and_the_next_one_runs(
    engine: ThreadEngine, blamed: Attributed, here: bool
) -> None:
    def carry_out() -> None:
        if here:
            engine.run_here(stages(calling(lose)), PLACE)
        else:
            engine.start(stages(calling(lose)), PLACE).result()

    with pytest.raises(WorkerFailed, match="bucket 0: connection reset"):
        carry_out()
    assert blamed.places == [PLACE]
    assert engine.start(stages(calling(lambda: None), result=1), PLACE).result() == 1


def test_what_runs_here_is_on_the_calling_thread(engine: ThreadEngine) -> None:
    threads = list[threading.Thread]()
    assert engine.run_here(stages(calling(lambda: threads.append(threading.current_thread())), result=4), PLACE) == 4
    assert threads == [threading.current_thread()]


def test_overlapped_work_is_queued_on_the_first_communicator(engine: ThreadEngine) -> None:
    released = threading.Event()
    barrier = engine.run_in_background(lambda: released.wait(SECONDS))
    behind = engine.start(stages(calling(lambda: None), result=1), PLACE, communicator=0)
    assert not behind.done()
    released.set()
    assert barrier.result(SECONDS)
    assert behind.result() == 1


def disagree() -> None:
    raise ScheduleMismatch("ours")


def test_what_has_a_name_already_is_not_blamed_on_peers(engine: ThreadEngine, blamed: Attributed) -> None:
    with pytest.raises(ScheduleMismatch, match="ours"):
        engine.start(stages(calling(disagree)), PLACE).result()
    with pytest.raises(ScheduleMismatch, match="ours"):
        engine.run_here(stages(calling(disagree)), PLACE)
    assert blamed.places == []


def test_a_result_that_never_arrives_is_blamed_when_nothing_has_moved_for_the_bound(
    engine: ThreadEngine, blamed: Attributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "COLLECTIVE_MARGIN_SECONDS", 0.1)
    released = threading.Event()
    place = replace(PLACE, timeout_seconds=0.2)
    running = engine.start(stages(calling(lambda: released.wait(SECONDS)), result=1), place)
    with pytest.raises(WorkerFailed, match="bucket 0: no collective has ended for 0 s"):
        running.result()
    assert blamed.places == [place]
    released.set()
    assert running.result() == 1


def test_a_result_is_awaited_while_collectives_end_before_it(
    engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, moves = 0.0, threading.Semaphore(0)

    def wait(awaited: Future[int], timeout: float) -> None:
        """Stands in for a wait of 69 seconds, in which one more of four collectives ends."""
        nonlocal now
        assert timeout == 70.0
        now += 69.0
        moves.release()
        while engine._moved_at < now:
            time.sleep(0.01)
        if now == 4 * 69.0:
            awaited.exception(SECONDS)

    monkeypatch.setattr(thread.time, "monotonic", lambda: now)
    monkeypatch.setattr(thread, "_await", wait)
    place = replace(PLACE, timeout_seconds=10.0)
    running = engine.start(stages(*[calling(moves.acquire)] * 4, result=1), place)
    assert running.result() == 1
    assert now == 4 * 69.0


def test_time_at_a_barrier_is_no_silence_of_the_collective_behind_it(
    engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier opens after 65 of 70 seconds; the collective ends another 65 later."""
    now, barrier, released = 0.0, Future[int](), threading.Event()
    waits: list[float] = []

    def wait(awaited: Future[int], timeout: float) -> None:
        nonlocal now
        waits.append(timeout)
        now += 65.0
        if len(waits) == 1:
            barrier.set_result(1)
            while engine._moved_at < now:
                time.sleep(0.01)
        else:
            released.set()
            awaited.exception(SECONDS)

    monkeypatch.setattr(thread.time, "monotonic", lambda: now)
    monkeypatch.setattr(thread, "_await", wait)
    running = engine.start(
        stages(calling(lambda: released.wait(SECONDS)), result=1), replace(PLACE, timeout_seconds=10.0), barrier=barrier
    )
    assert running.result() == 1
    assert waits == [70.0, 70.0]


def test_threads_keep_no_process_from_ending(engine: ThreadEngine) -> None:
    """One of them may stand in a call of a lost rank for ever."""
    running = engine.run_in_background(threading.current_thread)
    assert running.result(SECONDS).daemon
