"""The examples do what they show: the recipe's network on one card, and the same script on two machines."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

EXAMPLES = ROOT / "tools" / "examples"
HOSTS = ("127.0.0.2", "127.0.0.3")


def changed_lines() -> tuple[list[str], list[str]]:
    """(removed, added) between single_card.py and train_with_fleet.py, without blank lines."""
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("single_card.py", "train_with_fleet.py"))
    diff = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    return [line[2:] for line in diff if line[0] == "-"], [line[2:] for line in diff if line[0] == "+"]


def costs(output: str) -> list[float]:
    return [float(cost) for cost in re.findall(r"^step\d+ cost=([\d.]+)$", output, re.MULTILINE)]


def test_five_lines_make_the_single_card_script_distributed() -> None:
    removed, added = changed_lines()
    assert [line.split("(")[0] for line in added] == [
        "from fleet_train import DistributedStrategy, fleet, role_maker",
        "fleet.init",
        "optimizer = fleet.distributed_optimizer",
        "random = np.random.default_rng",
        "fleet.save_persistables",
    ]
    assert [line.split("(")[0] for line in removed] == ["random = np.random.default_rng", "paddle.static.save"]


@pytest.mark.long
def test_with_fleet_one_process_trains_exactly_as_before(tmp_path: Path) -> None:
    single = run_ranks(EXAMPLES / "single_card.py", 1, nodes=0, folder=tmp_path / "single")
    fleet = run_ranks(EXAMPLES / "train_with_fleet.py", 1, nodes=0, folder=tmp_path / "fleet")
    curve = costs(single.ranks[0].output)
    assert len(curve) == 100
    assert curve[-1] < 0.5 * curve[0]
    assert costs(fleet.ranks[0].output) == curve
    assert any((tmp_path / "single" / "output").iterdir())
    assert any((tmp_path / "fleet" / "output").iterdir())


def test_two_machines_train_and_rank_0_saves(tmp_path: Path) -> None:
    commands.put_script(tmp_path, 2, EXAMPLES / "train_with_fleet.py")
    port = free_ports(3, HOSTS)
    one_each = commands.FLEET_TRAIN.replace("--selected_gpus=0,1", "--nproc_per_node=1")
    lines = [commands.on_node(one_each, node, HOSTS, port) for node in range(2)]
    result = run_launchers(lines, folder=tmp_path)
    curve = costs((result.folders[0] / "mylog" / "workerlog.0").read_text())
    assert len(curve) == 100
    assert curve[-1] < 0.5 * curve[0]
    saved = [any((folder / "output").rglob("*")) for folder in result.folders]
    assert saved == [True, False], "rank 0 saves for all"


@pytest.mark.long
def test_old_tuning_is_carried_out_or_mapped_with_a_message(tmp_path: Path) -> None:
    for kind in ("ours", "stock"):
        folder = tmp_path / kind
        result = run_ranks(EXAMPLES / "old_recipe.py", 2, nodes=2, folder=folder, args=[kind])
        output = result.ranks[0].output
        assert len(costs(output)) == 50, "every second step fetches the loss"
        assert result.ranks[1].output.count("is mapped") == 0, "what is mapped is said once, on rank 0"
        if kind == "ours":
            assert "num_threads" in output
            assert "num_iteration_per_drop_scope" in output
