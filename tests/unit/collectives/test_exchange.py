"""An exchange step by step: what is sent, waited for and compared when; and the late group that it is played on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster.flight.ring import recorder
from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.engine import Collective
from fleet_train.collectives.engines import StreamEngine
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.methods.dense import DenseMethod
from tests.support import late
from tests.support.late import HostRead, install_tripwire
from tests.unit.collectives.played import Group, OneOfTwo, exchange_of

SHAPES = [(3, 2), (5,)]
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 1, "local_sgd_steps": 3}


@pytest.fixture
def met(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all barriers, in order."""
    names: list[str] = []
    monkeypatch.setattr(job, "met", names.append)
    return names


def full(value: float) -> list[Any]:
    return [paddle.full(shape, value, "float32") for shape in SHAPES]


def step(job: OneOfTwo, exchange: GradientExchange, held: HeldValues | None = None) -> None:
    """A step; with the update behind it if something is held."""
    exchange.arrive()
    exchange.begin(full(0.0))
    exchange.launch(0, full(1.0))
    exchange.wait(0)
    if held is not None:
        exchange.finish(held, ["p0", "p1"], paddle.full([1], 2.0))
    job.device.step += 1


@pytest.mark.parametrize(("slowest_ms", "early"), [(4999.0, True), (5000.0, False)])
def test_slow_ranks_wait_before_the_first_bucket_and_fast_ones_at_the_start(
    job: OneOfTwo, slowest_ms: float, early: bool
) -> None:
    job.slowest_ms = slowest_ms
    exchange = exchange_of(job, SHAPES)
    for _ in range(3):
        step(job, exchange)
    exchange.arrive()
    barrier = exchange.barrier.running
    assert (barrier is not None) is early
    assert recorder.step == 4  # a barrier that has begun is of its own step, not of the one before
    exchange.launch(0, full(1.0))
    exchange.wait(0)
    assert job.barriers == [f"step {number}" for number in range(1, 5)]


def test_averaging_under_way_is_dropped_where_other_state_is_loaded(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collective, "_begin", lambda one, _: paddle.assign(one.tensor * 4.0, output=one.tensor))
    exchange = exchange_of(job, SHAPES, **LOCAL, local_sgd_overlap_steps=2)
    held = HeldValues(full(1.0), [], [])
    for _ in range(4):
        step(job, exchange, held)
    begun = job.backend.begun
    for _ in range(2):
        exchange.drop_averaging()
        assert exchange.averaging is not None
        assert exchange.averaging.apply_pending(held) == []
    assert {value for one in held.parameters for value in one.reshape([-1]).tolist()} == {1.0}
    assert job.backend.begun == begun


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
    real = DenseMethod.average
    monkeypatch.setattr(DenseMethod, "average", lambda self, local: (read(local[0]), real(self, local))[1])
    exchange = exchange_of(job, SHAPES)
    exchange.arrive()
    with pytest.raises(HostRead, match=r" of an? (tensor|array)"):
        exchange.launch(0, full(1.0))


def test_writing_what_is_being_received_is_detected(job: OneOfTwo) -> None:
    buffer = paddle.ones([4])
    task = job.backend.on_own_stream(Collective("all_reduce", Group(0), buffer))
    assert task is not None
    assert np.isnan(buffer.numpy()).all()
    buffer.zero_()
    with pytest.raises(AssertionError, match="a buffer was written while its collective was in flight"):
        task.wait()


def test_averaging_whose_loss_is_not_read_yet_is_forgotten_where_state_is_loaded(job: OneOfTwo) -> None:
    """The loss of before would choose the period of what was loaded."""
    settings = {"local_sgd_is_warm_steps": 0, "local_sgd_steps": 4, "local_sgd_schedule": "adaptive"}
    exchange = exchange_of(job, SHAPES, use_local_sgd=True, **settings)
    averager = exchange.averager
    assert averager is not None
    for _ in range(4):
        step(job, exchange, HeldValues(full(1.0), [], []))
    exchange.drop_averaging()
    averager.schedule.restore([3.0, 0.0, 0.5, 1e-6])
    step(job, exchange)
    assert averager.schedule.numbers() == [3.0, 0.0, 0.5, 1e-6]


def test_time_at_a_barrier_is_no_work(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computing thread stands there itself: a rank that waits for a slow one must not look slow."""
    real, seconds = job.step_barrier, 0.2
    monkeypatch.setattr(job, "step_barrier", lambda *given: (time.sleep(seconds), real(*given))[1])
    exchange = exchange_of(job, SHAPES, use_local_sgd=True, local_sgd_is_warm_steps=2, local_sgd_steps=1)
    for _ in range(4):  # barriers at 2 synchronous steps, and behind 2 local ones
        step(job, exchange, HeldValues(full(1.0), [], []))
    assert job.clock.read().exposed_seconds > 4 * 0.9 * seconds


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
        step(job, exchange, HeldValues(full(1.0), [], []))
        told = [name.removeprefix("digest at ") for name in met if name.startswith("digest at ")]
        for name in told:
            heard.setdefault(name, number)
    assert heard == expected
    assert len(told) == len(expected)
