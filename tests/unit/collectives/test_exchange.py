"""An exchange step by step: what is sent, waited for and compared when; and the late group that it is played on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.averaging import Held
from fleet_train.collectives.engine import Collective
from fleet_train.collectives.engines import StreamEngine, ThreadEngine
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Passed
from fleet_train.collectives.methods.dense import DenseMethod
from tests.support import late
from tests.support.late import HostRead, install_tripwire
from tests.unit.collectives import played
from tests.unit.collectives.played import Group, OneOfTwo, exchange_of, one_of_two

SHAPES = [(3, 2), (5,)]
NAMES = ["p0", "p1"]
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 1, "local_sgd_steps": 3}


def three_times_as_much(collective: Collective, _: bool) -> None:
    assert collective.kind == "all_reduce"
    paddle.assign(collective.tensor * 4.0, output=collective.tensor)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    monkeypatch.setattr(played, "by_arithmetic", three_times_as_much)
    with one_of_two(monkeypatch) as made:
        yield made


@pytest.fixture
def met(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all barriers, in order."""
    names: list[str] = []
    monkeypatch.setattr(job, "met", names.append)
    return names


def full(value: float) -> list[Any]:
    return [paddle.full(shape, value, "float32") for shape in SHAPES]


def values_of(tensors: Sequence[Any]) -> list[float]:
    found = set()
    for tensor in tensors:
        found |= set(tensor.reshape([-1]).tolist())
    return sorted(found)


def step(exchange: GradientExchange, value: float = 1.0, boundary: bool | None = None) -> list[float]:
    """The averages of a step's gradients, which are all of one value."""
    exchange.arrive()
    exchange.begin(full(0.0))
    sends = None if boundary is None else paddle.to_tensor([boundary])
    exchange.launch(0, full(value), sends)
    return values_of(exchange.wait(0))


def finish(exchange: GradientExchange, held: Held) -> None:
    exchange.finish(held, NAMES, paddle.ones([1]))


def test_averages_of_each_bucket_are_right_whatever_is_launched_between(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES, fuse_all_reduce_ops=False)
    assert len(exchange.methods) == 2
    exchange.arrive()
    exchange.launch(0, full(1.0)[:1])
    exchange.launch(1, full(2.0)[1:])
    assert values_of(exchange.wait(0)) == [2.0]
    assert (job.clock.read().steps, exchange.step) == (0, 1)
    assert values_of(exchange.wait(1)) == [4.0]
    assert job.clock.read().steps == 1


def test_local_steps_keep_their_own_gradients_and_send_nothing(job: OneOfTwo) -> None:
    """11 float32 values on a ring of two; a period's averaging sends them, too."""
    exchange = exchange_of(job, SHAPES, **LOCAL)
    found, sent = [], []
    for _ in range(5):
        found += step(exchange, 5.0)
        assert exchange.sends_gradients is (len(found) == 1)
        finish(exchange, Held(full(1.0), [], []))
        sent.append(job.clock.read().sent_bytes)
    assert found == [10.0, 5.0, 5.0, 5.0, 5.0]
    assert sent == [44, 0, 0, 44, 0]
    assert exchange.communication().local_sgd_period == 3
    assert exchange_of(job, SHAPES).communication().local_sgd_period == 1


def test_runs_between_updates_send_nothing_and_end_nothing(job: OneOfTwo, met: list[str]) -> None:
    exchange = exchange_of(job, SHAPES, accumulate_steps=2, divergence_check_steps=1)
    assert step(exchange, 5.0, boundary=False) == [5.0]
    finish(exchange, Held(full(1.0), [], []))
    assert (exchange.step, job.backend.begun) == (0, 0)
    assert step(exchange, 5.0, boundary=True) == [10.0]
    finish(exchange, Held(full(1.0), [], []))
    assert (exchange.step, job.backend.begun) == (1, 1)
    exchange.drain_copies()
    assert [name for name in met if "digest" in name] == ["digest at step 1"]


def test_second_program_says_so_at_its_barriers(job: OneOfTwo, met: list[str]) -> None:
    first, second = exchange_of(job, SHAPES), exchange_of(job, SHAPES)
    assert (first.number, second.number) == (0, 1)
    step(first)
    step(second)
    step(second)
    assert [name.removeprefix("barrier ") for name in met if name.startswith("barrier")] == [
        "step 1",
        "step 1 of program 1",
        "step 2 of program 1",
    ]


