"""`python -m fleet_train train`: help without Paddle, flags that reach the config, refusals before anything starts."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from fleet_train.cli.train import command
from fleet_train.errors import FleetTrainError
from fleet_train.train.config import TrainConfig
from tests.support.processes import clean_environ


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configs that the command would have trained with."""
    configs: list[TrainConfig] = []
    fake: Any = ModuleType("fleet_train.train.reference")
    fake.run = configs.append
    monkeypatch.setitem(sys.modules, "fleet_train.train.reference", fake)
    return configs


def test_help_imports_no_paddle() -> None:
    code = (
        "import sys; from fleet_train.cli import cli\n"
        "try: cli(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('paddle' in sys.modules or 'visualdl' in sys.modules or 'sklearn' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--checkpoint_every" in done.stdout


def test_no_flags_give_the_defaults(ran: list[TrainConfig]) -> None:
    assert CliRunner().invoke(command, []).exit_code == 0
    assert ran == [TrainConfig()]


def test_flags_reach_the_config(ran: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    flags_of_ranks: list[Any] = []
    flags = "--model mlp --data synthetic --lr 0.5 --epochs 3 --batch_size 8 --resume --strategy multi_node --scale_lr"
    monkeypatch.setattr("fleet_train.cli.train.ask_here", lambda *asked: flags_of_ranks.append(asked))
    assert CliRunner().invoke(command, [*flags.split(), "--set=fetch_frequency=2"]).exit_code == 0
    assert flags_of_ranks == [("multi_node", ("fetch_frequency=2",))]
    assert ran == [
        TrainConfig(
            model="mlp",
            data="synthetic",
            learning_rate=0.5,
            epochs=3,
            batch_size=8,
            resume=True,
            strategy="multi_node",
            scale_lr=True,
        )
    ]


def test_unknown_flag_is_a_usage_error(ran: list[TrainConfig]) -> None:
    result = CliRunner().invoke(command, ["--epoch", "3"])
    assert result.exit_code == 2
    assert "--epochs" in result.output
    assert ran == []


def test_senseless_value_is_refused_before_paddle_is_imported(ran: list[TrainConfig]) -> None:
    result = CliRunner().invoke(command, ["--epochs", "0"])
    assert isinstance(result.exception, FleetTrainError)
    assert ran == []
