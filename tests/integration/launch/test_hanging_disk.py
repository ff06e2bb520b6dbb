"""A checkpoint that cannot be written because a file server is down: the job ends in time with the reason."""

from __future__ import annotations

import pytest

from tests.integration.launch.conftest import Bench
from tests.support.processes import ROOT, clean_environ, python

pytestmark = pytest.mark.long

SCRIPT = ROOT / "tests" / "integration" / "launch" / "rank_on_a_hanging_disk.py"


@pytest.mark.parametrize("when", ["at once", "next save", "end"])
def test_every_node_ends_with_the_code_of_checkpoints(bench: Bench, when: str) -> None:
    bench.start_two(SCRIPT, when)
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [9, 9], bench.job.report()
    said = "CheckpointError: the checkpoint of step 1 was not written within 3 s: rank 0's disk does not answer"
    for node in (0, 1):
        assert said in bench.log(f"node{node}/log/workerlog.0"), bench.job.report()
        assert "run/checkpoints/.writing-step-00000001" in bench.log(f"node{node}/log/workerlog.0")
        assert "not reached" not in bench.log(f"node{node}/log/workerlog.0")
    assert bench.job.leftovers() == []


def test_a_process_without_launcher_ends_too(bench: Bench) -> None:
    started = bench.job.start("alone", python(str(SCRIPT), "script's end"), clean_environ(), cwd=bench.folder)
    assert started.process.wait(timeout=120) == 1, started.output
    assert "the script ends for another reason" in started.output
