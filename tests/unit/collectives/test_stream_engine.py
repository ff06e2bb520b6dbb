"""The stream engine on recorded collectives: what it starts and waits for, when, and in which order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.engine import CallContext, Collective, Stage, Stages
from fleet_train.collectives.engines import CALC, OWN, InFlight, OnCalcStream, StreamCalls, StreamEngine
from fleet_train.collectives.own_streams import PROOF_STEPS, OwnStreamProof, wrong_elements
from fleet_train.errors import FleetTrainError, ProfileError, ScheduleMismatch, WorkerFailed
from fleet_train.log import logger
from tests.support.agreeing import AgreeingJob
from tests.unit.collectives.played import (
    PLACE,
    Attributed,
    Group,
    Recorder,
    collective,
    one,
    stages,
    stream_engine,
)

Make = Callable[[Recorder], StreamEngine]
ALL = Group(0)


@pytest.fixture
def engine_of(blamed: Attributed) -> Iterator[Make]:
    """An engine that is stopped when the test is over."""
    made: list[StreamEngine] = []

    def make(recorder: Recorder) -> StreamEngine:
        made.append(stream_engine(recorder, blamed))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def test_collectives_begin_in_the_order_of_the_calls_and_are_waited_for_at_the_result(engine_of: Make) -> None:
    recorder = Recorder()
    engine = engine_of(recorder)
    first = engine.start(stages(one("a", ALL), result="A"), PLACE)
    second = engine.start(stages(Stage((collective("b", ALL), collective("c", ALL))), result="B"), PLACE)
    third = engine.start(stages(one("theirs", Group(1, (2, 3))), result="C"), PLACE)
    assert recorder.events == ["begin a", "begin b", "begin c"]
    assert [running.result() for running in (second, first, second, first, third)] == ["B", "A", "B", "A", "C"]
    assert recorder.events[3:] == ["wait b", "wait c", "wait a"]
    here = stages(one("d", ALL, more=True), one("e", ALL), result="sum")
    assert engine.run_here(here, PLACE) == "sum"
    assert recorder.events[6:] == ["begin d", "wait d", "begin e", "wait e"]
    assert engine.start(stages(result=3), PLACE).result() == 3


def test_stage_with_more_behind_it_ends_at_the_next_step_on_and_the_last_one_does_not(engine_of: Make) -> None:
    recorder = Recorder()
    engine = engine_of(recorder)
    running = engine.start(stages(one("left", ALL, more=True), one("right", ALL)), PLACE)
    assert recorder.events == ["begin left"]
    engine.step_on()
    assert recorder.events == ["begin left", "wait left", "begin right"]
    engine.step_on()
    assert recorder.events[3:] == []
    running.result()
    assert recorder.events[3:] == ["wait right"]


def test_nothing_is_computed_or_started_before_the_barrier_is_passed(engine_of: Make) -> None:
    recorder, barrier = Recorder(), Future[None]()
    engine = engine_of(recorder)
    computed, started = [], []

    def method() -> Stages[None]:
        computed.append(True)
        yield one("a", ALL)

    thread = threading.Thread(target=lambda: started.append(engine.start(method(), PLACE, barrier=barrier)))
    thread.start()
    thread.join(timeout=0.3)
    assert (thread.is_alive(), computed, recorder.events, started) == (True, [], [], [])
    barrier.set_result(None)
    thread.join(timeout=60)
    assert (computed, recorder.events, len(started)) == ([True], ["begin a"], 1)


def test_a_failed_barrier_is_raised_unchanged_and_nothing_is_started(engine_of: Make, blamed: Attributed) -> None:
    recorder, barrier = Recorder(), Future[None]()
    barrier.set_exception(ScheduleMismatch("another step"))
    with pytest.raises(ScheduleMismatch, match="another step"):
        engine_of(recorder).start(stages(one("a", ALL)), PLACE, barrier=barrier)
    assert (recorder.events, blamed.places) == ([], [])


def test_a_collective_that_cannot_start_is_reported_once_with_its_place(engine_of: Make, blamed: Attributed) -> None:
    with pytest.raises(WorkerFailed, match="bucket 0: a cannot be begun") as raised:
        engine_of(Recorder(refused="a")).start(stages(one("a", ALL)), PLACE)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert blamed.places == [PLACE]


def test_others_stage_that_fails_under_a_result_is_blamed_on_the_others(engine_of: Make, blamed: Attributed) -> None:
    engine = engine_of(Recorder(broken="theirs"))
    others = CallContext("step 1", "step 1, bucket 7")
    engine.start(stages(one("theirs", ALL, more=True), one("never", ALL)), others)
    asked = engine.start(stages(one("ours", ALL, more=True), one("last", ALL)), PLACE)
    with pytest.raises(WorkerFailed, match="bucket 7: theirs was lost"):
        asked.result()
    assert blamed.places == [others]


def test_what_a_method_itself_raises_behind_a_stage_is_not_blamed_on_peers_if_it_has_a_name(
    engine_of: Make, blamed: Attributed
) -> None:
    def method() -> Stages[None]:
        yield one("a", ALL)
        raise ScheduleMismatch("ours")

    running = engine_of(Recorder()).start(method(), PLACE)
    with pytest.raises(ScheduleMismatch, match="ours"):
        running.result()
    assert blamed.places == []


@pytest.mark.parametrize(("ranks", "waits"), [((0, 1, 2), True), ((0, 2), False), ((2, 3), False)])
def test_groups_that_share_two_ranks_are_never_in_flight_together(
    engine_of: Make, ranks: tuple[int, ...], waits: bool
) -> None:
    recorder = Recorder(rank=ranks[0])
    engine = engine_of(recorder)
    own = Group(5, (0, 1) if 0 in ranks else (2, 4))
    engine.start(stages(one("first", own)), PLACE)
    engine.start(stages(one("second", Group(6, ranks))), PLACE)
    assert recorder.events == ["begin first", *(["wait first"] if waits else []), "begin second"]


# Two local groups and their leaders, a group over everybody, and one over another pair: hierarchies and odd groups.
GROUPS = [Group(0, (0, 1, 2, 3)), Group(1, (0, 1)), Group(2, (2, 3)), Group(3, (0, 2)), Group(4, (1, 2, 3))]


class Rank:
    """Plays one script of starts, steps and results on one rank, and checks what is in flight at every begin."""

    def __init__(self, rank: int, seed: int) -> None:
        self.recorder = Recorder(rank)
        self._random = random.Random(seed)
        self._engine = stream_engine(self._begin)
        self._running: list[InFlight[int]] = []
        self._rank = rank

    def play(self, length: int) -> None:
        for number in range(length):
            action = self._random.choice(["start", "start", "step on", "result"])
            if action == "start":
                self._running.append(self._engine.start(self._stages(number), PLACE))
            elif action == "step on":
                self._engine.step_on()
            elif self._running:
                chosen = self._running.pop(self._random.randrange(len(self._running)))
                chosen.result()
        assert [running.result() for running in self._running] == [running.progress.value for running in self._running]
        assert not self.recorder.in_flight()
        self._engine.stop()

    def _begin(self, collective: Collective) -> object:
        beside = [other.group for other in self.recorder.in_flight() if other.group.id != collective.group.id]
        assert all(len({*group.ranks} & {*collective.group.ranks}) < 2 for group in beside)
        return self.recorder(collective)

    def _stages(self, number: int) -> Stages[int]:
        """The same on every rank, but for groups that it is not in; drawn before, as ranks draw at other moments."""
        drawn = [
            [self._random.choice(GROUPS) for _ in range(self._random.randrange(3))]
            for _ in range(self._random.randrange(1, 4))
        ]

        def method() -> Stages[int]:
            for place, groups in enumerate(drawn):
                named = [collective(f"{number}.{place}.{i} of {group.id}", group) for i, group in enumerate(groups)]
                mine = tuple(each for each in named if self._rank in each.group.ranks)
                yield Stage(mine, more=place < len(drawn) - 1)
            return number

        return method()


@pytest.mark.parametrize("seed", range(25))
def test_any_two_ranks_begin_what_they_share_in_the_same_order(seed: int) -> None:
    """Whatever methods, hierarchies and empty stages there are: a rank that chose another order would stand still."""
    ranks = [Rank(rank, seed) for rank in range(4)]
    for rank in ranks:
        rank.play(40)
    shared = 0
    for one_rank in ranks:
        for other in ranks:
            theirs = set(other.recorder.begun)
            both = [name for name in one_rank.recorder.begun if name in theirs]
            assert both == [name for name in other.recorder.begun if name in set(one_rank.recorder.begun)]
            shared += len(both)
    assert shared > 50


CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "all_reduce": ("all_reduce", ("tensor",), {"op": paddle.distributed.ReduceOp.MAX}),
    "reduce": ("reduce", ("tensor",), {"dst": 3}),
    "broadcast": ("broadcast", ("tensor",), {"src": 3}),
    "all_gather": ("all_gather", ("output", "tensor"), {}),
    "all_to_all": ("alltoall_single", ("output", "tensor"), {}),
    "gather": ("gather", ("tensor", "output"), {"dst": 3}),
    "scatter": ("scatter", ("tensor", "parts"), {"src": 3}),
}


@pytest.mark.parametrize("kind", CALLS)
def test_each_kind_is_one_call_of_paddles_that_returns_its_task(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    called: list[Any] = []
    name, arguments, options = CALLS[kind]
    monkeypatch.setattr(
        paddle.distributed.stream, name, lambda *given, **named: called.append((given, named)) or "task"
    )
    parts: Any = "parts"
    one_call = Collective(kind, "group", "tensor", root=3, op="max", output="output", parts=parts)
    for own in (True, False):
        calls = StreamCalls()
        assert (calls.on_own_stream if own else calls.on_calc_stream)(one_call) == "task"
        assert called.pop() == (
            arguments,
            {**options, "group": "group", "sync_op": not own, "use_calc_stream": not own},
        )


def test_on_the_calculation_stream_nothing_is_waited_for_and_a_task_is_done_when_the_stream_has_passed_it(
    engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    engine = engine_of(recorder)
    engine.stream, watched = CALC, list[Any]()
    monkeypatch.setattr(engine._watchdog, "watch", lambda task, *_: watched.append(task))
    moments = [SimpleNamespace(has_passed=lambda: False), SimpleNamespace(has_passed=lambda: True)]
    monkeypatch.setattr(engine.device, "moment", lambda: moments.pop(0))
    first = engine.start(stages(one("a", ALL, more=True), one("b", Group(7)), result=1), PLACE)
    assert first.result() == 1
    assert recorder.events == ["begin a", "begin b"]
    tasks = [task for task in watched if isinstance(task, OnCalcStream)]
    assert [task.is_completed() for task in tasks] == [False, True]


def test_programs_of_a_job_have_one_stream(engine_of: Make) -> None:
    engine = engine_of(Recorder())
    engine.use(OWN)
    with pytest.raises(ProfileError, match="collective_stream: calc, but a program of this job has own already"):
        engine.use(CALC)


def test_memory_that_is_missing_is_this_ranks_own_error_with_the_bucket_and_the_knob(
    engine_of: Make, blamed: Attributed
) -> None:
    def method() -> Stages[None]:
        yield one("a", ALL)
        raise MemoryError(
            "C++ Traceback\nOut of memory error on GPU 0. Cannot allocate 3.0GB memory on GPU 0, 2.1GB ..."
        )

    running = engine_of(Recorder()).start(method(), PLACE)
    with pytest.raises(FleetTrainError) as raised:
        running.result()
    assert str(raised.value).startswith(
        "step 1, bucket 0: this rank is out of memory: Out of memory error on GPU 0. Ca"
    )
    assert "fuse_grad_size_in_MB" in str(raised.value)
    assert not isinstance(raised.value, WorkerFailed)
    assert blamed.places == []


def test_paddles_own_missing_memory_is_such_an_error(engine_of: Make) -> None:
    def method() -> Stages[None]:
        yield one("a", ALL)
        paddle.empty([1 << 50], "float32")

    with pytest.raises(FleetTrainError, match="out of memory"):
        engine_of(Recorder()).start(method(), PLACE).result()


@pytest.mark.parametrize("error", [ValueError("shapes"), RuntimeError("an illegal memory access")])
def test_what_computing_raises_is_not_the_networks(engine_of: Make, blamed: Attributed, error: Exception) -> None:
    def method() -> Stages[None]:
        yield one("a", ALL)
        raise error

    with pytest.raises(type(error), match=str(error)):
        engine_of(Recorder()).start(method(), PLACE).result()
    assert blamed.places == []


class Device(Recorder):
    """What a stream of its own gets is the half of what was computed, from ``wrong_from`` on; and both have ended."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__()
        self.begun_on = list[str]()
        self._wrong_from = wrong_from

    def call(self, stream: str, each: Collective) -> Any:
        self.begun_on.append(stream)
        is_wrong = stream == OWN and self.begun_on.count(OWN) > self._wrong_from
        paddle.assign(each.tensor * (1.0 if is_wrong else 2.0), output=each.tensor)
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


