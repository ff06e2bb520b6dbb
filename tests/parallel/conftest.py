"""Fixtures that run ranks for several tests of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="threads"), pytest.param(True, id="streams", marks=pytest.mark.long)]
)
def late_streams(request: pytest.FixtureRequest) -> bool:
    """Once as it is on a CPU, and once where collectives are enqueued and end late, as on GPUs."""
    return bool(request.param)
