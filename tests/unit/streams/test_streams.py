"""The model of streams on cases small enough to derive by hand, and the streams of an engine under every profile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.profile import Profile
from tests.streams.programs import CONTROLS, DEADLOCK, Control, outcome, record, shortened
from tests.streams.replay import Mismatch, replay, schedule_of
from tests.streams.timing import Rates, exposed_seconds, ideal_exposed_seconds
from tests.streams.trace import COMPUTING, Action, Call, Op, Trace, from_first_step, mismatches, wait_cycle
from tools.benchmarks.streams import LOCAL_GROUPS, cases, exposed, failures_of

NUMBER = 300
NONE, SOME, ALL = "none", "some", "all"


def rank(number: int, said: str, beside: str = "") -> Trace:
    """A rank in short words: ``begin A, wait A, kernel 3, sync, record, read, barrier m``, and ``after 2`` for two
    actions of the other thread. Groups are called A, B, ..; repeated names are further collectives."""
    trace = Trace(number)
    for thread, words in ((COMPUTING, said), ("beside", beside)):
        if words:
            trace.threads[thread] = [_action(trace, one, thread) for one in words.split(", ")]
    return trace


def _action(trace: Trace, said: str, thread: str) -> Action:
    op, _, what = said.partition(" ")
    where = f"the operator of '{said}'"
    match op:
        case "begin":
            name, _, size = what.partition(" ")
            trace.calls.append(Call(ord(name[0]), (0, 1), f"all_reduce {size or 1}", 1000, f"bucket {name}"))
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


AT_ONCE = pair("begin A, wait A, begin B, wait B", "begin B, wait B, begin A, wait A")
OTHER_ORDER = pair("begin A, begin B, wait A, wait B", "begin B, begin A, wait A, wait B")
READ_FIRST = pair("begin A, sync, barrier m, wait A", "barrier m, begin A, wait A")


@pytest.mark.parametrize(
    ("traces", "one_resident", "expected"),
    [
        pytest.param(AT_ONCE, False, ALL, id="waited for at once in another order"),
        pytest.param(OTHER_ORDER, False, NONE, id="another order without waits, side by side"),
        pytest.param(OTHER_ORDER, True, SOME, id="another order without waits, one resident"),
        # Both are enqueued: each device chooses for itself which one it runs first.
        pytest.param(pair("begin A, begin B, wait A, wait B"), True, SOME, id="one order, one resident"),
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
            pair("begin A, sync, after 2, wait A", "kernel 1, kernel 1, after 2, begin A", "after 2, barrier b"),
            False, ALL, id="a barrier that waits for its own result",
        ),
    ],
)  # fmt: skip
def test_what_stands_still(traces: list[Trace], one_resident: bool, expected: str) -> None:
    found = replay(schedule_of(traces), NUMBER, np.random.default_rng(3), one_resident)
    assert {0: NONE, NUMBER: ALL}.get(found.deadlocks, SOME) == expected
    if traces is READ_FIRST:
        assert found.example is not None
        words = " ".join(wait_cycle(found.example))
        assert "rank 0's thread 'computing', in the operator of 'sync', waits for its device (a value)" in words
        assert "rank 1 has not enqueued bucket A" in words
        assert "waits for rank 0 at the barrier 'm'" in words


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


STEPS = 5
INTERLEAVINGS = 200
CASES = {case.name: case for case in cases()}
# Each case on one cluster here, all of them on all in the record: ranks 2 to 8 in turn, and all local groups once.
CLUSTERS = {
    name: case.shapes[number % len(case.shapes) if case.share == 1 else 0]
    for number, (name, case) in enumerate(CASES.items())
} | {"hierarchical, int8": (3, 2)}  # three leaders, who have one stage more than two
# What must be in a trace, or the profile has not been modelled.
SEEN = {
    "bf16_compression": ("bfloat16", 5 * STEPS),
    "diloco": ("bfloat16", 1),
    "int8_compression": ("uint8", 5 * STEPS),
    "int4_compression": ("all_to_all", 5 * STEPS),
    "streaming_diloco": ("uint8", 3),
    "sync_batch_norm": ("all_gather", 2 * STEPS),
    "hierarchical": ("reduce ", 5 * STEPS),
    "multi_node, calc": ("all_reduce", 5 * STEPS),
    "hierarchical, calc": ("reduce ", 5 * STEPS),
    "hierarchical, int8": ("all_to_all", 5 * STEPS),
    "hierarchical, PowerSGD": ("reduce ", 5 * STEPS + 5 * (STEPS - 2)),
}
# `make test` has those with a communication of their own kind.
CHOSEN = [pytest.param(name, CLUSTERS[name], marks=() if name in SEEN else pytest.mark.long) for name in CASES] + [
    pytest.param("hierarchical", shape, marks=pytest.mark.long) for shape in LOCAL_GROUPS
]


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    """Traces are recorded in static mode."""
    paddle.enable_static()
    yield
    paddle.disable_static()


@cache
def traces_of(name: str, shape: tuple[int, int], ranks: tuple[int, ...] | None = None) -> list[Trace]:
    return record(CASES[name].profile, Cluster.imagined(*shape), STEPS, ranks=ranks)


def first_of(name: str) -> Trace:
    """Rank 0's; of a case that is replayed the trace that is there."""
    cluster = CLUSTERS[name]
    return traces_of(name, cluster)[0] if name in SEEN else traces_of(name, cluster, (0,))[0]


