"""The shares of a job whose measurements and checkpoints are made up."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from fleet_train.convert.shares import BatchShares
from fleet_train.profile import Profile

SAVED = [0.75, 0.25]


def shares_of(ranks: int = 2, **knobs: Any) -> BatchShares:
    job = mock.MagicMock(world_size=ranks)
    return BatchShares(job, Profile(**{"batch_shares": "auto", **knobs}))


def resumed(saved: list[float], **knobs: Any) -> list[float] | None:
    shares = shares_of(**knobs)
    shares.resume(saved)
    return shares.record()


def test_a_resume_goes_on_with_the_saved_shares_within_the_bounds_of_now() -> None:
    assert resumed(SAVED) == SAVED
    assert resumed(SAVED, max_share=0.75) == SAVED
    assert resumed(SAVED, max_share=0.6) == pytest.approx([0.6, 0.4]), "lowered since, for the memory of a rank"
    assert resumed(SAVED, max_share=[1, 0.1]) == pytest.approx([0.9, 0.1])


def test_a_resume_keeps_shares_that_the_profile_gives_and_begins_anew_on_other_ranks() -> None:
    assert resumed(SAVED, batch_shares=[1, 1]) == [0.5, 0.5]
    shares = shares_of(ranks=3)
    assert shares.resume(SAVED) == ["batch_shares: the checkpoint has those of 2 ranks; they are measured anew"]
    assert shares.record() == [1 / 3] * 3
    assert resumed(SAVED, batch_shares="equal") is None
