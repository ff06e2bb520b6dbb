"""Scripts of Paddle 1.7 and 2.x train on two ranks once they are ported, with nothing done by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT, output_of, python, run_alone
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long

SCRIPTS = ROOT / "tests" / "integration" / "port"
# Runs a ported script as ``python SCRIPT`` would, then reports this rank's parameters.
RUN = """
import runpy
import sys

import paddle

from fleet_train import fleet
from tests.support.worker import digest, report

script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
state = fleet.main_program.state_dict("param", paddle.static.global_scope())
report(fleet.worker_index(), digest=digest(state), parameters=len(state))
"""


def figures(output: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{name}(?:=|: )([\d.]+)", output)]


@pytest.mark.parametrize(
    ("script", "saved"),
    [
        ("fluid_resnet.py", "resnet_out"),
        ("fleet_2x_docs.py", "docs_out"),
        ("fleet_2x_slots.py", "slots_out"),
    ],
)
def test_ported_script_trains_on_two_ranks_with_equal_replicas(tmp_path: Path, script: str, saved: str) -> None:
    path = tmp_path / script
    path.write_bytes((SCRIPTS / script).read_bytes())
    port = python("-m", "fleet_train", "port")
    assert "To do by hand" not in run_alone(tmp_path / "job", [*port, "--write", str(path)]).output
    assert output_of([*port, "--check", str(path)]) == ""

    result = run_ranks(RUN, 2, folder=tmp_path, args=[str(path)])
    assert len(set(result.of_all("digest"))) == 1
    assert result.values[0]["parameters"] >= 3
    first, second = (figures(rank.output, "loss") for rank in result.ranks)
    assert first != second, "each rank has data of its own"
    assert first[-1] < first[0]
    if script == "fluid_resnet.py":
        assert (tmp_path / "resnet_inference" / "model.json").exists()
        tested = [figures(rank.output, "tested") for rank in result.ranks]
        assert [len(values) for values in tested] == [3, 2], "rank 0 tests alone, too: a clone waits for nobody"
        assert [len(set(values)) for values in tested] == [1, 1], "dropout and batch norm are in test mode"
    assert (tmp_path / saved / "persistables.safetensors").exists()
    if script == "fleet_2x_docs.py":
        fleets, ours = "import paddle.distributed.fleet as fleet", "from fleet_train import fleet"
        path.write_text((SCRIPTS / script).read_text().replace(fleets, ours))
        by_hand = run_ranks(RUN, 2, folder=tmp_path, args=[str(path)])
        assert by_hand.of_all("digest") == result.of_all("digest"), "the import is the only line that has to change"