@pytest.mark.parametrize(("name", "shape"), CHOSEN)
def test_no_interleaving_deadlocks(name: str, shape: tuple[int, int]) -> None:
    traces = traces_of(name, shape)
    assert mismatches(traces) == []
    assert len(traces) == shape[0] * shape[1]
    never_deadlock(traces)
    assert replay(schedule_of(traces), 20, np.random.default_rng(5)).deadlocks == 0
    if name in SEEN:
        what, least = SEEN[name]
        calls = [call for call in traces[0].calls if not call.what.startswith("startup")]
        assert sum(what in call.signature for call in calls) >= least


def never_deadlock(traces: list[Trace]) -> None:
    schedule = schedule_of([from_first_step(trace) for trace in traces])
    for one_resident in (True, False):
        assert replay(schedule, INTERLEAVINGS, np.random.default_rng(5), one_resident).deadlocks == 0


def test_own_streams_carry_each_collective_twice_while_they_are_compared() -> None:
    cluster, profile = Cluster.imagined(*CLUSTERS["multi_node"]), CASES["multi_node"].profile
    proven, alone = (record(profile, cluster, STEPS, ranks=(0,), proves=proves)[0] for proves in (True, False))
    sums = [[call for call in trace.calls if "all_reduce" in call.signature] for trace in (proven, alone)]
    assert len(sums[0]) - len(sums[1]) == 3 * (len(sums[1]) // STEPS) > 0


def test_sums_of_the_calculation_stream_do_not_travel_beside_it() -> None:
    figures = exposed(CASES["multi_node, calc"], Rates(), STEPS)
    assert figures["ours_ms"] == pytest.approx(figures["communication_ms"], rel=0.1)


@pytest.mark.parametrize("settings", [{}, {"accumulate_steps": 2}, {"use_hierarchical_allreduce": True}])
def test_steps_without_a_barrier_do_not_deadlock_either(settings: dict[str, Any]) -> None:
    profile = shortened(Profile(barrier_every_steps=4, **settings))
    traces = record(profile, Cluster.imagined(2, 2), 4 * STEPS)
    barriers = [barriers_of(trace) for trace in traces]
    assert barriers == [barriers[0]] * 4
    assert 2 < len(barriers[0]) < 4 * STEPS // profile.accumulate_steps
    assert mismatches(traces) == []
    never_deadlock(traces)


def barriers_of(trace: Trace) -> list[str]:
    actions = [action for thread in trace.threads.values() for action in thread]
    return [action.what for action in actions if action.op is Op.BARRIER and action.what.startswith("barrier step ")]


@pytest.mark.parametrize("name", ["multi_node", "hierarchical", "gradient_merge", "powersgd"])
def test_the_host_reads_no_value_in_a_step(name: str) -> None:
    """But what the script fetches, and the first run of a gradient merge, whose count is read behind an event."""
    trace = first_of(name)
    actions = trace.threads[COMPUTING][trace.first_step[COMPUTING] :]
    assert {action.what for action in actions if action.op is Op.SYNC} == {"fetch"}


@pytest.mark.parametrize("name", ["multi_node", "powersgd", "sync_batch_norm", "unfused"])
def test_the_exposed_time_is_near_the_ideal(name: str) -> None:
    figures = exposed(CASES[name], Rates(), STEPS)
    assert figures["ideal_ms"] <= figures["ours_ms"] + 1e-3
    assert figures["ours_ms"] <= 1.35 * figures["ideal_ms"]
    # Synchronised batch norm has few operators to hide behind: what exchanges its statistics cannot be hidden at all.
    assert figures["ours_ms"] < (0.95 if name == "sync_batch_norm" else 0.9) * figures["old_ms"]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_the_model_finds_an_engine_without_one_of_its_rules(control: Control) -> None:
    found = outcome(control, interleavings=60, seed=8)
    assert found.what == control.expected
    if control.expected == DEADLOCK:
        assert found.found.deadlocks > 30
        assert found.found.example is not None
        words = wait_cycle(found.found.example)
        assert len(words) > 2
        assert any("which is running" in one for one in words)


def test_a_deadlock_a_mismatch_or_an_undetected_control_fails() -> None:
    row = {"profile": "multi_node", "nodes": 2, "ranks_per_node": 1, "mismatches": [], "deadlocks": 0, "example": []}
    control = {"name": "a control", "found": "deadlock", "expected": "deadlock"}
    assert failures_of({"replays": [row], "controls": [control]}) == []
    wrong = [row | {"deadlocks": 3}, row | {"mismatches": ["collective 4 differs"]}]
    assert len(failures_of({"replays": wrong, "controls": [control | {"found": "nothing"}]})) == 3
