"""docs/strategies.md describes every profile of the catalogue, and no others."""

from __future__ import annotations

import re

import pytest

from fleet_train.profile import Profile, load_profile, profile_names
from tests.support.processes import ROOT

TEXT = (ROOT / "docs" / "strategies.md").read_text()
_ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \|$", re.MULTILINE)
ROWS = dict(_ROW.findall(TEXT.partition("## Every profile")[2].partition("\n## ")[0]))
DECISIONS = TEXT.partition("## Decide")[2].partition("\n### ")[0]


def changes_the_training(profile: Profile) -> bool:
    """Whether what is computed is another sum than that of float32 gradients, over the same samples per update."""
    return (
        profile.use_local_sgd
        or profile.compression != "none"
        or profile.accumulate_steps > 1
        or profile.amp_level != "O0"
        or profile.sync_batch_norm
    )


def test_every_profile_has_a_row() -> None:
    assert sorted(ROWS) == sorted(profile_names())


@pytest.mark.parametrize("name", profile_names())
def test_a_row_says_whether_the_result_is_the_same(name: str) -> None:
    assert ROWS[name] == ("no" if changes_the_training(load_profile(name)) else "yes")


def test_the_decision_table_names_profiles_that_exist() -> None:
    named = {word for word in re.findall(r"`(\w+)`", DECISIONS) if word not in ("recommend",)}
    assert named - set(profile_names()) == set()
    assert len(named) > 10
