"""A folder for profiles, and a refused knob: at present the table has none, and the rules for one must keep working."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet_train.profile import KNOBS


@pytest.fixture
def refused_knob(monkeypatch: pytest.MonkeyPatch) -> str:
    """``sync_nccl_allreduce`` as a knob that is not available yet; the name of it."""
    name = "sync_nccl_allreduce"
    row = replace(KNOBS[name], fate="refused", reason="not available yet; leave it off: a reason.")
    monkeypatch.setitem(KNOBS, name, row)
    return name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
