"""A command that fails on one rank tells the others why, like a script does."""

from __future__ import annotations

from pathlib import Path

from fleet_train.errors import DataError, WorkerFailed
from tests.support.ranks import run_ranks

SCRIPT = """
import os
import sys

import click

import fleet_train.cli
from fleet_train.errors import DataError


@fleet_train.cli.cli.command("fail", hidden=True)
def fail():
    from fleet_train import fleet

    fleet.init()
    if fleet.worker_index() == 1:
        raise DataError("no such folder on this machine")
    fleet.barrier_worker()


fleet_train.cli.COMMANDS["fail"] = "Fail on rank 1."
fleet_train.cli._LazyGroup.get_command = lambda self, ctx, name: fail
sys.argv = ["fleet_train", "fail"]
fleet_train.cli.main()
"""


def test_error_of_a_command_on_one_rank_reaches_the_others(tmp_path: Path) -> None:
    result = run_ranks(SCRIPT, 2, nodes=2, folder=tmp_path, check=False)
    assert result.exit_codes == [WorkerFailed.exit_code, DataError.exit_code], result.report()
    assert "stopped with DataError: no such folder on this machine" in result.ranks[0].output
