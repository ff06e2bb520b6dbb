"""A job's requests to the store, its errors when other ranks are missing, and arrays between its ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import timeouts
from fleet_train.cluster import Cluster
from fleet_train.cluster.flight import witness
from fleet_train.cluster.flight.stands import Frame, Stand, Thread
from fleet_train.cluster.store.client import StepAnswer, StepNote, StoreClient, Variants
from fleet_train.collectives import transfer
from fleet_train.collectives.engine import HAND_OVER, CallContext
from fleet_train.collectives.job import Job
from fleet_train.errors import Absence, ConversionError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.log import logger
from tests.unit.collectives.played import OneOfTwo, PaperRank

CLUSTER = Cluster.imagined(3, 1)
PLACE = CallContext("step 4", "step 4, bucket 1")
ABSENT = (Absence(2, "missing", "did not come"),)
CALLS: dict[str, Callable[..., Any]] = {
    "barrier": lambda job, **bound: job.barrier("here", **bound),
    "all_gather": lambda job, **bound: job.all_gather("here", 7, **bound),
    "broadcast": lambda job, **bound: job.broadcast("here", 7, 1, **bound),
    "compare": lambda job, **bound: job.compare("here", 7, **bound),
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
            answer = self.answers.get(name, [] if name == "keys" else None)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return ask

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.asked]


class Made:
    """A job of three, this one rank 0, and its connections; the watchdog's own is made when it is asked for."""

    def __init__(self, **answers: Any) -> None:
        self.store, self.barriers, self.watch, self.host = Store(**answers), Store(**answers), Store(**answers), Store()
        connections: dict[str, Any] = {"store": self.store, "barriers": self.barriers, "host": self.host}
        self.job = Job(CLUSTER, paddle.CPUPlace(), timeout_seconds=60.0, **connections)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    every: list[Made] = []
    connections: list[tuple[Any, ...]] = []

    def connect(endpoint: str, member: int, **options: Any) -> Any:
        connections.append((endpoint, member, options["watched"], options["timeout_seconds"]))
        assert connections == [("10.0.0.1:7000/job", 0, False, 3.5)]  # once, and over no connection that others wait in
        return every[-1].watch

    def build(**answers: Any) -> Made:
        every.append(Made(**answers))
        return every[-1]

    monkeypatch.setattr(StoreClient, "connect", connect)
    yield build
    for made in every:
        made.job.engine.stop()


ASKED = {"barrier": [None], "all_gather": [7], "broadcast": [7, 1], "compare": [7]}


@pytest.mark.parametrize("call", CALLS)
def test_barrier_waits_for_all_ranks_and_names_the_call(make: Callable[..., Made], call: str) -> None:
    made = make(**{call: "answer"})
    assert CALLS[call](made.job) == (None if call == "barrier" else "answer")
    with made.job.inside("fleet.save"):
        with made.job.inside("fleet.all_reduce"):
            CALLS[call](made.job)
        CALLS[call](made.job)
    CALLS[call](made.job, timeout_seconds=2.5)
    bounds = [(60.0, ""), (60.0, "fleet.save"), (60.0, "fleet.save"), (2.5, "")]
    assert made.store.asked == [(call, "here", *ASKED[call], 3, *bound) for bound in bounds]
    assert (made.job.sync_points, made.barriers.asked) == (4, [])
    two = Job(Cluster.imagined(2, 1), paddle.CPUPlace(), store=made.store)  # type: ignore[arg-type]
    CALLS[call](two)
    assert (made.store.asked[-1][-3], two.sync_points) == (2, 1)
    two.engine.stop()


@pytest.mark.parametrize("call", [*CALLS, "step_barrier"])
def test_rank_that_does_not_reach_a_barrier_is_named_by_the_failure(make: Callable[..., Made], call: str) -> None:
    meet = CALLS.get(call, lambda job: job.step_barrier("step 4", 9.0))
    made = make(**{call: missing(), "barrier": missing()})
    with pytest.raises(WorkerFailed, match="rank 2 did not come") as raised:
        meet(made.job)
    assert (made.job.failure, raised.value.absent) == (raised.value, ABSENT)
    error = ScheduleMismatch("other plans")
    made = make(**{call: error, "barrier": error})
    with pytest.raises(ScheduleMismatch):
        meet(made.job)
    assert made.job.failure is error


def stand(rank: int, *, waits: bool) -> Stand:
    frame = Frame("/home/me/train.py", 41, "<module>", "while not ready:")
    return Stand(rank, 100 + rank, 3, "wire bucket 2" if waits else "", waits, "", (Thread("", True, (frame,)),))


