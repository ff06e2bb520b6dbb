"""The late group and the tripwire themselves: they detect what they are made to detect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.averaging import Held
from fleet_train.collectives.engine import HAND_OVER, Collective, Stages
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Passed
from fleet_train.collectives.methods.dense import DenseMethod
from fleet_train.errors import WorkerFailed
from tests.support import late
from tests.support.late import HostRead, LateTask, install_tripwire
from tests.unit.collectives.one_of_two import OneOfTwo, Pair, exchange_of, one_of_two

SHAPES = [(3, 2), (5,)]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
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


def gradients(step: int) -> list[Any]:
    random = np.random.default_rng(step)
    return [paddle.to_tensor(random.standard_normal(shape).astype("float32")) for shape in SHAPES]


def step_of(job: OneOfTwo, exchange: GradientExchange, local: Sequence[Any]) -> list[np.ndarray]:
    exchange.arrive()
    exchange.launch(0, local)
    averages = exchange.wait(0)
    job.device.step += 1
    return [np.array(average.numpy()) for average in averages]


class Mutated(DenseMethod):
    """A dense method with a fault: ``early`` before its collective, ``between`` while that is in flight, ``late``."""

    early: Callable[[Any], Any] = staticmethod(lambda _: None)
    late: Callable[[Any], Any] = staticmethod(lambda _: None)

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        type(self).early(gradients[0])
        yield HAND_OVER
        averages = yield from super().average(gradients)
        type(self).late(averages[0])
        return averages


def mutate(monkeypatch: pytest.MonkeyPatch, **faults: Callable[[Any], Any]) -> None:
    """From now on dense methods have these faults."""
    mutated = type("Mutated", (Mutated,), {name: staticmethod(fault) for name, fault in faults.items()})
    monkeypatch.setattr("fleet_train.collectives.methods.registry.DenseMethod", mutated)


@pytest.mark.usefixtures("tripwire")
def test_sound_exchange_gives_the_average_and_trips_nothing(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES)
    for step in range(3):
        local = gradients(step)
        for average, mine in zip(step_of(job, exchange, local), local, strict=True):
            np.testing.assert_array_equal(average, mine.numpy())
    assert job.backend.begun == 3
    assert job.device.early_reads == 0


def test_engine_that_does_not_wait_gives_nan(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateTask, "wait", lambda _: None)
    averages = step_of(job, exchange_of(job, SHAPES), gradients(0))
    assert all(np.isnan(average).all() for average in averages)


def test_engine_that_does_not_wait_for_statistics_gives_nan(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """LocalSGD: what is averaged are the parameters."""
    monkeypatch.setattr(LateTask, "wait", lambda _: None)
    exchange = exchange_of(job, SHAPES, use_local_sgd=True, local_sgd_is_warm_steps=0, local_sgd_steps=1)
    parameters = gradients(1)
    step_of(job, exchange, gradients(0))
    exchange.finish(Held(parameters, [], []), ["p0", "p1"], None)
    assert all(np.isnan(parameter.numpy()).all() for parameter in parameters)


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
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any]
) -> None:
    mutate(monkeypatch, early=read)
    exchange = exchange_of(job, SHAPES)
    exchange.arrive()
    with pytest.raises(HostRead, match=r" of an? (tensor|array)"):
        exchange.launch(0, gradients(0))


@pytest.mark.usefixtures("tripwire")
def test_a_method_that_reads_after_its_collective_trips_the_tripwire_too(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, late=READS["item"])
    exchange = exchange_of(job, SHAPES)
    exchange.arrive()
    exchange.launch(0, gradients(0))
    with pytest.raises(WorkerFailed, match="item of a tensor") as raised:
        exchange.wait(0)
    assert isinstance(raised.value.__cause__, HostRead)


@pytest.mark.usefixtures("tripwire")
def test_reading_between_two_steps_trips_nothing(job: OneOfTwo) -> None:
    local = gradients(0)
    step_of(job, exchange_of(job, SHAPES), local)
    assert local[0].sum().item() == pytest.approx(float(local[0].numpy().sum()), rel=1e-5)


def test_writing_what_is_being_received_is_detected(job: OneOfTwo) -> None:
    buffer = paddle.ones([4])
    task = job.backend(Collective("all_reduce", Pair(), buffer))
    assert task is not None
    assert np.isnan(buffer.numpy()).all()
    buffer.zero_()
    with pytest.raises(AssertionError, match="a buffer was written while its collective was in flight"):
        task.wait()


def test_changing_what_is_being_sent_is_detected(job: OneOfTwo) -> None:
    mine, rows = paddle.ones([4]), paddle.zeros([8])
    task = job.backend(Collective("all_gather", Pair(), mine, output=rows))
    assert task is not None
    mine[2] = 5.0
    with pytest.raises(AssertionError, match="what a collective sends was changed while it was in flight"):
        task.wait()


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [("all_reduce", "float32", [2.0, 4.0]), ("all_reduce", "int64", [2, 4]), ("broadcast", "uint8", [1, 2])],
)
def test_buffer_is_filled_at_the_wait_and_not_before(
    job: OneOfTwo, kind: str, dtype: str, expected: list[float]
) -> None:
    buffer = paddle.to_tensor([1, 2], dtype=dtype)
    task = job.backend(Collective(kind, Pair(), buffer, root=0))
    assert task is not None
    job.backend._streams[0].submit(lambda: None).result(60)  # behind the collective: it has ended
    assert task.is_completed()
    assert late._is_poisoned(buffer)
    for _ in range(2):
        task.wait()
        assert buffer.numpy().tolist() == expected


def test_gathered_tensors_are_there_at_once_and_filled_at_the_wait(job: OneOfTwo) -> None:
    mine, rows = paddle.to_tensor([1.0, 2.0]), list[Any]()
    task = job.backend(Collective("gather", Pair(), mine, root=0, output=rows))
    assert task is not None
    assert [late._is_poisoned(row) for row in rows] == [True, True]
    task.wait()
    assert [row.numpy().tolist() for row in rows] == [[1.0, 2.0]] * 2


def test_value_that_is_read_in_the_step_it_comes_from_is_counted(job: OneOfTwo) -> None:
    copy = job.device.to_host(paddle.ones([2]))
    copy.read()
    assert job.device.early_reads == 1
    job.device.step += 1
    assert copy.read().tolist() == [1.0, 1.0]
    assert job.device.early_reads == 1


def test_averaging_whose_loss_is_not_read_yet_is_forgotten_where_state_is_loaded(job: OneOfTwo) -> None:
    """The loss of before would choose the period of what was loaded."""
    settings = {"local_sgd_is_warm_steps": 0, "local_sgd_steps": 4, "local_sgd_schedule": "adaptive"}
    exchange = exchange_of(job, SHAPES, use_local_sgd=True, **settings)
    averager = exchange.averager
    assert averager is not None
    for step in range(4):
        step_of(job, exchange, gradients(step))
        exchange.finish(Held(gradients(step), [], []), ["p0", "p1"], paddle.to_tensor([2.0]))
    exchange.drop_averaging()
    averager.schedule.restore([3.0, 0.0, 0.5, 1e-6])
    step_of(job, exchange, gradients(9))
    assert averager.schedule.numbers() == [3.0, 0.0, 0.5, 1e-6]


def test_time_at_a_barrier_is_no_work(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computing thread stands there itself: a rank that waits for a slow one must not look slow."""
    real, seconds = job.step_barrier, 0.2

    def step_barrier(name: str, timeout_seconds: float, note: Any = None) -> Passed:
        time.sleep(seconds)
        return real(name, timeout_seconds, note)

    monkeypatch.setattr(job, "step_barrier", step_barrier)
    exchange = exchange_of(job, SHAPES, use_local_sgd=True, local_sgd_is_warm_steps=2, local_sgd_steps=1)
    for step in range(4):
        local = gradients(step)
        step_of(job, exchange, local)
        exchange.finish(Held(gradients(step), [], []), ["p0", "p1"], None)
    # Barriers at 2 synchronous steps, and behind 2 local ones.
    assert job.clock.read().exposed_seconds > 4 * 0.9 * seconds
