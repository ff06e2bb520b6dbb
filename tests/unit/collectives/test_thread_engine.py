"""The thread engine on collectives that only take time, the watchdog of streams, and devices."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import timeouts
from fleet_train.collectives import engine as devices
from fleet_train.collectives import engines as thread
from fleet_train.collectives import job as choose
from fleet_train.collectives.engine import HAND_OVER, CallContext, Collective, GpuDevice, HostDevice, Stage, Stages
from fleet_train.collectives.engines import StreamEngine, ThreadEngine, Watchdog
from fleet_train.collectives.job import make_engine
from fleet_train.errors import ScheduleMismatch, WorkerFailed
from fleet_train.log import logger
from tests.support.processes import until
from tests.unit.collectives.played import PLACE, Attributed, Group, stages

SECONDS = 60
GROUP = Group(0)


class Blocking(Collective):
    """A collective that calls its ``tensor`` and blocks for as long as that takes."""

    nbytes = 0

    def begin(self, sync_op: bool) -> None:
        assert sync_op, "the thread engine's calls block"
        self.tensor()


def calling(action: Callable[[], object], more: bool = False) -> Stage:
    return Stage((Blocking("all_reduce", GROUP, action),), more)


@pytest.fixture
def engine(blamed: Attributed) -> Iterator[ThreadEngine]:
    made = ThreadEngine(paddle.CPUPlace(), blamed)
    yield made
    made.stop()


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


@pytest.mark.parametrize("here", [False, True], ids=["on a thread", "here"])
@pytest.mark.parametrize(
    ("error", "told", "places"),
    [
        (RuntimeError("connection reset"), r"^step 1, bucket 0: connection reset", [PLACE]),
        (ScheduleMismatch("ours"), "^ours", []),  # what has a name already is not blamed on peers
    ],
)
def test_collective_that_fails_is_blamed_once_and_the_next_one_runs(
    engine: ThreadEngine, blamed: Attributed, error: Exception, told: str, places: list[Any], here: bool
) -> None:
    def lose() -> None:
        raise error

    def carry_out() -> None:
        given = stages(calling(lose))
        engine.run_here(given, PLACE) if here else engine.start(given, PLACE).result()

    with pytest.raises((WorkerFailed, ScheduleMismatch), match=told):
        carry_out()
    assert blamed.places == places
    assert engine.start(stages(calling(lambda: None), result=1), PLACE).result() == 1


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


@pytest.fixture
def waits(engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What happens 65 s into each wait for a result, which lasts 70 s at most; the engine takes note of it."""
    happens, now = list[Callable[[], object]](), 0.0

    def wait(awaited: Future[int], timeout: float) -> None:
        nonlocal now
        assert timeout == 70.0
        now += 65.0
        happens.pop(0)()
        while engine._moved_at < now:
            time.sleep(0.01)
        if not happens:
            awaited.exception(SECONDS)

    monkeypatch.setattr(thread.time, "monotonic", lambda: now)
    monkeypatch.setattr(thread, "_await", wait)
    yield happens
    assert happens == []


def test_a_result_is_awaited_while_collectives_end_before_it(
    engine: ThreadEngine, waits: list[Callable[[], object]]
) -> None:
    moves = threading.Semaphore(0)
    waits += [moves.release] * 4
    place = replace(PLACE, timeout_seconds=10.0)
    assert engine.start(stages(*[calling(moves.acquire)] * 4, result=1), place).result() == 1


def test_time_at_a_barrier_is_no_silence_of_the_collective_behind_it(
    engine: ThreadEngine, waits: list[Callable[[], object]]
) -> None:
    barrier, released = Future[int](), threading.Event()
    waits += [lambda: barrier.set_result(1), released.set]
    behind = stages(calling(lambda: released.wait(SECONDS)), result=1)
    assert engine.start(behind, replace(PLACE, timeout_seconds=10.0), barrier=barrier).result() == 1


FIRST, SECOND = (
    CallContext("step 1", "bucket 0", timeout_seconds=60.0),
    CallContext("step 1", "bucket 1", timeout_seconds=60.0),
)


class Task:
    """Counts how often the watchdog has looked at it."""

    def __init__(self) -> None:
        self.looks = 0
        self.ended = False

    def is_completed(self) -> bool:
        self.looks += 1
        return self.ended