@pytest.mark.parametrize(("slowest_ms", "early"), [(4999.0, True), (5000.0, False)])
def test_slow_ranks_wait_before_the_first_bucket_and_fast_ones_at_the_start(
    job: OneOfTwo, slowest_ms: float, early: bool
) -> None:
    job.slowest_ms = slowest_ms
    exchange = exchange_of(job, SHAPES)
    for _ in range(3):
        step(exchange)
    exchange.arrive()
    barrier = exchange.barrier.running
    assert (barrier is not None) is early
    exchange.launch(0, full(1.0))
    exchange.wait(0)
    assert job.barriers == [f"step {number}" for number in range(1, 5)]


@pytest.mark.parametrize("waits", [True, False])
def test_collectives_are_waited_for_at_once_where_that_is_asked(job: OneOfTwo, waits: bool) -> None:
    exchange = exchange_of(job, SHAPES, sync_nccl_allreduce=waits)
    exchange.arrive()
    exchange.launch(0, full(1.0))
    assert exchange._running[0].progress.is_done is waits  # type: ignore[attr-defined]
    assert values_of(exchange.wait(0)) == [2.0]


def test_period_ends_with_an_averaging_that_all_wait_for(job: OneOfTwo, met: list[str]) -> None:
    exchange = exchange_of(job, SHAPES, **LOCAL)
    held = Held(full(1.0), [paddle.full([2], 3.0)], [])
    found = []
    for _ in range(7):
        step(exchange)
        finish(exchange, held)
        found.append((values_of(held.parameters), values_of(held.statistics)))
    assert found == [([1.0], [3.0])] * 3 + [([2.0], [6.0])] * 3 + [([4.0], [12.0])]
    assert [name for name in met if "averaging" in name] == [
        "barrier averaging after step 4 0",
        "barrier averaging after step 7 0",
    ]


def test_averaging_that_travels_beside_local_steps_keeps_what_they_have_added(job: OneOfTwo) -> None:
    """Sent is 11, agreed 22: two local steps of 1 later there are 13, and 11 more are added."""
    exchange = exchange_of(job, SHAPES, **LOCAL, local_sgd_overlap_steps=2)
    held = Held(full(7.0), [paddle.full([2], 1.0)], [])
    found = []
    for _ in range(6):
        step(exchange)
        for parameter in held.parameters:
            parameter.add_(paddle.ones_like(parameter))
        finish(exchange, held)
        found.append((values_of(held.parameters), values_of(held.statistics)))
    assert found == [
        ([8.0], [1.0]),
        ([9.0], [1.0]),
        ([10.0], [1.0]),
        ([11.0], [1.0]),
        ([12.0], [1.0]),
        ([13.0 + 11.0], [2.0]),
    ]
    assert exchange.averaging is not None
    assert exchange.averaging.apply_pending(held) == []
    assert values_of(held.parameters) == found[-1][0]


def test_synchronising_takes_in_what_is_under_way_and_then_averages_all(job: OneOfTwo, met: list[str]) -> None:
    exchange = exchange_of(job, SHAPES, **LOCAL, local_sgd_overlap_steps=2)
    held = Held(full(1.0), [], [])
    for _ in range(4):
        step(exchange)
        finish(exchange, held)
    momentum = paddle.full([4], 5.0)
    for number in range(2):
        exchange.synchronise({**dict(zip(NAMES, held.parameters, strict=True)), "momentum": momentum})
        # 1 and its correction make 2, of which the average is 4; that becomes 8.
        assert (values_of(held.parameters), values_of([momentum])) == ([4.0 * 2**number], [10.0 * 2**number])
    assert [name for name in met if "synchronisation" in name] == [
        "barrier synchronisation after step 4 0",
        "barrier synchronisation after step 4 1",
    ]


def test_without_local_steps_there_is_nothing_to_synchronise(job: OneOfTwo, met: list[str]) -> None:
    exchange = exchange_of(job, SHAPES)
    parameters = full(1.0)
    exchange.synchronise(dict(zip(NAMES, parameters, strict=True)))
    assert (values_of(parameters), met) == ([1.0], [])
    assert exchange.averaging is None


