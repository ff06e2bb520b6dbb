"""A job's requests to the store, and its errors when other ranks are missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import StepAnswer, StepNote, StoreClient
from fleet_train.collectives import job as job_module
from fleet_train.collectives.engine import CallContext, Collective
from fleet_train.collectives.job import Job
from fleet_train.errors import Absence, ConversionError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from tests.unit.collectives.in_turn import form

CLUSTER = Cluster.imagined(3, 1)
PLACE = CallContext("step 4", "step 4, bucket 1")
ABSENT = (Absence(2, "missing", "did not come"),)
CALLS: dict[str, Callable[[Job], Any]] = {
    "barrier": lambda job: job.barrier("here"),
    "all_gather": lambda job: job.all_gather("here", 7),
    "broadcast": lambda job: job.broadcast("here", 7, 1),
    "compare": lambda job: job.compare("here", 7),
}


def missing(message: str = "rank 2 did not come") -> JoinTimeout:
    error = JoinTimeout(message)
    error.absent = ABSENT
    return error


class Store:
    """A connection that writes down what it is asked, and answers or raises what it is told to."""

    endpoint = "10.0.0.1:7000/job"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            answer = self.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return ask

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.asked]


class Host:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Made:
    """A job of three, this one rank 0, and its connections; the watchdog's own is made when it is asked for."""

    def __init__(self, **answers: Any) -> None:
        self.store, self.barriers, self.watch, self.host = Store(**answers), Store(**answers), Store(**answers), Host()
        connections: dict[str, Any] = {"store": self.store, "barriers": self.barriers, "host": self.host}
        self.job = Job(CLUSTER, paddle.CPUPlace(), timeout_seconds=60.0, **connections)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    every: list[Made] = []
    connections: list[tuple[Any, ...]] = []

    def connect(endpoint: str, member: int, **options: Any) -> Any:
        connections.append((endpoint, member, options["watched"], options["timeout_seconds"]))
        assert connections == [("10.0.0.1:7000/job", 0, False, 5.0)]  # once, and over no connection that others wait in
        return every[-1].watch

    def build(**answers: Any) -> Made:
        every.append(Made(**answers))
        return every[-1]

    monkeypatch.setattr(StoreClient, "connect", connect)
    yield build
    for made in every:
        made.job.engine.stop()


@pytest.fixture
def alone() -> Iterator[Job]:
    made = Job(Cluster.imagined(1, 1), paddle.CPUPlace())
    yield made
    made.leave()


def test_one_process_passes_barriers_alone(alone: Job) -> None:
    found = [meet(alone) for meet in CALLS.values()]
    assert found == [None, {0: 7}, 7, []]
    assert (alone.sync_points, alone.gone(), alone.world_size) == (0, {}, 1)
    values = np.array([[1.0, 2.0]], "float32")
    np.testing.assert_array_equal(alone.reduce(values, "sum"), values)
    assert not np.shares_memory(alone.reduce(values, "sum"), values)
    with pytest.raises(AssertionError, match="has no store"):
        _ = alone.store


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ("barrier", ("barrier", "here", None)),
        ("all_gather", ("all_gather", "here", 7)),
        ("broadcast", ("broadcast", "here", 7, 1)),
        ("compare", ("compare", "here", 7)),
    ],
)
def test_barrier_waits_for_all_ranks_and_names_the_call(
    make: Callable[..., Made], call: str, asked: tuple[Any, ...]
) -> None:
    made = make(**{call: "answer"})
    assert CALLS[call](made.job) == (None if call == "barrier" else "answer")
    with made.job.inside("fleet.save"):
        with made.job.inside("fleet.all_reduce"):
            CALLS[call](made.job)
        CALLS[call](made.job)
    CALLS[call](made.job)
    assert made.store.asked == [(*asked, 3, 60.0, call) for call in ("", "fleet.save", "fleet.save", "")]
    assert (made.job.sync_points, made.barriers.asked) == (4, [])


