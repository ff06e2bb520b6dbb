"""The soak with machine faults: its plan, the steps that were not rolled back, and that its verdict can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.soaking.faults import LEADER, Timeouts, listed_faults, plan_faults, recovery_of
from tools.soaking.kills import SoakFailed
from tools.soaking.ledger import Ledger, Stretch, attempts_of, merged, samples_wrong, steps_of, surviving
from tools.soaking.machines import failures_of, page_of

KINDS = ["machine", "frozen", "cut", "relay"]
TIMES = Timeouts(4.0, 10.0)

FAULT: dict[str, Any] = {
    "kind": "machine", "node": 0, "leader": 0, "role": " (leads)", "until_gone_on": False, "away_seconds": 3.0,
    "given_up": 0, "seconds_to_next_step": 20.0, "seconds_to_full_strength": 25.0,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "exit_codes": [0, 0, 0], "orphans": [], "left_behind": [],
    "comparison": {
        "tensors": 4, "tensors_that_differ": [], "steps_of_ranks": 9, "steps_that_one_lacks": 0, "losses": 9,
        "losses_that_differ": 0, "batches_that_differ": 0,
    },
    "samples": {"epochs": 3, "in_each": 10, "wrong": {}},
    "faults": [FAULT], "recovery_seconds": recovery_of([FAULT]),
}  # fmt: skip


def test_every_kind_comes_as_often_and_each_machine_is_a_victim() -> None:
    plans = plan_faults(KINDS, 30, 3, TIMES, seed=1)
    kinds = [plan.kind for plan in plans]
    assert sorted(kinds.count(kind) for kind in KINDS) == [7, 7, 8, 8]
    assert {plan.node for plan in plans} == {LEADER, 0, 1, 2}
    assert plans == plan_faults(KINDS, 30, 3, TIMES, seed=1)
    assert plans != plan_faults(KINDS, 30, 3, TIMES, seed=2)


def test_silence_lasts_longer_than_the_launchers_wait_for_it() -> None:
    plans = plan_faults(["frozen", "cut"], 100, 3, TIMES, seed=1)
    assert all(plan.away_seconds > TIMES.lost_node for plan in plans)
    assert any(plan.away_seconds > TIMES.rejoin for plan in plans)
    assert any(plan.until_gone_on for plan in plans)


def test_listed_faults_come_in_their_order() -> None:
    plans = listed_faults(["machine:0", "frozen:leader", "cut:2:late", "relay"], 3, TIMES, seed=1)
    assert [plan.kind for plan in plans] == KINDS
    assert [plan.node for plan in plans[:3]] == [0, LEADER, 2]
    assert [plan.until_gone_on for plan in plans] == [False, False, True, False]


@pytest.mark.parametrize("word", ["fire", "cut:3", "cut:first", "", "machine:late:0"])
def test_what_is_no_fault_is_refused_with_the_spelling(word: str) -> None:
    with pytest.raises(SoakFailed, match="write machine, frozen, cut, relay, each with nothing, :leader or :0 to :2"):
        listed_faults([word], 3, TIMES, seed=1)


def begin(attempt: int, world: int, place: list[int], came_from: str | None) -> dict[str, Any]:
    what = {"event": "begin", "attempt": attempt, "rank": 0, "world": world, "place": place, "came_from": came_from}
    return {**what, "samples": 9}


def save(attempt: int, world: int, place: list[int], digest: str) -> dict[str, Any]:
    what = {"event": "save", "attempt": attempt, "rank": 0, "world": world, "place": place, "digest": digest}
    return {**what, "time": float(attempt)}


def step(
    attempt: int, rank: int, world: int, before: list[int], after: list[int], indices: list[int]
) -> dict[str, Any]:
    what = {"event": "step", "attempt": attempt, "rank": rank, "world": world, "before": before, "after": after}
    return {**what, "indices": indices, "loss": "0x1p0", "time": float(attempt)}


HISTORY = [
    begin(0, 3, [0, 0], None), save(0, 3, [0, 6], "a"), save(0, 3, [1, 0], "lost with its disk"),
    begin(1, 2, [0, 6], "a"), save(1, 2, [1, 4], "b"),
    begin(2, 3, [1, 4], "b"),  # ended before it had saved
    begin(3, 3, [1, 4], "b"), save(3, 3, [2, 0], "c"),
    begin(4, 3, [2, 0], "c"), save(4, 3, [3, 0], "d"),
]  # fmt: skip


def test_stretches_are_followed_backwards_from_the_last_checkpoint() -> None:
    stretches = surviving(HISTORY, "d")
    assert stretches == [
        Stretch(0, 3, (0, 0), (0, 6)),
        Stretch(1, 2, (0, 6), (1, 4)),
        Stretch(3, 3, (1, 4), (2, 0)),
        Stretch(4, 3, (2, 0), (3, 0)),
    ]
    assert merged(stretches) == [*stretches[:2], Stretch(3, 3, (1, 4), (3, 0))]


@pytest.mark.parametrize(("digest", "after"), [("b", [1, 4]), ("c", [1, 9])])
def test_a_rank_that_was_killed_before_its_line_for_a_checkpoint_is_known_by_its_steps(digest: str, after: Any) -> None:
    attempt = {"b": 1, "c": 3}[digest]
    lines = [each for each in HISTORY if each.get("digest") != digest]
    told = [step(attempt, 0, 3 - (attempt == 1), [1, 2], after, []), step(0, 0, 3, [1, 2], [1, 3], [])]
    assert surviving([*lines, *told], "d") == surviving(HISTORY, "d")


def test_a_checkpoint_that_no_attempt_wrote_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attempt wrote the checkpoint"):
        surviving([each for each in HISTORY if each.get("digest") != "b"], "d")


def test_steps_behind_the_checkpoint_that_counted_are_no_part_of_history() -> None:
    lines = [step(0, 0, 3, [0, 3], [0, 6], [1]), step(0, 0, 3, [0, 6], [0, 9], [2]), step(1, 0, 2, [0, 6], [0, 8], [3])]
    found = steps_of([*HISTORY, *lines], surviving(HISTORY, "d"))
    assert {key: line["indices"] for key, line in found.items()} == {((0, 3), 0): [1], ((0, 6), 0): [3]}


def test_an_attempt_has_come_as_far_as_its_slowest_rank() -> None:
    lines = [begin(0, 2, [0, 0], None), step(0, 0, 2, [0, 0], [0, 4], []), step(0, 1, 2, [0, 0], [0, 2], [])]
    assert attempts_of(lines) == [{"attempt": 0, "world_size": 2, "begun_at": [0, 0], "ended_at": [0, 2]}]


@pytest.mark.parametrize(
    ("batches", "wrong"),
    [
        ([[3, 1], [0, 2], [4, 3]], {}),  # the first of the order once more, so that both ranks have three
        ([[3, 1], [0, 2], [4, 1]], {0: {"lost": 1, "too_often": 1, "more": 1}}),
        ([[3, 1], [0, 2], [3, 3]], {0: {"lost": 1, "too_often": 1, "more": 1}}),
        ([[3, 1], [0, 2]], {0: {"lost": 1, "too_often": 0, "more": -1}}),
        ([[3, 1], [0, 2], [4, 3], [1]], {0: {"lost": 0, "too_often": 0, "more": 2}}),
    ],
)
def test_every_sample_is_counted(batches: list[list[int]], wrong: object) -> None:
    steps = {((0, place), 0): step(0, 0, 2, [0, place], [0, 0], indices) for place, indices in enumerate(batches)}
    assert samples_wrong(steps, 5, 1, {0: [3, 1, 0, 2, 4]}) == wrong


def test_a_line_that_is_being_written_is_read_the_next_time(tmp_path: Path) -> None:
    ledger, path = Ledger(tmp_path), tmp_path / "attempt0000-rank0-1.jsonl"
    one, two = json.dumps(step(0, 0, 3, [0, 0], [0, 1], [])), json.dumps(step(1, 0, 2, [0, 0], [0, 1], []))
    path.write_text(one + "\n" + two[:20])
    assert (len(ledger.lines()), ledger.newest_attempt()) == (1, 0)
    path.write_text(one + "\n" + two + "\n")
    assert (len(ledger.lines()), ledger.newest_attempt()) == (2, 1)
    assert ledger.first_step_after(0.5, 0) == 1.0
    assert ledger.first_step_after(0.5, 0, world_size=3) is None


def test_a_sound_soak_has_no_failures() -> None:
    assert failures_of(SOUND) == []


def changed(part: str, **values: object) -> dict[str, Any]:
    return {part: {**SOUND[part], **values}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exit_codes": [0, 11, 0]}, "ended with [0, 11, 0]"),
        ({"orphans": ["python train.py"]}, "left running"),
        ({"left_behind": ["node 1: .copying-step-00000023"]}, "left behind"),
        (changed("comparison", tensors_that_differ=["w"]), "tensors that differ: ['w']"),
        (changed("comparison", tensors=0), "tensors that differ"),
        (changed("comparison", losses_that_differ=1), "1 losses differ"),
        (changed("comparison", batches_that_differ=2), "2 batches have different samples"),
        (changed("comparison", steps_that_one_lacks=3), "3 steps are not in both runs"),
        (changed("samples", wrong={0: {"lost": 1}}), "samples lost or seen too often"),
        ({"recovery_seconds": {"measured": 1, "median": 61.0, "longest": 61.0}}, "took 61.0 s (bound: 60 s)"),
        ({"recovery_seconds": {"measured": 0}}, "no step followed some faults"),
    ],
)
def test_each_loss_is_a_failure(change: dict[str, Any], said: str) -> None:
    (failure,) = failures_of({**SOUND, **change})
    assert said in failure


def test_the_page_shows_what_went_wrong() -> None:
    at = {
        "date": "2026-11-22T10:00:00", "processor": "x", "processors": 2, "kernel": "6", "load_average_before": [0.1],
        "versions": {"python": "3"}, "commit": "abc", "uncommitted_changes": False, "command": "python tools/soak.py",
    }  # fmt: skip
    record = {
        **SOUND, "circumstances": at, "network": {"rate": "1gbit"}, "nodes": 3, "launch_flags": [], "train_flags": [],
        "full_strength_seconds": recovery_of([FAULT], "seconds_to_full_strength"), "seconds": 50.0, "rolled_back": 4,
        "step_seconds": 0.2, "summary": {"test_accuracy": 0.9}, "reference_runs": 1, "failures": ["2 losses differ"],
        "stretches": [each.as_json() for each in surviving(HISTORY, "d")], "attempts": attempts_of(HISTORY),
    }  # fmt: skip
    text = page_of(record)
    assert "- Result: **failed**: 2 losses differ." in text
    assert "| attempts that trained, by machines | 1 on 2, 4 on 3 |" in text
    assert "| stretches that were not rolled back; changes of world size in them | 4; 2 |" in text
    assert "| machine | 0 (leads) | 3.0 | 20.0 | 25.0 |" in text