class Scene:
    """A watchdog with what it is told and what it says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked = 0
        self.gone: bool | Exception = False
        self.stuck: list[tuple[CallContext, float]] = []
        self.watchdog = Watchdog(lambda place, seconds: self.stuck.append((place, seconds)), self._is_hopeless)

    def _is_hopeless(self) -> bool:
        self.asked += 1
        if isinstance(self.gone, Exception):
            raise self.gone
        return self.gone

    def watch(self, context: CallContext = FIRST) -> Task:
        task = Task()
        self.watchdog.watch(task, context)
        return task

    def looked_at(self, task: Task) -> None:
        """Until the watchdog has seen ``task``, and all that the test has set before, and has acted on it."""
        seen = task.looks
        until(lambda: task.looks >= seen + 3)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene()
    monkeypatch.setattr(thread, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(timeouts, "WATCHDOG_POLL_SECONDS", 0.002)
    yield made
    made.watchdog.stop()


def test_oldest_that_has_not_ended_is_named_once_after_its_time(scene: Scene) -> None:
    ended, oldest, newest = scene.watch(FIRST), scene.watch(SECOND), scene.watch(FIRST)
    ended.ended = True
    scene.looked_at(oldest)
    scene.now += SECOND.timeout_seconds - 0.1
    scene.looked_at(oldest)
    assert scene.stuck == []
    scene.now += 0.1
    until(lambda: bool(scene.stuck))
    ((place, seconds),) = scene.stuck
    assert place is SECOND
    assert seconds == pytest.approx(SECOND.timeout_seconds)
    oldest.ended = newest.ended = True
    scene.now += 10 * SECOND.timeout_seconds
    assert len(scene.stuck) == 1


def test_anything_that_ends_is_progress(scene: Scene) -> None:
    slow, quick = scene.watch(), scene.watch()
    scene.now += FIRST.timeout_seconds - 0.1
    scene.looked_at(slow)
    quick.ended = True
    scene.looked_at(slow)
    scene.now += FIRST.timeout_seconds - 0.1
    scene.looked_at(slow)
    assert scene.stuck == []
    scene.now += 0.2
    until(lambda: bool(scene.stuck))


def test_time_in_which_nothing_is_in_flight_does_not_count(scene: Scene) -> None:
    first = scene.watch()
    first.ended = True
    looks = first.looks
    until(lambda: first.looks > looks)
    scene.now += 100 * FIRST.timeout_seconds
    task = scene.watch()
    scene.looked_at(task)
    assert (scene.stuck, scene.asked) == ([], 0)


def test_store_is_asked_after_some_seconds_without_progress_and_then_at_times(scene: Scene) -> None:
    task = scene.watch()
    scene.now += timeouts.WATCHDOG_ASK_SECONDS - 0.1
    scene.looked_at(task)
    assert scene.asked == 0
    scene.now += 0.2
    until(lambda: scene.asked == 1)
    scene.looked_at(task)
    assert scene.asked == 1
    scene.now += timeouts.WATCHDOG_ASK_SECONDS + 0.1
    until(lambda: scene.asked == 2)
    assert scene.stuck == []


def test_copy_to_the_host_is_of_the_value_of_now() -> None:
    tensor = paddle.to_tensor([1.0, 2.0])
    copy = HostDevice().to_host(tensor)
    tensor.zero_()
    assert copy.read().tolist() == [1.0, 2.0]
    assert HostDevice().to_device(np.array([3, 4])).tolist() == [3, 4]


def test_processors_have_threads_and_gpus_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, kind in ((paddle.CPUPlace(), ThreadEngine), ("gpu:0", StreamEngine)):
        engine = make_engine(place, Attributed(), lambda: False, lambda *_: None)
        assert type(engine) is kind
        engine.stop()
    hopeless, stuck = object(), object()
    monkeypatch.setattr(choose, "Watchdog", lambda *told: SimpleNamespace(told=told, stop=lambda: None))
    engine = make_engine("gpu:0", Attributed(), hopeless, stuck)  # type: ignore[arg-type]
    assert engine._watchdog.told == (stuck, hopeless)  # type: ignore[attr-defined]
    engine.stop()


@pytest.mark.parametrize("gone", [True, WorkerFailed("the store does not answer")])
def test_a_lost_rank_or_store_ends_it_long_before_the_timeout(scene: Scene, gone: Any) -> None:
    scene.watch()
    scene.gone = gone
    scene.now += timeouts.WATCHDOG_ASK_SECONDS + 0.1
    until(lambda: bool(scene.stuck))
    assert scene.stuck[0][0] is FIRST
    assert scene.stuck[0][1] < FIRST.timeout_seconds / 2


def test_a_device_that_cannot_be_asked_is_told_once_and_its_collective_counts_as_unfinished(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *values: said.append(text % values))
    task = scene.watch()

    def fail() -> bool:
        task.looks += 1
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(task, "is_completed", fail)
    scene.looked_at(task)
    told = f"{FIRST.what}: the device cannot be asked whether it is done: an illegal memory access was encountered"
    assert said == [told]
    assert scene.stuck == []
    scene.now += FIRST.timeout_seconds
    until(lambda: bool(scene.stuck))
    assert scene.stuck[0][0] is FIRST


def test_what_has_ended_is_dropped_by_the_thread_that_watches_the_next_one(scene: Scene) -> None:
    """Dropping Paddle's task destroys an event of the device."""
    dropped_by: list[str] = []
    ended, going_on = scene.watch(), scene.watch(SECOND)
    weakref.finalize(ended, lambda: dropped_by.append(threading.current_thread().name))
    ended.ended = True
    scene.looked_at(going_on)
    del ended
    gc.collect()
    assert dropped_by == []
    scene.watch()
    assert dropped_by == [threading.current_thread().name]