def test_of_the_ranks_that_are_missed_those_that_wait_themselves_are_not_to_blame(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = missing("step 4: rank 1, rank 2 did not arrive")
    error.absent = (Absence(1, "missing", "did not arrive"), *ABSENT)
    stands = [stand(1, waits=True), stand(2, waits=False)]
    monkeypatch.setattr(witness, "ask_about", lambda *_: stands)
    with pytest.raises(WorkerFailed) as raised:
        make(barrier=error).job.step_barrier("step 4", 9.0)
    assert raised.value.absent == ABSENT
    assert str(raised.value).endswith(
        "; rank 2 stands in train.py:41 `while not ready:`; rank 1 waits for it in step 3, wire bucket 2"
    )


@pytest.mark.parametrize("also_waits", [False, True])
def test_ranks_that_wait_and_may_be_about_to_report_the_same_have_the_whole_time(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, also_waits: bool
) -> None:
    error = missing()
    error.absent = (*[Absence(1, "missing", "")] * also_waits, *ABSENT)
    stands = [*[stand(1, waits=True)] * also_waits, stand(2, waits=False)]
    monkeypatch.setattr(witness, "ask_about", lambda *_: stands)
    made = make(barrier=error)
    assert made.job.attribute_failure(PLACE, RuntimeError("lost")).absent == ABSENT
    assert made.store.names == ["barrier"] * (1 + also_waits)


def test_step_barrier_uses_its_own_connection_and_is_no_sync_point(make: Callable[..., Made]) -> None:
    answer, note = StepAnswer(3.0, None, 4), StepNote(1, 2.0, 3.0)
    made = make(barrier=answer, times={0: [1.0]})
    with made.job.inside("fleet.barrier"):
        passed = made.job.step_barrier("step 4", 9.0, note)
    assert passed.answer is answer
    assert 0.0 <= passed.seconds < 60.0
    assert made.barriers.asked == [("barrier", "step 4", note, 3, 9.0, "fleet.barrier")]
    assert (made.job.sync_points, made.store.asked) == (0, [])
    assert made.job._times_up_to(4) == {0: [1.0]}
    assert made.store.asked == [("times", 4)]


@pytest.mark.parametrize(
    ("answer", "error", "told", "absent"),
    [
        (missing(), "lost\nby peer\n", "rank 2 did not come (the collective ended with: by peer)", ABSENT),
        (missing("step 4, bucket 1: rank 2 died"), "lost", "rank 2 died", ABSENT),
        (FleetTrainError("the store is gone"), "lost", "the store is gone", ()),
        (None, "lost", "the collective failed on every rank (lost); all ranks are alive, so look at the network", ()),
        (None, "", "the collective failed on every rank (RuntimeError); all ranks are alive, so", ()),
    ],
)
def test_collective_that_failed_is_put_down_to_who_does_not_say_so(
    make: Callable[..., Made], answer: Any, error: str, told: str, absent: Any
) -> None:
    made = make(barrier=answer)
    found = made.job.attribute_failure(PLACE, RuntimeError(error) if error else RuntimeError())
    assert str(found).startswith(f"step 4, bucket 1: {told}")
    assert answer is None or str(found).endswith(told)
    assert (found.absent, made.job.failure) == (absent, found)
    asked = [("barrier", "a collective that failed", None, 3, seconds) for seconds in (1.5, 3.5)]
    assert made.store.asked == asked[: 2 if isinstance(answer, JoinTimeout) else 1]
    made.job.failure = WorkerFailed("of an earlier collective")
    assert made.job.attribute_failure(PLACE, RuntimeError("behind it")) is made.job.failure


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


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"barrier": missing()}, "rank 2 did not come (the collective ended with: no collective has ended for 31 s)"),
        ({"set": WorkerFailed("no store answers")}, "no collective has ended for 31 s, and no store answers"),
    ],
)
def test_collective_that_never_ends_ends_the_process_and_tells_the_others(
    make: Callable[..., Made],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: dict[str, Any],
    told: str,
) -> None:
    class Ended(BaseException):
        """Stands for the end of the process."""

    def end(code: int) -> None:
        assert code == 11
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    made, told = make(**answers), f"step 4, bucket 1: {told}"
    with pytest.raises(Ended):
        made.job._end_stuck(PLACE, 31.4)
    assert capsys.readouterr().err == f"fleet_train: WorkerFailed: {told}\n"
    assert made.watch.asked[0] == ("set", "a collective is given up", "step 4")
    if "barrier" in answers:
        assert made.watch.names[1:5] == ["barrier", "keys", "barrier", "fail"]
        report = made.watch.asked[4][1]
        assert (report["rank"], report["reporter"], report["kind"], report["message"]) == (2, 0, "missing", told)
    assert made.store.asked == made.barriers.asked == []


