"""The model of streams on cases small enough to derive the result by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.streams.quick import SeveralCallers, replay_quickly, schedule_of
from tests.streams.replay import Found, replay
from tests.streams.tables import Mismatch, tables_of
from tests.streams.timing import Rates, Simulation, communication_seconds, exposed_seconds, ideal_exposed_seconds
from tests.streams.trace import COMPUTING, Action, Call, Op, Trace, from_first_step, mismatches, without_kernels
from tests.streams.words import wait_cycle

Replay = Callable[[list[Trace], bool], Found]
NUMBER = 300


def slowly(traces: list[Trace], one_resident: bool) -> Found:
    return replay(tables_of(traces), NUMBER, np.random.default_rng(3), one_resident)


def quickly(traces: list[Trace], one_resident: bool) -> Found:
    return replay_quickly(schedule_of(traces), NUMBER, np.random.default_rng(3), one_resident)


both = pytest.mark.parametrize("run", [slowly, quickly])


def rank(number: int, *said: str, ranks: tuple[int, ...] = (0, 1), beside: tuple[str, ...] = ()) -> Trace:
    """A rank in short words: ``begin A``, ``wait A``, ``kernel 3``, ``sync``, ``record``, ``read``, ``barrier m``, and
    ``after 2`` for two actions of the other thread. Groups are called A, B, ..; repeated names are further collectives.
    """
    trace = Trace(number)
    for thread, words in ((COMPUTING, said), ("beside", beside)):
        if words:
            trace.threads[thread] = [_action(trace, one, ranks, thread) for one in words]
    return trace


def _action(trace: Trace, said: str, ranks: tuple[int, ...], thread: str) -> Action:
    op, _, what = said.partition(" ")
    where = f"the operator of '{said}'"
    match op:
        case "begin":
            name, _, size = what.partition(" ")
            trace.calls.append(Call(ord(name[0]), ranks, f"all_reduce {size or 1}", 1000, f"bucket {name}"))
            return Action(Op.BEGIN, len(trace.calls) - 1, where=where)
        case "wait":
            last = max(number for number, call in enumerate(trace.calls) if call.what == f"bucket {what}")
            return Action(Op.WAIT, last, where=where)
        case "kernel":
            return Action(Op.KERNEL, amount=int(what), where=where)
        case "after":
            return Action(Op.AFTER, int(what), "beside" if thread == COMPUTING else COMPUTING, where=where)
        case "barrier":
            return Action(Op.BARRIER, what=what, where=where)
    return Action({"sync": Op.SYNC, "record": Op.RECORD, "read": Op.READ}[op], 0, "a value", where=where)


@both
def test_one_order_on_all_ranks_ends(run: Replay) -> None:
    said = ("kernel 2", "begin A", "begin B", "kernel 1", "wait A", "wait B", "sync")
    assert run([rank(0, *said), rank(1, *said)], False).deadlocks == 0


@both
def test_calls_that_are_waited_for_at_once_in_another_order_never_end(run: Replay) -> None:
    """What two communicators' threads do with ``sync_op=True`` when they win the race in different orders."""
    traces = [rank(0, "begin A", "wait A", "begin B", "wait B"), rank(1, "begin B", "wait B", "begin A", "wait A")]
    found = run(traces, False)
    assert found.deadlocks == NUMBER
    assert found.example is not None
    words = wait_cycle(found.example)
    assert len(words) == 6
    assert any("rank 0's calculation stream waits for bucket A" in one for one in words)
    assert any("rank 1's calculation stream waits for bucket B" in one for one in words)


@both
def test_another_order_without_waits_needs_kernels_side_by_side(run: Replay) -> None:
    traces = [rank(0, "begin A", "begin B", "wait A", "wait B"), rank(1, "begin B", "begin A", "wait A", "wait B")]
    assert run(traces, False).deadlocks == 0
    found = run(traces, True)
    assert 0 < found.deadlocks < NUMBER
    assert found.example is not None
    assert any("which is running" in one for one in wait_cycle(found.example))


