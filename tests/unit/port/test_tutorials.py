"""Tutorials of 2018 to 2022 run as they are ported: nothing is left to do, and each trains what it says."""

from __future__ import annotations

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks
from tests.unit.port.tutorials import SCRIPTS

TUTORIALS = ROOT / "tests/unit/port/tutorials.py"
GAN = "gan with fleet"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return run_ranks(TUTORIALS, 1, nodes=0, folder=tmp_path_factory.mktemp("alone"), timeout_seconds=240)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_tutorial_trains_as_it_says(name: str, alone: RanksResult) -> None:
    assert alone.values[0]["outcomes"][name] == []


def test_the_gan_of_the_book_trains_on_two_ranks_with_equal_replicas(
    alone: RanksResult, tmp_path_factory: pytest.TempPathFactory
) -> None:
    two = run_ranks(TUTORIALS, 2, folder=tmp_path_factory.mktemp("two"), args=[GAN], timeout_seconds=240)
    assert two.of_all("outcomes") == [{GAN: []}] * 2
    first, second = two.of_all("digests")
    assert first == second
    assert first[GAN] != alone.values[0]["digests"][GAN], "each rank has data of its own"