@pytest.mark.parametrize("call", CALLS)
def test_two_ranks_pass_a_barrier(call: str) -> None:
    store: Any = Store()
    job = Job(Cluster.imagined(2, 1), paddle.CPUPlace(), store=store)
    CALLS[call](job)
    assert (store.names, job.sync_points) == ([call], 1)
    job.leave()


def test_bound_of_the_call_comes_before_the_jobs(make: Callable[..., Made]) -> None:
    made = make()
    made.job.barrier("a", 2.5)
    made.job.all_gather("b", 1, 3.5)
    made.job.broadcast("c", 1, 0, 4.5)
    made.job.compare("d", 1, 5.5)
    assert [asked[-2] for asked in made.store.asked] == [2.5, 3.5, 4.5, 5.5]


def test_names_are_numbered_each_for_itself(alone: Job) -> None:
    assert [alone.count(name) for name in ("a", "b", "a", "a", "b")] == [0, 0, 1, 2, 1]


def test_another_programs_turn_counts_as_a_barrier(alone: Job) -> None:
    meetings = []
    for number in (0, 0, 1, 1, 0):
        alone.mark_active_program(number)
        meetings.append(alone.sync_points)
    assert meetings == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("call", CALLS)
def test_rank_that_does_not_reach_a_barrier_is_named_by_the_failure(make: Callable[..., Made], call: str) -> None:
    made = make(**{call: missing()})
    with pytest.raises(WorkerFailed, match="rank 2 did not come") as raised:
        CALLS[call](made.job)
    assert made.job.failure is raised.value
    assert raised.value.absent == ABSENT


def test_other_errors_of_a_barrier_are_remembered_as_they_are(make: Callable[..., Made]) -> None:
    error = ScheduleMismatch("other plans")
    made = make(barrier=error)
    with pytest.raises(ScheduleMismatch):
        made.job.barrier("here")
    assert made.job.failure is error


def test_step_barrier_uses_its_own_connection_and_is_no_sync_point(make: Callable[..., Made]) -> None:
    answer, note = StepAnswer(3.0, None, 4), StepNote(1, 2.0, 3.0)
    made = make(barrier=answer)
    with made.job.inside("fleet.barrier"):
        passed = made.job.step_barrier("step 4", 9.0, note)
    assert passed.answer is answer
    assert 0.0 <= passed.seconds < 60.0
    assert made.barriers.asked == [("barrier", "step 4", note, 3, 9.0, "fleet.barrier")]
    assert (made.job.sync_points, made.store.asked) == (0, [])


def test_a_rank_missing_at_a_step_is_a_failure_that_names_it(make: Callable[..., Made]) -> None:
    made = make(barrier=missing())
    with pytest.raises(WorkerFailed) as raised:
        made.job.step_barrier("step 4", 9.0)
    assert (made.job.failure, raised.value.absent) == (raised.value, ABSENT)