def test_a_failure_of_this_rank_is_reported_once_and_an_exit_unless_it_succeeds(make: Callable[..., Made]) -> None:
    made = make(fail=WorkerFailed("the store is gone"))
    made.job.report_failure(ValueError("no such file"))
    made.job.report_failure(KeyError("later"))
    assert (type(made.job.failure), str(made.job.failure)) == (FleetTrainError, "no such file")
    ((name, report),) = made.store.asked
    assert (name, report["rank"], report["kind"], report["what"]) == ("fail", 0, "raised", "ValueError")
    assert report["message"] == f"{CLUSTER.describe(0)} stopped with ValueError: no such file"
    made, error = make(), ConversionError("no optimizer")
    made.job.report_exit(0)
    made.job.report_failure(error, doing="could not join")
    assert made.job.failure is error
    assert made.store.asked[0][1]["message"] == f"{CLUSTER.describe(0)} could not join: no optimizer"
    made.job.leave()
    assert made.store.names == ["fail", "close"]
    made = make()
    made.job.report_exit(3)
    ((_, report),) = made.store.asked
    assert (report["kind"], report["what"], report["exit_code"]) == ("exited", "sys.exit(3)", 3)
    assert str(made.job.failure) == report["message"]


ARRAYS = {
    "matrix": np.arange(6, dtype="float32").reshape(2, 3).T,  # not contiguous
    "number": np.array(7, "int64"),
    "nothing": np.empty((0, 4), "float16"),
    "flags": np.array([True, False, True]),
}


def assert_same(found: transfer.Arrays, expected: transfer.Arrays = ARRAYS) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("piece_bytes", [16, 18, 1 << 20])
def test_rank_0_has_its_own_part_and_the_others_whatever_the_pieces(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", piece_bytes)
    parts = transfer.gather_arrays(job, ARRAYS)
    assert len(parts) == 2
    for part in parts:
        assert_same(part)
    assert not np.shares_memory(parts[0]["flags"], parts[1]["flags"])


def test_rank_0_gives_away_what_it_has(job: OneOfTwo) -> None:
    assert_same(transfer.broadcast_arrays(job, ARRAYS))
    assert_same(transfer.scatter_arrays(job, [ARRAYS, ARRAYS]))


def test_no_part_is_collected_of_ranks_with_other_shapes(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Any]] = []

    def compare(name: str, value: Any) -> Variants:
        told.append((name, value))
        return [([(0, 0)], value), ([(1, 1)], [["w", [2], "<f4"]])]

    monkeypatch.setattr(job, "compare", compare)
    with pytest.raises(ScheduleMismatch) as caught:
        transfer.gather_arrays(job, {"w": np.zeros((3, 1), "float32")})
    assert told == [("collect 0", [["w", [3, 1], "<f4"]])]
    assert str(caught.value) == (
        f"{job.cluster.describe(0)} and {job.cluster.describe(1)} have different state of their own to save: "
        "[['w', [3, 1], '<f4']] and [['w', [2], '<f4']]"
    )


class Other(PaperRank):
    """The last of three ranks, beside a rank 0 that has sent ``wire`` already, piece by piece."""

    def __init__(self, described: Any, wire: bytes) -> None:
        super().__init__(2, 3)
        self.engine = SimpleNamespace(start=self._start)
        self.described, self.wire = described, wire
        self.did: list[tuple[str, int, int, Any]] = []
        self.told: list[tuple[str, Any]] = []

    def broadcast(self, name: str, value: Any, source: int = 0) -> Any:
        assert source == 0
        self.told.append((name, value))
        return self.described

    def compare(self, name: str, value: Any) -> Variants:
        self.told.append((name, value))
        return []

    def _start(self, stages: Any, place: Any) -> Any:
        assert next(stages) is HAND_OVER
        (collective,) = next(stages).collectives
        tensor = collective.tensor
        if collective.kind != "gather":
            mine, self.wire = self.wire[: tensor.size], self.wire[tensor.size :]
            paddle.assign(paddle.to_tensor(np.frombuffer(mine, "uint8")), output=tensor)
        self.did.append((collective.kind, collective.root, tensor.size, collective.parts))
        assert (collective.group, place.timeout_seconds) == (self.formed[0], 9.0)
        return SimpleNamespace(result=lambda: list(stages))


DESCRIBED = [["w", [2, 3], "<f4"], ["none", [0, 4], "<f2"], ["n", [], "<i8"]]
SENT = {
    "w": np.arange(6, dtype="float32").reshape(2, 3),
    "none": np.empty((0, 4), "float16"),
    "n": np.array(9, "int64"),
}
WIRE = b"".join(array.tobytes() for array in SENT.values())