def test_call_that_does_not_return_is_named_and_one_that_returns_or_raises_is_not(scene: Scene) -> None:
    assert "fleet_train watchdog" not in {each.name for each in threading.enumerate()}
    with scene.watchdog.over_a_call(FIRST):
        pass
    with pytest.raises(RuntimeError, match="refused"), scene.watchdog.over_a_call(FIRST):
        raise RuntimeError("refused")
    scene.now += 2 * FIRST.timeout_seconds
    with scene.watchdog.over_a_call(SECOND):
        scene.looked_at(scene.watch(FIRST))
        assert scene.stuck == []
        scene.now += SECOND.timeout_seconds
        until(lambda: bool(scene.stuck))
    assert [place for place, _ in scene.stuck] == [SECOND]


def test_a_gpus_events_give_seconds_and_its_copies_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of Paddle are written down; ``passed`` are the events that have passed."""
    did: list[str] = []
    passed: list[int] = []
    numbers = itertools.count(1)

    def asked(number: int) -> bool:
        """It passes while it is asked for the third time; nothing blocks the host."""
        if number in passed:
            return True
        did.append(f"ask {number}")
        if did[-2:] == [f"ask {number}"] * 2:
            passed.append(number)
        return False

    def event(enable_timing: bool) -> Any:
        assert enable_timing, "times are asked for"
        number = next(numbers)
        return SimpleNamespace(
            record=lambda: did.append(f"record {number}"),
            query=lambda: asked(number),
            elapsed_time=lambda later: 250.0 * (later.number - number),
            number=number,
        )

    def tensor(name: str) -> Any:
        def copy(place: str, blocking: bool) -> Any:
            assert blocking is False, "the host must not wait"
            did.append(f"copy {name} to {place}")
            return tensor(f"{name} on {place}")

        return SimpleNamespace(_copy_to=copy, numpy=lambda: f"array of {name}", name=name)

    fake = SimpleNamespace(
        device=SimpleNamespace(Event=event),
        CUDAPinnedPlace=lambda: "pinned",
        to_tensor=lambda array, place: tensor(f"{place} {array}"),
    )
    monkeypatch.setattr(devices, "paddle", fake)
    device = GpuDevice("gpu:0")
    first, second = device.moment(), device.moment()
    passed.append(1)
    assert (second.seconds_since(first), first.has_passed()) == (0.25, True)
    assert not second.await_passed(seconds=0.0)
    assert second.await_passed()
    assert did == ["record 1", "record 2", "ask 2", "ask 2"]
    copy = device.to_host(tensor("loss"))
    assert did[4:] == ["copy loss to pinned", "record 3"]
    assert copy.read() == "array of loss on pinned"
    assert did[6:] == ["ask 3", "ask 3"]
    assert device.to_device("a").name == "pinned a on gpu:0"
    assert did[8:] == ["copy pinned a to gpu:0", "record 4"]
    device.to_device("b")
    assert [pinned.name for pinned, _ in device._sent] == ["pinned a", "pinned b"]
    passed.append(4)
    device.to_device("c")
    assert [pinned.name for pinned, _ in device._sent] == ["pinned b", "pinned c"]
