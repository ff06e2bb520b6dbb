"""The model of streams on cases small enough to derive the result by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.streams.replay import Found, Mismatch, replay, schedule_of
from tests.streams.timing import Rates, Simulation, communication_seconds, exposed_seconds, ideal_exposed_seconds
from tests.streams.trace import COMPUTING, Action, Call, Op, Trace, from_first_step, mismatches, wait_cycle

NUMBER = 300
NONE, SOME, ALL = "none", "some", "all"


def rank(number: int, said: str, beside: str = "", ranks: tuple[int, ...] = (0, 1)) -> Trace:
    """A rank in short words: ``begin A, wait A, kernel 3, sync, record, read, barrier m``, and ``after 2`` for two
    actions of the other thread. Groups are called A, B, ..; repeated names are further collectives."""
    trace = Trace(number)
    for thread, words in ((COMPUTING, said), ("beside", beside)):
        if words:
            trace.threads[thread] = [_action(trace, one, ranks, thread) for one in words.split(", ")]
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


def pair(first: str, second: str = "", beside: str = "") -> list[Trace]:
    """Ranks 0 and 1, which do the same unless two are given."""
    return [rank(0, first, beside), rank(1, second or first, beside)]


def found_in(traces: list[Trace], one_resident: bool) -> Found:
    return replay(schedule_of(traces), NUMBER, np.random.default_rng(3), one_resident)


def how_many(found: Found) -> str:
    return {0: NONE, NUMBER: ALL}.get(found.deadlocks, SOME)


AT_ONCE = pair("begin A, wait A, begin B, wait B", "begin B, wait B, begin A, wait A")
OTHER_ORDER = pair("begin A, begin B, wait A, wait B", "begin B, begin A, wait A, wait B")
READ_FIRST = pair("begin A, sync, barrier m, wait A", "barrier m, begin A, wait A")


@pytest.mark.parametrize(
    ("traces", "one_resident", "expected"),
    [
        pytest.param(pair("kernel 2, begin A, begin B, kernel 1, wait A, wait B, sync"), False, NONE, id="one order"),
        pytest.param(AT_ONCE, False, ALL, id="waited for at once in another order"),
        pytest.param(OTHER_ORDER, False, NONE, id="another order without waits, side by side"),
        pytest.param(OTHER_ORDER, True, SOME, id="another order without waits, one resident"),
        # Both are enqueued: each device chooses for itself which one it runs first.
        pytest.param(pair("begin A, begin B, wait A, wait B"), True, SOME, id="one order, one resident"),
        pytest.param(pair("begin A, wait A, begin B, wait B"), True, NONE, id="a wait between them"),
        pytest.param(READ_FIRST, False, ALL, id="a read in front of what a peer waits for"),
        pytest.param(
            pair("begin A, record, wait A, read, barrier m", "barrier m, begin A, wait A"),
            False, NONE, id="an event that was recorded before the wait",
        ),
        pytest.param(
            pair("begin A, wait A, record, read, barrier m", "barrier m, begin A, wait A"),
            False, ALL, id="an event that was recorded behind the wait",
        ),
        pytest.param(
            pair("kernel 1, after 2, begin A, wait A", beside="after 1, barrier b"),
            True, NONE, id="a barrier that another thread enters",
        ),
        pytest.param(
            pair("begin A, sync, after 2, wait A", "kernel 1, kernel 1, after 2, begin A", "after 2, barrier b"),
            False, ALL, id="a barrier that waits for its own result",
        ),
    ],
)  # fmt: skip
def test_what_stands_still(traces: list[Trace], one_resident: bool, expected: str) -> None:
    assert how_many(found_in(traces, one_resident)) == expected


@pytest.mark.parametrize(
    ("traces", "one_resident", "expected"),
    [
        (
            AT_ONCE,
            False,
            ["rank 0's calculation stream waits for bucket A", "rank 1's calculation stream waits for bucket B"],
        ),
        (OTHER_ORDER, True, ["which is running"]),
        (
            READ_FIRST,
            False,
            [
                "rank 0's thread 'computing', in the operator of 'sync', waits for its device (a value)",
                "rank 1 has not enqueued bucket A",
                "waits for rank 0 at the barrier 'm'",
            ],
        ),
    ],
)
def test_the_wait_cycle_is_described(traces: list[Trace], one_resident: bool, expected: list[str]) -> None:
    example = found_in(traces, one_resident).example
    assert example is not None
    words = " ".join(wait_cycle(example))
    assert [one for one in expected if one not in words] == []


def test_a_chain_of_pairs_has_no_wait_cycle_and_a_ring_has() -> None:
    """Groups 0-1, 1-2 and 2-0 with one resident kernel each: the ring of three stands still, the chain does not."""

    def of(number: int, *groups: tuple[str, tuple[int, ...]]) -> Trace:
        trace = Trace(number)
        for name, ranks in groups:
            trace.threads[COMPUTING].append(_action(trace, f"begin {name}", ranks, COMPUTING))
        return trace

    a, b, c = ("A", (0, 1)), ("B", (1, 2)), ("C", (0, 2))
    assert how_many(found_in([of(0, a), of(1, a, b), of(2, b)], True)) == NONE
    assert how_many(found_in([of(0, c, a), of(1, a, b), of(2, b, c)], True)) == SOME


def test_ranks_that_call_different_collectives_are_detected() -> None:
    traces = pair("begin A 10, begin A 20", "begin A 10, begin A 30")
    expected = "collective 1 of group 65: rank 0 calls all_reduce 20 (bucket A), rank 1 all_reduce 30 (bucket A)"
    assert mismatches(traces) == [expected]
    with pytest.raises(Mismatch, match="collective 1 of group 65"):
        schedule_of(traces)
    assert mismatches(pair("begin A, begin A", "begin A")) == ["group 65: rank 0 calls 2 collectives, rank 1 1"]
    assert mismatches(pair("barrier m", "kernel 1")) == ["not all ranks reach the barrier 'm'"]
    with pytest.raises(Mismatch, match="thread beside does BEGIN"):
        schedule_of(pair("begin A, wait A", beside="begin B, wait B"))


def test_from_the_first_step_on() -> None:
    trace = rank(0, "begin A, wait A, kernel 1, begin A, after 2, wait A", "after 4, barrier b")
    trace.first_step = {COMPUTING: 2}
    kept = from_first_step(trace)
    assert [action.op for action in kept.threads[COMPUTING]] == [Op.KERNEL, Op.BEGIN, Op.AFTER, Op.WAIT]
    assert (kept.threads["beside"][0].number, kept.of_group(65)) == (2, [1])


RATES = Rates(kernel=1.0, host=0.0, barrier=0.0, latency=5.0, bytes_per_second=1e30)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("kernel 4, begin A, kernel 5, wait A, kernel 1", 0),
        ("kernel 4, begin A, kernel 2, wait A, kernel 1", 3),
        ("kernel 4, begin A, wait A, kernel 5", 5),
        # Two on one link: the second one ends at 14, seven operators are computed by then.
        ("kernel 4, begin A, begin B, kernel 3, wait A, wait B", 7),
    ],
)
def test_what_travels_beside_kernels_is_not_exposed(said: str, seconds: float) -> None:
    assert exposed_seconds(pair(said), RATES) == pytest.approx(seconds)
    assert ideal_exposed_seconds(rank(0, said), RATES) == pytest.approx(seconds)


def test_the_ideal_does_not_wait_for_a_stage_before_the_last() -> None:
    """The second stage of a bucket stands behind a wait of the calculation stream; the ideal one does not."""
    traces = pair("kernel 1, begin A, kernel 2, wait A, begin A, kernel 8, wait A")
    for trace in traces:
        trace.calls[:] = [Call(65, (0, 1), "all_reduce 1", 1000, "step 1, bucket 0") for _ in trace.calls]
    assert communication_seconds(traces[0], RATES) == pytest.approx(10)
    assert exposed_seconds(traces, RATES) == pytest.approx(3)
    assert ideal_exposed_seconds(traces[0], RATES) == pytest.approx(0)


def test_a_slow_rank_is_waited_for() -> None:
    assert Simulation(pair("kernel 1, begin A, wait A", "kernel 9, begin A, wait A"), RATES).seconds() == 14
