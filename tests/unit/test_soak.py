"""The soak's plan, and that its verdict can fail."""

from __future__ import annotations

from typing import Any

import pytest

from tools.soaking.kills import plan_kills
from tools.soaking.page import page
from tools.soaking.verdict import failures_of, recovery

SOUND: dict[str, Any] = {
    "exit_codes": [0, 0],
    "orphans": [],
    "checkpoints_used": ["step-00000023", "step-00000046"],
    "half_written_left": [],
    "comparison": {"tensors": 4, "tensors_that_differ": [], "losses": 9, "losses_that_differ": 0},
}


def test_kills_are_spread_over_the_run_and_over_kinds_and_ranks() -> None:
    plans = plan_kills(30, 1000, 4, seed=1)
    kinds = [plan.kind for plan in plans]
    assert [kinds.count(kind) for kind in ("step", "save", "start")] == [12, 12, 6]
    steps = [plan.step for plan in plans if plan.kind != "start"]
    assert steps == sorted(steps)
    assert steps[0] < 200
    assert 700 < steps[-1] < 900
    assert {plan.rank for plan in plans} == {0, 1, 2, 3}
    assert plans == plan_kills(30, 1000, 4, seed=1)
    assert plans != plan_kills(30, 1000, 4, seed=2)


def test_freezes_are_planned_between_kills() -> None:
    plans = plan_kills(10, 1000, 2, seed=1, freezes=20)
    kinds = [plan.kind for plan in plans]
    assert [kinds.count(kind) for kind in ("step", "save", "start", "freeze")] == [4, 4, 2, 20]
    assert kinds != sorted(kinds)
    assert all((plan.frozen_seconds > 0) == (plan.kind == "freeze") for plan in plans)
    assert max(plan.frozen_seconds for plan in plans) > 3


def test_a_sound_soak_has_no_failures() -> None:
    assert failures_of(SOUND) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("exit_codes", [0, 11], "ended with [0, 11]"),
        ("orphans", ["python train.py"], "left behind"),
        ("checkpoints_used", [".writing-step-00000023"], "is not complete"),
        ("half_written_left", [".writing-step-00000023"], "were left"),
        ("comparison", {**SOUND["comparison"], "tensors_that_differ": ["w"]}, "tensors that differ: ['w']"),
        ("comparison", {**SOUND["comparison"], "tensors": 0}, "no tensors found"),
        ("comparison", {**SOUND["comparison"], "losses_that_differ": 1}, "1 of 9 losses differ"),
    ],
)
def test_each_loss_is_a_failure(name: str, value: object, said: str) -> None:
    (failure,) = failures_of({**SOUND, name: value})
    assert said in failure


def test_the_page_shows_what_went_wrong() -> None:
    kill = {"kind": "save", "rank": 0, "seconds_to_next_step": 9.0}
    at = {
        "date": "2026-11-21T10:00:00", "processor": "x", "processors": 2, "kernel": "6", "load_average_before": [0.1],
        "versions": {"python": "3"}, "commit": "abc", "uncommitted_changes": False, "command": "python tools/soak.py",
    }  # fmt: skip
    record = {
        **SOUND, "circumstances": at, "network": {"rate": None}, "nodes": 2, "ranks_per_node": 1, "train_flags": [],
        "kills": [kill, {**kill, "seconds_to_next_step": None}, {**kill, "kind": "freeze"}],
        "recovery_seconds": recovery([kill]), "seconds": 50.0,
        "kills_while_a_checkpoint_was_written": 1, "failures": ["1 of 9 losses differ"],
    }  # fmt: skip
    record["comparison"] = {**SOUND["comparison"], "final_step": 90, "test_accuracy": 0.9}
    text = page(record)
    assert "- Result: **failed**: 1 of 9 losses differ." in text
    assert "| attempts; resumed from a checkpoint | 3, 2 |" in text
    assert "| ranks frozen (`SIGSTOP` for up to 5 s) | 1 |" in text
    assert "| seconds from a kill to the next step (1 measured): median, longest | 9.0, 9.0 |" in text
