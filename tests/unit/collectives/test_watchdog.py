"""The watchdog on tasks and a clock that the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from fleet_train import timeouts
from fleet_train.collectives import engines as module
from fleet_train.collectives.engine import CallContext
from fleet_train.collectives.engines import Watchdog
from fleet_train.errors import WorkerFailed

FIRST, SECOND = (
    CallContext("step 1", "bucket 0", timeout_seconds=60.0),
    CallContext("step 1", "bucket 1", timeout_seconds=60.0),
)
REAL_SECONDS = 60


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + REAL_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the watchdog did not do it"
        time.sleep(0.005)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(timeouts, "WATCHDOG_POLL_SECONDS", 0.002)
    yield made
    made.watchdog.stop()


def test_oldest_that_has_not_ended_is_named_once_after_its_time(scene: Scene) -> None:
    ended, oldest, newest = scene.watch(FIRST), scene.watch(SECOND), scene.watch(FIRST)
    ended.ended = True
    scene.looked_at(oldest)
    scene.now += SECOND.timeout_seconds
    until(lambda: bool(scene.stuck))
    ((place, seconds),) = scene.stuck
    assert place is SECOND
    assert seconds == pytest.approx(SECOND.timeout_seconds)
    oldest.ended = newest.ended = True
    scene.now += 10 * SECOND.timeout_seconds
    time.sleep(0.05)
    assert len(scene.stuck) == 1


def test_nothing_is_reported_before_the_timeout(scene: Scene) -> None:
    task = scene.watch()
    scene.now += FIRST.timeout_seconds - 0.1
    scene.looked_at(task)
    assert scene.stuck == []


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


def test_a_lost_rank_ends_it_long_before_the_timeout(scene: Scene) -> None:
    scene.watch()
    scene.gone = True
    scene.now += timeouts.WATCHDOG_ASK_SECONDS + 0.1
    until(lambda: bool(scene.stuck))
    assert scene.stuck[0][0] is FIRST
    assert scene.stuck[0][1] < FIRST.timeout_seconds / 2


def test_store_is_not_asked_while_collectives_end(scene: Scene) -> None:
    scene.gone = True
    for _ in range(4):
        scene.watch().ended = True
        task = scene.watch()
        scene.looked_at(task)
        scene.now += timeouts.WATCHDOG_ASK_SECONDS - 0.1
        task.ended = True
        seen = task.looks
        until(lambda seen=seen, task=task: task.looks > seen)  # type: ignore[misc]
    assert (scene.asked, scene.stuck) == (0, [])


def test_an_unreachable_store_counts_as_a_lost_rank(scene: Scene) -> None:
    scene.watch()
    scene.gone = WorkerFailed("the store does not answer")
    scene.now += timeouts.WATCHDOG_ASK_SECONDS + 0.1
    until(lambda: bool(scene.stuck))
    assert scene.stuck[0][0] is FIRST


def test_call_that_does_not_return_is_named(scene: Scene) -> None:
    with scene.watchdog.over_a_call(FIRST):
        scene.now += FIRST.timeout_seconds
        until(lambda: bool(scene.stuck))
    assert [place for place, _ in scene.stuck] == [FIRST]


def test_call_that_has_returned_is_not(scene: Scene) -> None:
    with scene.watchdog.over_a_call(FIRST):
        pass
    later = scene.watch(SECOND)
    scene.looked_at(later)
    scene.now += SECOND.timeout_seconds
    until(lambda: bool(scene.stuck))
    assert [place for place, _ in scene.stuck] == [SECOND]


def test_call_that_raises_is_over(scene: Scene) -> None:
    with pytest.raises(RuntimeError, match="refused"), scene.watchdog.over_a_call(FIRST):
        raise RuntimeError("refused")
    scene.now += 2 * FIRST.timeout_seconds
    task = scene.watch(SECOND)
    scene.looked_at(task)
    assert scene.stuck == []


def test_stopped_watchdog_says_nothing_and_leaves_no_thread(scene: Scene) -> None:
    task = scene.watch()
    scene.looked_at(task)
    scene.watchdog.stop()
    until(lambda: "fleet_train watchdog" not in {thread.name for thread in threading.enumerate()})
    seen = task.looks
    scene.now += 2 * FIRST.timeout_seconds
    time.sleep(0.05)
    assert (task.looks, scene.stuck) == (seen, [])


def test_a_callback_may_stop_it(scene: Scene) -> None:
    """Ending the process stops the engine, on the watchdog's own thread."""
    stopped = threading.Event()

    def on_stuck(_: CallContext, __: float) -> None:
        watchdog.stop()
        stopped.set()

    watchdog = Watchdog(on_stuck, lambda: False)
    watchdog.watch(Task(), FIRST)
    scene.now += FIRST.timeout_seconds
    assert stopped.wait(REAL_SECONDS)
    watchdog.stop()


def test_without_a_task_there_is_no_thread(scene: Scene) -> None:
    assert "fleet_train watchdog" not in {thread.name for thread in threading.enumerate()}
    scene.watchdog.stop()