@pytest.mark.parametrize("leave", [None, WorkerFailed("the store is gone")])
def test_departure_is_reported_once_and_everything_ends(make: Callable[..., Made], leave: Any) -> None:
    made = make(gone={1: "left"}, leave=leave)
    thread = made.job.engine.run_in_background(threading.current_thread).result(60)
    assert thread.is_alive()
    assert made.job.gone() == {1: "left"}
    made.job.leave()
    made.job.leave()
    made.job.report_failure(ValueError("late"))
    assert made.store.names == ["leave", "close"]
    assert (made.barriers.names, made.watch.names) == (["close"], ["gone", "close"])
    assert (made.host.names, made.job.gone(), thread.is_alive()) == (["release"], {}, False)


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("meeting", [None, JoinTimeout("rank 1 did not come")])
def test_on_streams_a_rank_leaves_when_its_device_and_the_other_ranks_are_done(
    make: Callable[..., Made], is_done: bool, meeting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, waited = make(gone={}, barrier=meeting), list[float]()
    logger.addHandler(caplog.handler)
    made.job.engine.stop()
    made.job.engine = SimpleNamespace(  # type: ignore[assignment]
        side_by_side=False, drain=lambda seconds: waited.append(seconds) or is_done, stop=lambda: None
    )
    made.job.leave()
    logger.removeHandler(caplog.handler)
    assert made.store.names == ["barrier", "leave", "close"]
    assert made.store.asked[0][:2] == ("barrier", "leaving")
    assert made.store.asked[0][4] == timeouts.LEAVE_SECONDS
    assert waited == [timeouts.LEAVE_SECONDS]
    assert ("its device has not ended its work" in caplog.text) is not is_done


def test_a_call_of_the_facade_waits_for_the_device_with_other_threads_running(make: Callable[..., Made]) -> None:
    job, waited = make(gone={}).job, list[float]()
    job.engine.stop()
    job.engine = SimpleNamespace(drain=waited.append, stop=lambda: None)  # type: ignore[assignment]
    with job.inside("fleet.save_persistables('out')"):
        assert waited == [float("inf")]


def test_a_rank_that_failed_does_not_wait_for_the_others_to_leave(make: Callable[..., Made]) -> None:
    made = make(gone={})
    made.job.engine.stop()
    made.job.engine = SimpleNamespace(side_by_side=False, stop=lambda: None)  # type: ignore[assignment]
    made.job.failure = WorkerFailed("rank 1 was lost")
    made.job.leave()
    assert made.store.names == ["close"]


def test_a_program_on_another_device_is_refused_with_the_place_to_use(make: Callable[..., Made]) -> None:
    job = make(gone={}).job
    job.refuse_other_place(paddle.ones([1]))
    job.place = "Place(gpu:1)"
    told = (
        r"runs on Place\(cpu\), but this rank's device is Place\(gpu:1\): .*paddle.static.Executor\(fleet.place\(\)\)"
    )
    with pytest.raises(ConversionError, match=told):
        job.refuse_other_place(paddle.ones([1]))


def test_paddles_default_group_is_the_first_communicator_on_streams_only(make: Callable[..., Made]) -> None:
    job = make(gone={}).job
    job.add_default_group("default")
    assert job._groups == []
    job.engine.stop()
    job.engine = SimpleNamespace(side_by_side=False, stop=lambda: None)  # type: ignore[assignment]
    job.add_default_group("default")
    assert job.communicators(1) == ["default"]


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize(
    ("call", "name", "brought", "piece_bytes"),
    [
        ("broadcast", "share", {"something else": np.ones(3)}, 16),
        ("scatter", "hand out", [], 48),
        ("gather", "collect", SENT, 48),
    ],
)
def test_other_ranks_get_what_rank_0_has_and_bring_theirs(
    monkeypatch: pytest.MonkeyPatch, call: str, name: str, brought: Any, piece_bytes: int, is_cut: bool
) -> None:
    """Of what is different for each rank, a piece is for all three: rank 0 sends as much at a time as it may."""
    monkeypatch.setattr(transfer, "_PIECE_BYTES", piece_bytes if is_cut else 1 << 20)
    job: Any = Other(DESCRIBED, 2 * WIRE)
    for number in range(2):
        found = getattr(transfer, f"{call}_arrays")(job, brought)
        if call == "gather":
            assert found == []
        else:
            assert_same(found, SENT)
        assert job.told.pop() == (f"{name} {number}", DESCRIBED if call == "gather" else None)
    assert job.did == [(call, 0, size, None) for size in ([16, 8, 8] if is_cut else [24, 8]) * 2]
