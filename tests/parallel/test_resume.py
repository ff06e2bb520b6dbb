"""Every profile of the catalogue: saved on two ranks, resumed by new processes on two, three and one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_train.profile import profile_names
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

SCRIPT = ROOT / "tests/parallel/resume.py"
Cases = list[dict[str, dict[str, Any]]]


def run(what: str, saved: Path, world_size: int, late_streams: bool = False) -> Cases:
    folder = saved.parent / f"{what}{world_size}{late_streams}"
    nodes = 0 if world_size == 1 else world_size
    args = [what, str(saved)]
    return run_ranks(SCRIPT, world_size, folder=folder, nodes=nodes, args=args, late_streams=late_streams).of_all(
        "cases"
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume") / "saved"


@pytest.fixture(scope="module")
def straight(saved: Path) -> Cases:
    return run("straight", saved, 2)


def test_every_profile_of_the_catalogue_is_a_case(straight: Cases) -> None:
    assert set(profile_names()) <= straight[0].keys()


def test_rank_0_logs_for_all_what_a_single_card_needs(straight: Cases) -> None:
    for name, first in straight[0].items():
        assert first["at_save"] == straight[1][name]["at_save"], name


def test_resumed_run_is_the_one_that_went_on_bit_by_bit(straight: Cases, saved: Path, late_streams: bool) -> None:
    """Where collectives end late, from what was saved where they block: the same bits."""
    resumed = run("resumed", saved, 2, late_streams)
    different = [
        (rank, n) for rank in (0, 1) for n in straight[rank] if resumed[rank][n]["end"] != straight[rank][n]["end"]
    ]
    assert different == []


@pytest.mark.long
def test_run_on_late_streams_with_a_save_on_the_way_has_the_same_bits(straight: Cases, tmp_path: Path) -> None:
    assert run("straight", tmp_path / "saved", 2, late_streams=True) == straight


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.usefixtures("straight")
def test_another_number_of_ranks_takes_everything_over(saved: Path, world_size: int) -> None:
    ranks = run("moved", saved, world_size)
    for rank in ranks:
        for name, case in rank.items():
            assert case["parameters"], f"{name}: other parameters than saved"
            assert case["finite"], name
            assert case["worst"] < 1e-6, f"{name}: the mean over ranks of what each has of its own has changed"
    with_own = {
        name: sorted({own.rpartition(".")[2].rpartition("@")[2] for own in case["own"]})
        for name, case in ranks[0].items()
    }
    assert {name: ends for name, ends in with_own.items() if ends} == {
        "amp, merge": ["gradient_merge"],
        "dgc": ["pending", "velocity"],
        "ethernet_1g": ["error"],
        "gradient_merge": ["gradient_merge"],
        "int4_compression": ["error"],
        "LocalSGD, streaming diloco": ["error"],
        "merge, LocalSGD": ["gradient_merge"],
        "merge, PowerSGD": ["error", "gradient_merge"],
        "powersgd": ["error"],
        "streaming_diloco": ["error"],
    }
    if world_size > 1:
        for name in with_own:
            assert ranks[0][name]["taken"] == sorted(ranks[0][name]["own"]), name
