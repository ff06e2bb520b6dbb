"""A job whose last state cannot be saved says so with an exit code of its own, also when it was asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench, send

pytestmark = pytest.mark.long

# Files of more than 100 kB cannot be written, as with a quota: records of metrics can, checkpoints cannot.
_LIMITED = """
import resource, sys
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from fleet_train.cli import cli
cli(["train", *sys.argv[2:]])
"""
_FLAGS = "--model=mlp --data=digits --epochs=1000 --checkpoint_every_steps=20 --log_every=1".split()


def test_a_graceful_stop_that_saved_nothing_is_no_graceful_stop(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "out"
    flags = [*_FLAGS, f"--output_dir={output}"]
    launcher = bench.start(_LIMITED, "limited", *flags, flags=["--nproc_per_node=2", "--max_restarts=2"])
    bench.wait_for_output("the checkpoint of step 20 could not be written: ", "node0/log/workerlog.0")
    send(launcher, signal.SIGTERM)
    (ended,) = bench.ended()
    assert ended.exit_code == 14, ended.output
    for rank in range(2):
        said = bench.log(f"node0/log/workerlog.{rank}")
        last = said.strip().splitlines()[-1]
        assert "stopped after step " in last, said
        assert "File too large, and nothing was saved after it; there is no other one of this run" in last
    assert "File too large" in ended.output
    assert "restart 1 of 2" not in ended.output
    assert not list(output.glob("checkpoints/*step-*"))
