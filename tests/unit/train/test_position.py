"""Where a checkpoint's counts lead, also those of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_train import fleet
from fleet_train.errors import CheckpointError
from fleet_train.profile import Profile
from fleet_train.train.checkpoint.manager import TrainState
from fleet_train.train.checkpoint.position import Position, resumed

MERGE_3 = Profile(accumulate_steps=3)


@pytest.fixture(autouse=True)
def merging_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "profile", lambda: MERGE_3)
    monkeypatch.setattr(fleet, "worker_num", lambda: 2)
    monkeypatch.setattr(fleet, "worker_index", lambda: 0)


def state(step: int, digest: str = MERGE_3.digest(), **more: Any) -> TrainState:
    profile = {"name": "merge", "digest": digest}
    return TrainState(1, step, 10, 2, {}, {}, profile, {}, consumed_samples=8, **more)


def test_a_state_that_counts_updates_leads_to_its_place() -> None:
    found = resumed(state(4, batches=13, pending_batches=1, accumulate_steps=3), 10)[0]
    assert found == Position(1, 4, 8, batches=13, pending=1, updates=4)


def test_a_state_that_counted_micro_batches_is_converted() -> None:
    assert resumed(state(13), 10)[0] == Position(1, 4, 8, batches=13, pending=1, updates=13)


def test_a_state_that_counted_micro_batches_of_an_unknown_update_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"counted micro-batches as steps.*resume it with the profile"):
        resumed(state(13, digest="another"), 10)


def test_half_an_update_is_not_gone_on_with_as_another_part_of_one() -> None:
    with pytest.raises(CheckpointError, match=r"1 of the 4 micro-batches of an update, and accumulate_steps is now 3"):
        resumed(state(3, batches=13, pending_batches=1, accumulate_steps=4), 10)


def test_other_batches_per_epoch_keep_the_share_of_the_epoch() -> None:
    found = resumed(state(5, batches=15, pending_batches=0, accumulate_steps=3), 20)[0]
    assert (found.batches, found.step, found.updates) == (30, 10, 5)  # metrics are not renumbered
    again = resumed(state(5, batches=15, pending_batches=0, accumulate_steps=3, updates=70), 20)[0]
    assert (again.step, again.updates) == (10, 70)
