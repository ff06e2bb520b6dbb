"""The streams of an engine under every profile: no deadlock, one order, and the exposed time; what must be found."""

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
from tests.streams.replay import replay, schedule_of
from tests.streams.timing import Rates
from tests.streams.trace import COMPUTING, Op, Trace, from_first_step, mismatches, wait_cycle
from tools.benchmarks.streams import LOCAL_GROUPS, Case, cases, exposed, failures_of

STEPS = 5
INTERLEAVINGS = 200
CASES = {case.name: case for case in cases()}
# Each case on one cluster here, all of them on all in the record: ranks 2 to 8 in turn, and all local groups once.
CLUSTERS = {
    name: case.shapes[number % len(case.shapes) if case.share == 1 else 0]
    for number, (name, case) in enumerate(CASES.items())
}
# What must be in a trace, or the profile has not been modelled.
SEEN = {
    "dgc": ("all_gather", 2),
    "bf16_compression": ("bfloat16", 5 * STEPS),
    "diloco": ("bfloat16", 1),
    "int8_compression": ("uint8", 5 * STEPS),
    "int4_compression": ("all_to_all", 5 * STEPS),
    "streaming_diloco": ("uint8", 3),
    "sync_batch_norm": ("all_gather", 2 * STEPS),
    "hierarchical": ("reduce ", 5 * STEPS),
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
def traces_of(name: str, shape: tuple[int, int]) -> list[Trace]:
    return record(CASES[name].profile, Cluster.imagined(*shape), STEPS)


@pytest.mark.parametrize(("name", "shape"), CHOSEN)
def test_no_interleaving_deadlocks(name: str, shape: tuple[int, int]) -> None:
    traces = traces_of(name, shape)
    assert mismatches(traces) == []
    assert len(traces) == shape[0] * shape[1]
    never_deadlock(traces)
    assert replay(schedule_of(traces), 20, np.random.default_rng(5)).deadlocks == 0


def never_deadlock(traces: list[Trace]) -> None:
    schedule = schedule_of([from_first_step(trace) for trace in traces])
    for one_resident in (True, False):
        assert replay(schedule, INTERLEAVINGS, np.random.default_rng(5), one_resident).deadlocks == 0


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


@pytest.mark.parametrize("name", SEEN)
def test_what_the_profile_is_about_is_in_its_trace(name: str) -> None:
    what, least = SEEN[name]
    calls = [call for call in traces_of(name, CLUSTERS[name])[0].calls if not call.what.startswith("startup")]
    assert sum(what in call.signature for call in calls) >= least


def test_a_gradient_merge_and_local_steps_send_nothing_in_between() -> None:
    def steps(name: str) -> set[str]:
        trace = traces_of(name, CLUSTERS[name])[0]
        return {call.what.partition(",")[0] for call in trace.calls if call.what.startswith(("step", "averaging"))}

    assert steps("gradient_merge") == {"step 1", "step 2"}
    assert steps("local_sgd") == {"step 1", "step 2", "averaging after step 4"}


@pytest.mark.parametrize("name", ["multi_node", "hierarchical", "dgc", "gradient_merge", "powersgd"])
def test_the_host_reads_no_value_in_a_step(name: str) -> None:
    """But what the script fetches, and the first run of a gradient merge, whose count is read behind an event."""
    trace = traces_of(name, CLUSTERS[name])[0]
    actions = trace.threads[COMPUTING][trace.first_step[COMPUTING] :]
    assert {action.what for action in actions if action.op is Op.SYNC} == {"fetch"}


RATES = Rates()


@pytest.mark.parametrize("name", ["multi_node", "powersgd", "dgc", "sync_batch_norm", "unfused"])
def test_the_exposed_time_is_near_the_ideal(name: str) -> None:
    figures = exposed(CASES[name], RATES, STEPS)
    assert figures["ideal_ms"] <= figures["ours_ms"] + 1e-3
    assert figures["ours_ms"] <= 1.35 * figures["ideal_ms"]
    # Synchronised batch norm has few operators to hide behind: what exchanges its statistics cannot be hidden at all.
    assert figures["ours_ms"] < (0.95 if name == "sync_batch_norm" else 0.9) * figures["old_ms"]


def test_a_case_has_clusters_of_2_to_8_ranks() -> None:
    def ranks(case: Case) -> set[int]:
        return {nodes * each for nodes, each in case.shapes}

    assert ranks(CASES["multi_node"]) == ranks(CASES["single_node"]) == set(range(2, 9))
    assert CASES["hierarchical"].shapes == LOCAL_GROUPS


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
    row = {"profile": "multi_node", "nodes": 2, "ranks_per_node": 1, "mismatches": [], "deadlocks": 0}
    control = {"name": "a control", "found": "deadlock", "expected": "deadlock"}
    assert failures_of({"replays": [row], "controls": [control]}) == []
    stands = row | {"deadlocks": 3, "example": ["a waits for b", "b waits for a"]}
    differs = row | {"nodes": 3, "mismatches": ["collective 4 differs"]}
    assert failures_of({"replays": [stands, differs], "controls": [control | {"found": "nothing"}]}) == [
        "multi_node on 2 x 1: 3 deadlocks; a waits for b; b waits for a",
        "multi_node on 3 x 1: collective 4 differs",
        "control 'a control': found nothing, expected deadlock",
    ]
