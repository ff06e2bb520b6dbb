"""The soak: its plan, the steps that were not rolled back, and that its verdict can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools.soak import compare_steps, compare_tensors, failures_of
from tools.soaking.faults import (
    recovery_of,
)
from tools.soaking.job import Job, SoakFailed
from tools.soaking.ledger import Stretch, merged, samples_wrong, steps_of, surviving

FAULT: dict[str, Any] = {
    "kind": "machine", "victim": 0, "role": " (leads)", "until_gone_on": False, "away_seconds": 3.0, "given_up": 0,
    "checkpoint_under_way": None, "seconds_to_next_step": 20.0, "seconds_to_full_strength": 25.0,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "exit_codes": [0, 0, 0], "orphans": [], "left_behind": [],
    "comparison": {
        "tensors": 4, "tensors_that_differ": [], "steps_of_ranks": 9, "steps_that_one_lacks": 0, "losses": 9,
        "losses_that_differ": 0, "batches_that_differ": 0,
    },
    "samples": {"epochs": 3, "in_each": 10, "wrong": {}},
    "faults": [FAULT], "recovery_seconds": recovery_of([FAULT]), "next_step_within": 60.0,
}  # fmt: skip


def begin(attempt: int, world: int, place: list[int], came_from: str | None) -> dict[str, Any]:
    what = {"event": "begin", "attempt": attempt, "rank": 0, "world": world, "place": place, "came_from": came_from}
    return {**what, "samples": 9}


def save(attempt: int, world: int, place: list[int], digest: str) -> dict[str, Any]:
    what = {"event": "save", "attempt": attempt, "rank": 0, "world": world, "place": place, "digest": digest}
    return {**what, "time": float(attempt)}


def step(attempt: int, world: int, before: list[int], after: list[int], indices: list[int]) -> dict[str, Any]:
    what = {"event": "step", "attempt": attempt, "rank": 0, "world": world, "before": before, "after": after}
    return {**what, "indices": indices, "loss": "0x1p0", "time": float(attempt)}


HISTORY = [
    begin(0, 3, [0, 0], None), save(0, 3, [0, 6], "a"), save(0, 3, [1, 0], "lost with its disk"),
    begin(1, 2, [0, 6], "a"), save(1, 2, [1, 4], "b"),
    begin(2, 3, [1, 4], "b"),  # ended before it had saved
    begin(3, 3, [1, 4], "b"), save(3, 3, [2, 0], "c"),
    begin(4, 3, [2, 0], "c"), save(4, 3, [3, 0], "d"),
]  # fmt: skip
STRETCHES = [
    Stretch(0, 3, (0, 0), (0, 6)),
    Stretch(1, 2, (0, 6), (1, 4)),
    Stretch(3, 3, (1, 4), (2, 0)),
    Stretch(4, 3, (2, 0), (3, 0)),
]


def test_stretches_are_followed_backwards_from_the_last_checkpoint() -> None:
    assert surviving(HISTORY, "d") == STRETCHES
    assert merged(STRETCHES) == [*STRETCHES[:2], Stretch(3, 3, (1, 4), (3, 0))]
    with pytest.raises(ValueError, match="no attempt wrote the checkpoint"):
        surviving([each for each in HISTORY if each.get("digest") != "b"], "d")


def test_steps_behind_the_checkpoint_that_counted_are_no_part_of_history() -> None:
    lines = [step(0, 3, [0, 3], [0, 6], [1]), step(0, 3, [0, 6], [0, 9], [2]), step(1, 2, [0, 6], [0, 8], [3])]
    found = steps_of([*HISTORY, *lines], STRETCHES)
    assert {key: line["indices"] for key, line in found.items()} == {((0, 3), 0): [1], ((0, 6), 0): [3]}
    assert len(steps_of(lines)) == 2, "of the same step the later one"


@pytest.mark.parametrize(
    ("batches", "wrong"),
    [
        ([[3, 1], [0, 2], [4, 3]], {}),  # the first of the order once more, so that both ranks have three
        ([[3, 1], [0, 2], [4, 1]], {0: {"lost": 1, "too_often": 1, "more": 1}}),
        ([[3, 1], [0, 2]], {0: {"lost": 1, "too_often": 0, "more": -1}}),
        ([[3, 1], [0, 2], [4, 3], [1]], {0: {"lost": 0, "too_often": 0, "more": 2}}),
    ],
)
def test_every_sample_is_counted(batches: list[list[int]], wrong: object) -> None:
    steps = {((0, place), 0): step(0, 2, [0, place], [0, 0], indices) for place, indices in enumerate(batches)}
    assert samples_wrong(steps, 5, 1, {0: [3, 1, 0, 2, 4]}) == wrong


def test_one_bit_of_a_tensor_or_a_loss_is_a_difference(tmp_path: Path) -> None:
    jobs = [Job(tmp_path / name, None, range(2), 1, 16400, (), ()) for name in ("soaked", "reference")]
    for number, job in enumerate(jobs):
        folder = job.checkpoints(number) / "step-00000009"
        folder.mkdir(parents=True)
        values = np.array([1.0, np.nan], np.float32)
        values.view(np.uint32)[0] ^= number
        save_file({"w": values, "same": np.ones(2, np.int64)}, folder / "persistables.safetensors")
        (folder / "complete.json").touch()
    jobs[1] = Job(jobs[1].folder, None, [1], 1, 16400, (), ())
    assert compare_tensors(*jobs) == {"tensors": 2, "tensors_that_differ": ["w"]}
    with pytest.raises(SoakFailed, match="there is no checkpoint"):
        jobs[1].newest_checkpoint([0])
    one = steps_of([step(0, 1, [0, 0], [0, 1], [1]), step(0, 1, [0, 1], [0, 2], [2])])
    other = steps_of([step(0, 1, [0, 0], [0, 1], [3]) | {"loss": "0x2p0"}])
    assert compare_steps(one, other) == {
        "steps_of_ranks": 1, "steps_that_one_lacks": 1, "losses": 1, "losses_that_differ": 1, "batches_that_differ": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("part", "changed", "said"),
    [
        ("exit_codes", [0, 11, 0], "ended with [0, 11, 0]"),
        ("orphans", ["python train.py"], "left running"),
        ("left_behind", ["node 1: .copying-step-00000023"], "left behind"),
        ("comparison", {"tensors_that_differ": ["w"]}, "tensors that differ: ['w']"),
        ("comparison", {"tensors": 0}, "tensors that differ"),
        ("comparison", {"losses_that_differ": 1}, "1 losses differ"),
        ("comparison", {"batches_that_differ": 2}, "2 batches have different samples"),
        ("comparison", {"steps_that_one_lacks": 3}, "3 steps are not in both runs"),
        ("samples", {"wrong": {0: {"lost": 1}}}, "samples lost or seen too often"),
        ("faults", [FAULT | {"seconds_to_next_step": 61.0}], "took 61.0 s (bound: 60 s)"),
        ("recovery_seconds", {"measured": 0, "longest": 0.0}, "no step followed some faults"),
    ],
)
def test_each_loss_is_a_failure(part: str, changed: Any, said: str) -> None:
    assert failures_of(SOUND) == []
    value = {**SOUND[part], **changed} if isinstance(changed, dict) else changed
    (failure,) = failures_of({**SOUND, part: value})
    assert said in failure