def test_averaging_under_way_is_dropped_where_other_state_is_loaded(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES, **LOCAL, local_sgd_overlap_steps=2)
    held = Held(full(1.0), [], [])
    for _ in range(4):
        step(exchange)
        finish(exchange, held)
    begun = job.backend.begun
    exchange.drop_averaging()
    assert exchange.averaging is not None
    assert exchange.averaging.apply_pending(held) == []
    assert (values_of(held.parameters), job.backend.begun) == ([1.0], begun)
    exchange.drop_averaging()


def digests(met: Sequence[str]) -> list[str]:
    return [name.removeprefix("digest at ") for name in met if name.startswith("digest at ")]


def test_bound_of_a_barrier_is_the_profiles_and_the_engines_margin(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[float] = []
    real = job.step_barrier

    def step_barrier(name: str, timeout_seconds: float, note: Any = None) -> Any:
        bounds.append(timeout_seconds)
        return real(name, timeout_seconds, note)

    monkeypatch.setattr(job, "step_barrier", step_barrier)
    step(exchange_of(job, SHAPES, collective_timeout_seconds=40))
    assert bounds == [40 + job.engine.barrier_margin_seconds]


def test_computing_continues_while_a_communicators_thread_waits_at_the_barrier(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = threading.Event(), job.step_barrier

    def step_barrier(name: str, timeout_seconds: float, note: Any = None) -> Any:
        assert opened.wait(60)
        return real(name, timeout_seconds, note)

    monkeypatch.setattr(job, "step_barrier", step_barrier)
    job.engine.stop()
    job.engine = ThreadEngine(paddle.CPUPlace(), job.attribute_failure)  # type: ignore[assignment]
    exchange = exchange_of(job, SHAPES)
    exchange.arrive()
    exchange.launch(0, full(1.0))
    assert job.barriers == []
    opened.set()
    assert values_of(exchange.wait(0)) == [2.0]
    assert job.barriers == ["step 1"]


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    """A rank whose peer brings the same."""
    with one_of_two(monkeypatch) as made:
        yield made


@pytest.fixture
def tripwire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed for one test: what it replaces comes back."""
    monkeypatch.setattr(paddle, "to_tensor", paddle.to_tensor)
    for name in late._READERS:
        if hasattr(paddle.Tensor, name):
            monkeypatch.setattr(paddle.Tensor, name, getattr(paddle.Tensor, name))
    for name in ("arrive", "begin", "launch", "wait", "finish"):
        monkeypatch.setattr(GradientExchange, name, getattr(GradientExchange, name))
    install_tripwire()


def random_gradients(step: int) -> list[Any]:
    random = np.random.default_rng(step)
    return [paddle.to_tensor(random.standard_normal(shape).astype("float32")) for shape in SHAPES]


def step_of(alike: OneOfTwo, exchange: GradientExchange, local: Sequence[Any]) -> list[np.ndarray]:
    exchange.arrive()
    exchange.launch(0, local)
    averages = exchange.wait(0)
    alike.device.step += 1
    return [np.array(average.numpy()) for average in averages]


@pytest.mark.usefixtures("tripwire")
def test_sound_exchange_gives_the_average_and_trips_nothing(alike: OneOfTwo) -> None:
    exchange = exchange_of(alike, SHAPES)
    for step in range(3):
        local = random_gradients(step)
        for average, mine in zip(step_of(alike, exchange, local), local, strict=True):
            np.testing.assert_array_equal(average, mine.numpy())
    assert alike.backend.begun == 3
    assert alike.device.early_reads == 0


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda tensor: tensor.sum().item(),
    "numpy": lambda tensor: tensor.numpy(),
    "bool": lambda tensor: bool((tensor > 0).all()),
    "float": lambda tensor: float(tensor.sum()),
    "int": lambda tensor: int(tensor.sum()),
    "tolist": lambda tensor: tensor.tolist(),
    "asarray": np.asarray,
    "to_tensor": lambda tensor: paddle.to_tensor(np.zeros(tensor.shape)),
}


@pytest.mark.usefixtures("tripwire")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_method_that_reads_a_value_in_a_step_trips_the_tripwire(
    alike: OneOfTwo, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any]
) -> None:
    real = DenseMethod.average
    monkeypatch.setattr(DenseMethod, "average", lambda self, local: (read(local[0]), real(self, local))[1])
    exchange = exchange_of(alike, SHAPES)
    exchange.arrive()
    with pytest.raises(HostRead, match=r" of an? (tensor|array)"):
        exchange.launch(0, random_gradients(0))


def test_writing_what_is_being_received_is_detected(alike: OneOfTwo) -> None:
    buffer = paddle.ones([4])
    task = alike.backend(Collective("all_reduce", Group(0), buffer))
    assert task is not None
    assert np.isnan(buffer.numpy()).all()
    buffer.zero_()
    with pytest.raises(AssertionError, match="a buffer was written while its collective was in flight"):
        task.wait()


def test_averaging_whose_loss_is_not_read_yet_is_forgotten_where_state_is_loaded(alike: OneOfTwo) -> None:
    """The loss of before would choose the period of what was loaded."""
    settings = {"local_sgd_is_warm_steps": 0, "local_sgd_steps": 4, "local_sgd_schedule": "adaptive"}
    exchange = exchange_of(alike, SHAPES, use_local_sgd=True, **settings)
    averager = exchange.averager
    assert averager is not None
    for step in range(4):
        step_of(alike, exchange, random_gradients(step))
        exchange.finish(Held(random_gradients(step), [], []), ["p0", "p1"], paddle.to_tensor([2.0]))
    exchange.drop_averaging()
    averager.schedule.restore([3.0, 0.0, 0.5, 1e-6])
    step_of(alike, exchange, random_gradients(9))
    assert averager.schedule.numbers() == [3.0, 0.0, 0.5, 1e-6]


def test_time_at_a_barrier_is_no_work(alike: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computing thread stands there itself: a rank that waits for a slow one must not look slow."""
    real, seconds = alike.step_barrier, 0.2

    def step_barrier(name: str, timeout_seconds: float, note: Any = None) -> Passed:
        time.sleep(seconds)
        return real(name, timeout_seconds, note)

    monkeypatch.setattr(alike, "step_barrier", step_barrier)
    exchange = exchange_of(alike, SHAPES, use_local_sgd=True, local_sgd_is_warm_steps=2, local_sgd_steps=1)
    for step in range(4):
        local = random_gradients(step)
        step_of(alike, exchange, local)
        exchange.finish(Held(random_gradients(step), [], []), ["p0", "p1"], None)
    # Barriers at 2 synchronous steps, and behind 2 local ones.
    assert alike.clock.read().exposed_seconds > 4 * 0.9 * seconds


@pytest.mark.parametrize(
    ("settings", "on_host", "expected"),
    [
        ({"divergence_check_steps": 3}, False, {"step 1": 2, "step 4": 5, "step 7": 8}),
        ({"divergence_check_steps": 2}, True, {"step 1": 1, "step 3": 3, "step 5": 5, "step 7": 7}),
        ({"divergence_check_steps": 0}, False, {}),
        ({**LOCAL, "divergence_check_steps": 1}, False, {"step 1": 2, "step 4": 5, "step 7": 8}),
        ({**LOCAL, "local_sgd_is_warm_steps": 0, "divergence_check_steps": 100}, False, {"the start": 2}),
        ({**LOCAL, "local_sgd_is_warm_steps": 0, "divergence_check_steps": 0}, False, {}),
    ],
)
def test_replicas_are_compared_after_the_first_step_and_every_nth(
    job: OneOfTwo,
    met: list[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    on_host: bool,
    expected: dict[str, int],
) -> None:
    """Of a device, a step later than of a host that may look; while ranks train alone, what they have agreed on."""
    monkeypatch.setattr(StreamEngine, "reads_values", on_host)
    exchange, heard = exchange_of(job, SHAPES, **settings), dict[str, int]()
    assert exchange.reads_parameters is ("the start" in expected)
    for number in range(1, 9):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
        for name in digests(met):
            heard.setdefault(name, number)
    assert heard == expected
    assert len(digests(met)) == len(expected)