@both
def test_one_resident_kernel_can_deadlock_even_in_one_order(run: Replay) -> None:
    """Both are enqueued: each device chooses for itself which one it runs first."""
    said = ("begin A", "begin B", "wait A", "wait B")
    assert 0 < run([rank(0, *said), rank(1, *said)], True).deadlocks < NUMBER


@both
def test_a_wait_between_them_gives_kernels_an_order(run: Replay) -> None:
    said = ("begin A", "wait A", "begin B", "wait B")
    assert run([rank(0, *said), rank(1, *said)], True).deadlocks == 0


@both
def test_a_chain_of_pairs_has_no_wait_cycle_and_a_ring_has(run: Replay) -> None:
    """Groups 0-1, 1-2 and 2-0 with one resident kernel each: the ring of three stands still, the chain does not."""

    def of(number: int, *groups: tuple[str, tuple[int, ...]]) -> Trace:
        trace = Trace(number)
        for name, ranks in groups:
            trace.threads[COMPUTING].append(_action(trace, f"begin {name}", ranks, COMPUTING))
        return trace

    a, b, c = ("A", (0, 1)), ("B", (1, 2)), ("C", (0, 2))
    assert run([of(0, a), of(1, a, b), of(2, b)], True).deadlocks == 0
    assert 0 < run([of(0, c, a), of(1, a, b), of(2, b, c)], True).deadlocks < NUMBER


@both
def test_a_read_in_front_of_what_a_peer_waits_for_never_ends(run: Replay) -> None:
    traces = [rank(0, "begin A", "sync", "barrier m", "wait A"), rank(1, "barrier m", "begin A", "wait A")]
    found = run(traces, False)
    assert found.deadlocks == NUMBER
    assert found.example is not None
    words = " ".join(wait_cycle(found.example))
    assert "rank 0's thread 'computing', in the operator of 'sync', waits for its device (a value)" in words
    assert "rank 1 has not enqueued bucket A" in words
    assert "waits for rank 0 at the barrier 'm'" in words


@both
def test_an_event_waits_only_for_what_was_enqueued_before_it(run: Replay) -> None:
    """The same with a copy that was recorded before the wait: the host goes on."""
    traces = [rank(0, "begin A", "record", "wait A", "read", "barrier m"), rank(1, "barrier m", "begin A", "wait A")]
    assert run(traces, False).deadlocks == 0
    behind = [rank(0, "begin A", "wait A", "record", "read", "barrier m"), rank(1, "barrier m", "begin A", "wait A")]
    assert run(behind, False).deadlocks == NUMBER


@both
def test_a_barrier_that_another_thread_enters(run: Replay) -> None:
    """The barrier: handed over behind the first action, its result waited for before the collective."""

    def of(number: int) -> Trace:
        return rank(number, "kernel 1", "after 2", "begin A", "wait A", beside=("after 1", "barrier b"))

    assert run([of(0), of(1)], True).deadlocks == 0


@both
def test_a_barrier_that_waits_for_its_own_result_never_ends(run: Replay) -> None:
    def of(number: int, *said: str) -> Trace:
        return rank(number, *said, beside=("after 2", "barrier b"))

    fine, circular = ("kernel 1", "kernel 1", "after 2"), ("begin A", "sync", "after 2", "wait A")
    late = rank(1, "kernel 1", "kernel 1", "after 2", "begin A", beside=("after 2", "barrier b"))
    assert run([of(0, *fine), of(1, *fine)], False).deadlocks == 0
    found = run([of(0, *circular), late], False)
    assert found.deadlocks == NUMBER


def test_racing_threads_deadlock_in_some_interleavings_only() -> None:
    def of(number: int) -> Trace:
        return rank(number, "begin A", "wait A", beside=("begin B", "wait B"))

    found = slowly([of(0), of(1)], False)
    assert 0 < found.deadlocks < NUMBER
    with pytest.raises(SeveralCallers, match="thread beside does BEGIN"):
        quickly([of(0), of(1)], False)