@pytest.mark.parametrize("wrong_from", [99, 0, 3])
def test_own_streams_are_compared_for_three_updates_and_nothing_wrong_is_used(
    engine_of: Make, wrong_from: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    device, job = Device(wrong_from), AgreeingJob(Cluster.imagined(2, 1), paddle.CPUPlace())
    engine = engine_of(device)
    engine.calls = SimpleNamespace(  # type: ignore[assignment]
        on_own_stream=lambda each: device.call(OWN, each), on_calc_stream=lambda each: device.call(CALC, each)
    )
    proof, values = OwnStreamProof(job, engine), list[list[float]]()

    def average(tensor: Any) -> Stages[Any]:
        yield Stage((Collective("all_reduce", ALL, tensor),))
        return tensor

    for step in range(1, 6):
        proof.begin_update()
        buckets = [
            engine.start(average(paddle.full([3], step)), CallContext("", f"step {step}, bucket {i}")) for i in (0, 1)
        ]
        values += [bucket.result().tolist() for bucket in buckets]
        proof.end_update()
    assert values == [[2.0 * step] * 3 for step in range(1, 6) for _ in (0, 1)]
    if wrong_from == 99:
        assert device.begun_on == [*[OWN, OWN, CALC, CALC] * 3, *[OWN] * 4]
        assert "in 3 steps 6 collectives on streams of their own gave on every rank" in caplog.text
    else:
        bad = wrong_from // 2 + 1
        assert device.begun_on == [*[OWN, OWN, CALC, CALC] * bad, *[CALC, CALC] * (5 - bad)]
        assert f"step {bad}, bucket {wrong_from % 2}: 3 of 3 elements differ" in caplog.text
        assert "all ranks go on with calc" in caplog.text


def test_start_values_are_compared_too_and_a_proven_program_is_not_compared_for_another_ones_sake(
    engine_of: Make,
) -> None:
    device, job = Device(wrong_from=0), AgreeingJob(Cluster.imagined(2, 1), paddle.CPUPlace())
    engine = engine_of(device)
    engine.calls = SimpleNamespace(  # type: ignore[assignment]
        on_own_stream=lambda each: device.call(OWN, each), on_calc_stream=lambda each: device.call(CALC, each)
    )

    def start_value() -> Stages[Any]:
        tensor = paddle.full([3], 1.0)
        yield Stage((Collective("broadcast", ALL, tensor, 0),))
        return tensor

    proof = OwnStreamProof(job, engine)
    assert engine.start(start_value(), CallContext("start state", "start value of 'w'")).result().tolist() == [2.0] * 3
    proof.begin_update()
    assert engine.stream == OWN
    proof.end_update()
    proof.begin_update()
    assert engine.stream == CALC  # it was wrong on its own stream

    engine = engine_of(Device(wrong_from=99))
    first = OwnStreamProof(job, engine)
    for _ in range(PROOF_STEPS + 2):
        first.begin_update()
        first.end_update()
    second = OwnStreamProof(job, engine)
    assert engine.proof is second
    first.begin_update()
    assert engine.proof is None
    second.begin_update()
    assert engine.proof is second


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "uint8"])
def test_a_result_is_compared_by_its_dtype(dtype: str) -> None:
    exact = paddle.to_tensor([0, 1, 7, 100]).cast(dtype)
    assert int(wrong_elements(exact, exact)) == 0
    assert int(wrong_elements(paddle.to_tensor([0, 1, 9, 100]).cast(dtype), exact)) == 1
    if exact.is_floating_point():
        last_bit = {"float32": 1e-6, "float64": 1e-6}.get(dtype, 5e-3)
        assert int(wrong_elements(exact * (1 + last_bit), exact)) == 0
        odd = paddle.to_tensor([float("nan"), float("inf"), 1.0, 2.0]).cast(dtype)
        assert int(wrong_elements(odd, odd)) == 0
        assert int(wrong_elements(odd, exact)) >= 3
        assert int(wrong_elements(exact, odd)) >= 3
