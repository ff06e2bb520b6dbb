"""What a run says of its sizes."""

from __future__ import annotations

import pytest

from fleet_train import fleet
from fleet_train.profile import Profile
from fleet_train.train.config import TrainConfig
from fleet_train.train.evaluation import Outcome
from fleet_train.train.reference import headline, summarize


@pytest.fixture
def three_ranks_merge_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "profile", lambda: Profile(accumulate_steps=2))
    monkeypatch.setattr(fleet, "worker_num", lambda: 3)
    monkeypatch.setattr(fleet, "node_num", lambda: 1)


@pytest.mark.usefixtures("three_ranks_merge_two")
def test_the_global_batch_is_that_of_an_update() -> None:
    config = TrainConfig(batch_size=8)
    assert "global batch 48," in headline(config, 5)
    found = summarize(config, Outcome(), 0, 1.0)
    assert (found["batch_size_per_rank"], found["global_batch_size"]) == (8, 48)