def test_ranks_that_call_different_collectives_are_detected() -> None:
    traces = [rank(0, "begin A 10", "begin A 20"), rank(1, "begin A 10", "begin A 30")]
    expected = "collective 1 of group 65: rank 0 calls all_reduce 20 (bucket A), rank 1 all_reduce 30 (bucket A)"
    assert mismatches(traces) == [expected]
    with pytest.raises(Mismatch, match="collective 1 of group 65"):
        tables_of(traces)
    fewer = [rank(0, "begin A", "begin A"), rank(1, "begin A")]
    assert mismatches(fewer) == ["group 65: rank 0 calls 2 collectives, rank 1 1"]
    assert mismatches([rank(0, "barrier m"), rank(1)]) == ["not all ranks reach the barrier 'm'"]


def test_two_threads_on_one_group_are_refused() -> None:
    with pytest.raises(Mismatch, match="two threads call on group 65"):
        tables_of([rank(number, "begin A", beside=("begin A",)) for number in range(2)])


def test_leaving_the_kernels_out_moves_what_threads_wait_for() -> None:
    trace = rank(0, "kernel 1", "begin A", "kernel 2", "after 1", "wait A", beside=("after 3", "barrier b"))
    kept = without_kernels(trace)
    assert [action.op for action in kept.threads[COMPUTING]] == [Op.BEGIN, Op.AFTER, Op.WAIT]
    assert kept.threads["beside"][0].number == 1


def test_from_the_first_step_on() -> None:
    trace = rank(0, "begin A", "wait A", "kernel 1", "begin A", "after 2", "wait A", beside=("after 4", "barrier b"))
    trace.first_step = {COMPUTING: 2}
    kept = from_first_step(trace)
    assert [action.op for action in kept.threads[COMPUTING]] == [Op.KERNEL, Op.BEGIN, Op.AFTER, Op.WAIT]
    assert (kept.threads["beside"][0].number, kept.of_group(65)) == (2, [1])


RATES = Rates(kernel=1.0, host=0.0, barrier=0.0, latency=5.0, bytes_per_second=1e30)


def test_what_travels_beside_kernels_is_not_exposed() -> None:
    def seconds(said: tuple[str, ...]) -> tuple[float, float]:
        traces = [rank(number, *said) for number in range(2)]
        return exposed_seconds(traces, RATES), ideal_exposed_seconds(traces[0], RATES)

    assert seconds(("kernel 4", "begin A", "kernel 5", "wait A", "kernel 1")) == pytest.approx((0, 0))
    assert seconds(("kernel 4", "begin A", "kernel 2", "wait A", "kernel 1")) == pytest.approx((3, 3))
    assert seconds(("kernel 4", "begin A", "wait A", "kernel 5")) == pytest.approx((5, 5))
    # Two on one link: the second one ends at 14, seven operators are computed by then.
    assert seconds(("kernel 4", "begin A", "begin B", "kernel 3", "wait A", "wait B")) == pytest.approx((7, 7))


def test_the_ideal_does_not_wait_for_a_stage_before_the_last() -> None:
    """The second stage of a bucket stands behind a wait of the calculation stream; the ideal one does not."""
    said = ("kernel 1", "begin A", "kernel 2", "wait A", "begin A", "kernel 8", "wait A")
    traces = [rank(number, *said) for number in range(2)]
    for trace in traces:
        trace.calls[:] = [Call(65, (0, 1), "all_reduce 1", 1000, "step 1, bucket 0") for _ in trace.calls]
    assert communication_seconds(traces[0], RATES) == pytest.approx(10)
    assert exposed_seconds(traces, RATES) == pytest.approx(3)
    assert ideal_exposed_seconds(traces[0], RATES) == pytest.approx(0)


def test_a_slow_rank_is_waited_for() -> None:
    traces = [rank(0, "kernel 1", "begin A", "wait A"), rank(1, "kernel 9", "begin A", "wait A")]
    assert Simulation(traces, RATES).seconds() == pytest.approx(14)