def test_groups_of_all_ranks_are_made_once(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    made, formed = make(), []
    monkeypatch.setattr(job_module, "new_group", lambda _, ranks: formed.append(ranks) or len(formed))
    assert made.job.communicators(2) == [1, 2]
    assert made.job.communicators(1) == [1]
    assert made.job.communicators(3) == [1, 2, 3]
    assert formed == [[0, 1, 2]] * 3


def by_three(collective: Collective, _: bool) -> None:
    """A sum of three that bring the same."""
    assert (collective.kind, collective.op) == ("all_reduce", "sum")
    paddle.assign(collective.tensor * 3, output=collective.tensor)


def test_reduced_values_have_the_shape_that_was_brought(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "new_group", lambda _, ranks: form(stub, ranks))
    monkeypatch.setattr(Collective, "_begin", by_three)
    stub: Any = type("Stub", (), {"formed": []})()
    made = make(compare=[])
    values = np.arange(6, dtype="int64").reshape(2, 3)
    for number in range(2):
        found = made.job.reduce(values, "sum")
        np.testing.assert_array_equal(found, [[0, 3, 6], [9, 12, 15]])
        assert found.dtype == np.int64
        assert made.store.asked[number] == ("compare", f"all_reduce {number}", [[2, 3], "int64", "sum"], 3, 60.0, "")
    np.testing.assert_array_equal(values.reshape(-1), range(6))


def test_different_arrays_are_not_reduced(make: Callable[..., Made]) -> None:
    brought = [([[0, 1]], [[2], "int32", "max"]), ([[2, 2]], [[3], "int32", "max"])]
    made = make(compare=brought)
    with pytest.raises(ConversionError) as raised:
        made.job.reduce(np.zeros(2, "int32"), "max")
    assert str(raised.value) == (
        "all_reduce 0: the ranks passed different arrays: rank 0: [[2], 'int32', 'max']; rank 2: [[3], 'int32', 'max']"
    )


@pytest.mark.parametrize(
    ("dtype", "op", "told"),
    [
        ("float32", "mean", "op='mean' is unknown; it takes sum, max, min"),
        ("float16", "sum", "dtype float16 cannot be reduced"),
    ],
)
def test_what_no_backend_reduces_is_refused_before_anybody_is_met(
    make: Callable[..., Made], alone: Job, dtype: str, op: str, told: str
) -> None:
    made = make()
    for job in (made.job, alone):
        with pytest.raises(ConversionError, match=told):
            job.reduce(np.zeros(2, dtype), op)
    assert made.store.asked == []


LOST = RuntimeError("Connection reset\nby peer: 10.0.0.3\n")


@pytest.mark.parametrize(
    ("answer", "told", "absent"),
    [
        (missing(), "step 4, bucket 1: rank 2 did not come (the collective ended with: by peer: 10.0.0.3)", ABSENT),
        (missing("step 4, bucket 1: rank 2 died"), "step 4, bucket 1: rank 2 died", ABSENT),
        (FleetTrainError("the store is gone"), "step 4, bucket 1: the store is gone", ()),
    ],
)
def test_collective_that_failed_is_put_down_to_who_does_not_say_so(
    make: Callable[..., Made], answer: Any, told: str, absent: Any
) -> None:
    made = make(barrier=answer)
    error = made.job.attribute_failure(PLACE, LOST)
    assert (str(error), error.absent, made.job.failure) == (told, absent, error)
    assert made.store.asked == [("barrier", "a collective that failed", None, 3, 5.0)]


@pytest.mark.parametrize(("error", "detail"), [(LOST, "by peer: 10.0.0.3"), (RuntimeError(), "RuntimeError")])
def test_collective_that_failed_on_all_ranks_is_put_down_to_the_network(
    make: Callable[..., Made], error: BaseException, detail: str
) -> None:
    told = str(make().job.attribute_failure(PLACE, error))
    assert told.startswith("step 4, bucket 1: the collective failed on every rank (")
    assert f"{detail}); all ranks are alive, so look at the network" in told


@pytest.mark.parametrize(
    ("answers", "is_hopeless"),
    [
        ({"gone": {}}, False),
        ({"gone": {1: "left", 2: "left"}}, False),
        ({"gone": {1: "left", 2: "lost"}}, True),
        ({"gone": {}, "failure": {"rank": 1}}, True),
        ({"gone": {}, "get": "step 3"}, True),
    ],
)
def test_collective_is_hopeless_where_a_rank_is_lost_or_has_given_up(
    make: Callable[..., Made], answers: dict[str, Any], is_hopeless: bool
) -> None:
    made = make(**answers)
    for _ in range(2):
        assert made.job._is_hopeless() is is_hopeless
    assert made.store.asked == made.barriers.asked == []


def test_lost_ranks_are_polled_on_a_separate_connection_until_this_rank_leaves(make: Callable[..., Made]) -> None:
    made = make(gone={1: "left"})
    assert made.job.gone() == {1: "left"}
    assert made.store.asked == []
    made.job.leave()
    assert made.job.gone() == {}


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    return codes


def test_collective_that_never_ends_ends_the_process_and_tells_the_others(
    make: Callable[..., Made], ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(barrier=missing())
    with pytest.raises(Ended):
        made.job._end_stuck(PLACE, 31.4)
    assert ends == [11]
    told = "step 4, bucket 1: rank 2 did not come (the collective ended with: no collective has ended for 31 s)"
    assert capsys.readouterr().err == f"fleet_train: WorkerFailed: {told}\n"
    assert made.watch.names == ["set", "barrier", "fail"]
    assert made.watch.asked[0] == ("set", "a collective is given up", "step 4")
    report = made.watch.asked[2][1]
    assert (report["rank"], report["reporter"], report["kind"], report["message"]) == (2, 0, "missing", told)
    assert made.store.asked == made.barriers.asked == []


def test_collective_that_never_ends_ends_the_process_without_a_store_too(
    make: Callable[..., Made], ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(set=WorkerFailed("the store does not answer"))
    with pytest.raises(Ended):
        made.job._end_stuck(PLACE, 31.4)
    assert ends == [11]
    told = "step 4, bucket 1: no collective has ended for 31 s, and the store does not answer"
    assert capsys.readouterr().err == f"fleet_train: WorkerFailed: {told}\n"


def test_a_failure_of_this_rank_is_reported_once(make: Callable[..., Made]) -> None:
    made = make()
    made.job.report_failure(ValueError("no such file"))
    made.job.report_failure(KeyError("later"))
    assert (type(made.job.failure), str(made.job.failure)) == (FleetTrainError, "no such file")
    ((name, report),) = made.store.asked
    assert (name, report["rank"], report["kind"], report["what"]) == ("fail", 0, "raised", "ValueError")
    assert report["message"] == f"{CLUSTER.describe(0)} stopped with ValueError: no such file"


def test_own_error_is_kept_as_the_failure_and_a_silent_store_is_no_other(make: Callable[..., Made]) -> None:
    made, error = make(fail=WorkerFailed("the store is gone")), ConversionError("no optimizer")
    made.job.report_failure(error, doing="could not join")
    assert made.job.failure is error
    assert made.store.asked[0][1]["message"] == f"{CLUSTER.describe(0)} could not join: no optimizer"


def test_nothing_is_reported_after_leaving_or_without_a_store(make: Callable[..., Made], alone: Job) -> None:
    made = make()
    made.job.leave()
    made.job.report_failure(ValueError("late"))
    assert made.store.names == ["leave", "close"]
    alone.report_failure(ValueError("alone"))
    assert str(alone.failure) == "alone"


def test_a_script_that_ends_itself_is_reported_unless_it_succeeds(make: Callable[..., Made]) -> None:
    made = make()
    made.job.report_exit(0)
    assert (made.store.asked, made.job.failure) == ([], None)
    made.job.report_exit(3)
    ((_, report),) = made.store.asked
    assert (report["kind"], report["what"], report["exit_code"]) == ("exited", "sys.exit(3)", 3)
    assert str(made.job.failure) == report["message"]


def test_departure_is_reported_once_and_all_connections_are_closed(make: Callable[..., Made]) -> None:
    made = make(gone={})
    made.job.gone()
    made.job.leave()
    made.job.leave()
    assert made.store.names == ["leave", "close"]
    assert made.barriers.names == ["close"]
    assert made.watch.names == ["gone", "close"]
    assert made.host.released == 1


def test_engines_threads_end_with_the_job(make: Callable[..., Made]) -> None:
    made = make()
    thread = made.job.engine.run_in_background(threading.current_thread).result(60)
    assert thread.is_alive()
    made.job.leave()
    assert not thread.is_alive()


def test_failed_rank_does_not_report_its_departure(make: Callable[..., Made]) -> None:
    made = make()
    made.job.failure = FleetTrainError("something")
    made.job.leave()
    assert made.store.names == ["close"]


def test_no_departure_is_reported_to_a_lost_store(make: Callable[..., Made]) -> None:
    made = make(leave=WorkerFailed("the store is gone"))
    made.job.leave()
    assert made.host.released == 1


def test_times_are_asked_of_the_store(make: Callable[..., Made]) -> None:
    made = make(times={0: [1.0]})
    assert made.job._times_up_to(4) == {0: [1.0]}
    assert made.store.asked == [("times", 4)]
