"""Two optimizers in one program: one order of communication on every rank, and the parameters of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

SCRIPT = ROOT / "tests" / "parallel" / "two_optimizers.py"
Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    cases: Cases = run_ranks(SCRIPT, 1, nodes=0, folder=tmp_path_factory.mktemp("alone")).values[0]["cases"]
    return cases


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, late_streams: bool) -> list[Cases]:
    result = run_ranks(SCRIPT, 2, folder=tmp_path_factory.mktemp("two"), late_streams=late_streams)
    return result.of_all("cases")


def test_what_talks_is_one_chain_through_both(ranks: list[Cases]) -> None:
    assert [case for rank in ranks for case, found in rank.items() if not found["chain"]] == []


def test_parameters_and_state_are_those_of_one_process(alone: Cases, ranks: list[Cases]) -> None:
    for case, found in ranks[0].items():
        for name, expected in alone[case]["state"].items():
            np.testing.assert_allclose(found["state"][name], expected, rtol=1e-4, atol=1e-5, err_msg=f"{case}: {name}")


def test_each_optimizer_has_its_own_learning_rate(ranks: list[Cases]) -> None:
    for found in ranks[0].values():
        rates = {name: values for name, values in found["state"].items() if name.startswith("learning_rate")}
        assert sorted(value for values in rates.values() for value in values) == pytest.approx([0.001, 0.1])


def test_replicas_are_bit_equal(ranks: list[Cases]) -> None:
    for case in ranks[0]:
        assert ranks[0][case]["digest"] == ranks[1][case]["digest"], case
