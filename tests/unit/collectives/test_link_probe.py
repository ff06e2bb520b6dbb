"""Combining the measured times of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleet_train.collectives import join
from tests.unit.collectives.one_of_two import OneOfTwo, one_of_two

TIMES = {0: 0.002, 1: 0.005, 2: 0.001, 3: 0.009}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    with one_of_two(monkeypatch) as made:
        yield made


def test_a_link_is_as_slow_as_the_slowest_rank_of_its_largest_group(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def all_gather(name: str, value: Any) -> dict[int, Any]:
        names.append(name)
        return TIMES | {0: value}

    monkeypatch.setattr(job, "all_gather", all_gather)
    sweep = join._Sweep("between nodes", [[3], [0, 1, 2]], None)
    assert join._slowest(job, sweep, 0.002) == 0.005
    assert join._slowest(job, sweep, 0.007) == 0.007
    assert names == ["probed 0", "probed 1"]
