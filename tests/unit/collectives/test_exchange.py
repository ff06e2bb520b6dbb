"""An exchange step by step: what is sent, waited for and compared when.

The peer always brings three times what this rank does, so that an average is twice this rank's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
import pytest

from fleet_train.collectives.averaging import Held
from fleet_train.collectives.engine import Collective
from fleet_train.collectives.engines import StreamEngine, ThreadEngine
from fleet_train.collectives.exchange import GradientExchange
from tests.unit.collectives import one_of_two as module
from tests.unit.collectives.one_of_two import OneOfTwo, exchange_of, one_of_two

SHAPES = [(3, 2), (5,)]
NAMES = ["p0", "p1"]
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 1, "local_sgd_steps": 3}


def three_times_as_much(collective: Collective, _: bool) -> None:
    assert collective.kind == "all_reduce"
    paddle.assign(collective.tensor * 4.0, output=collective.tensor)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    monkeypatch.setattr(module, "by_arithmetic", three_times_as_much)
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


def test_bytes_of_a_step_are_counted_where_it_sends(job: OneOfTwo) -> None:
    """11 float32 values on a ring of two; a local step sends none, and a period's averaging sends them."""
    exchange = exchange_of(job, SHAPES, **LOCAL)
    sent = []
    for _ in range(5):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
        sent.append(job.clock.read().sent_bytes)
    assert sent == [44, 0, 0, 44, 0]


def test_local_steps_keep_their_own_gradients_and_send_nothing(job: OneOfTwo) -> None:
    exchange = exchange_of(job, SHAPES, **LOCAL)
    assert step(exchange, 5.0) == [10.0]
    assert exchange.sends_gradients
    begun = job.backend.begun
    assert step(exchange, 5.0) == [5.0]
    assert not exchange.sends_gradients
    assert job.backend.begun == begun


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


def test_replicas_are_compared_after_the_first_step_and_then_every_nth(job: OneOfTwo, met: list[str]) -> None:
    """A device's digests are read a step later."""
    exchange = exchange_of(job, SHAPES, divergence_check_steps=3)
    seen = []
    for _ in range(8):
        step(exchange)
        seen.append(list(digests(met)))
        finish(exchange, Held(full(1.0), [], []))
    assert seen == [[], *[["step 1"]] * 3, *[["step 1", "step 4"]] * 3, ["step 1", "step 4", "step 7"]]
    step(exchange_of(job, SHAPES))
    assert len(digests(met)) == 3


def test_replicas_are_not_compared_unasked(job: OneOfTwo, met: list[str]) -> None:
    exchange = exchange_of(job, SHAPES, divergence_check_steps=0)
    for _ in range(3):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
    assert (digests(met), exchange.reads_parameters) == ([], False)


def test_local_steps_from_the_first_on_compare_the_start_once(job: OneOfTwo, met: list[str]) -> None:
    settings = {**LOCAL, "local_sgd_is_warm_steps": 0, "divergence_check_steps": 100}
    exchange = exchange_of(job, SHAPES, **settings)
    assert exchange.reads_parameters
    for _ in range(4):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
    assert digests(met) == ["the start"]


def test_start_is_compared_once_whatever_is_run_before_the_first_update(job: OneOfTwo, met: list[str]) -> None:
    settings = {**LOCAL, "local_sgd_is_warm_steps": 0, "divergence_check_steps": 100}
    exchange = exchange_of(job, SHAPES, **settings)
    for _ in range(3):
        exchange.begin(full(0.0))
    step(exchange)
    step(exchange)
    assert digests(met) == ["the start"]


def test_start_is_not_compared_unasked(job: OneOfTwo, met: list[str]) -> None:
    settings = {**LOCAL, "local_sgd_is_warm_steps": 0, "divergence_check_steps": 0}
    exchange = exchange_of(job, SHAPES, **settings)
    assert not exchange.reads_parameters
    for _ in range(3):
        step(exchange)
    assert digests(met) == []


def test_after_a_period_what_was_agreed_is_compared(job: OneOfTwo, met: list[str]) -> None:
    exchange = exchange_of(job, SHAPES, **LOCAL, divergence_check_steps=1)
    assert not exchange.reads_parameters
    for _ in range(8):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
    assert digests(met) == ["step 1", "step 4", "step 7"]


@pytest.mark.parametrize(("settings", "period"), [({}, 1), (LOCAL, 3), ({**LOCAL, "local_sgd_is_warm_steps": 9}, 1)])
def test_the_cost_of_communication_is_given_for_a_period(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], period: int
) -> None:
    exchange = exchange_of(job, SHAPES, **settings)
    periods: list[int] = []
    monkeypatch.setattr(job.notes, "read", periods.append)
    for _ in range(3):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
    exchange.communication()
    assert periods == [period]


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


def test_a_host_that_may_look_compares_replicas_in_the_same_step(
    job: OneOfTwo, met: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamEngine, "reads_values", True)
    exchange = exchange_of(job, SHAPES, divergence_check_steps=2)
    seen = []
    for _ in range(3):
        step(exchange)
        finish(exchange, Held(full(1.0), [], []))
        seen.append(digests(met))
    assert seen == [["step 1"], ["step 1"], ["step 1", "step 3"]]


def test_second_and_later_buckets_of_local_steps_move_nothing_on(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight then is an averaging: it is moved on once in a step."""
    exchange = exchange_of(job, SHAPES, fuse_all_reduce_ops=False, **LOCAL)
    moves: list[int] = []
    real = job.engine.step_on
    monkeypatch.setattr(job.engine, "step_on", lambda: moves.append(exchange.step) or real())
    for _ in range(2):
        exchange.arrive()
        for index in range(2):
            exchange.launch(index, full(1.0)[index : index + 1])
        for index in range(2):
            exchange.wait(index)
    assert moves == [1, 1, 2]


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
