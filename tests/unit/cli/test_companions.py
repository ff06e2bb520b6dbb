"""Options of the reference trainer that would have no effect are refused; with their companion they are accepted."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fleet_train.cli.train import NEEDS, command
from fleet_train.errors import FleetTrainError
from fleet_train.train import reference
from fleet_train.train.config import TrainConfig

# What makes each option do something, and what does not.
CASES = {
    "--data digits": ("", "--data_dir images"),
    "--image_size 64": ("--data_dir images", "--data digits"),
    "--max_corrupt 0.5": ("--data_dir images", ""),
    "--workers 2": ("--data_dir images", ""),
    "--workers 0": ("--data_dir images --loader dali", "--data_dir images --loader thread"),
    "--uneven pad": ("--data_dir images --shard_by folder", "--data_dir images"),
    "--last_batch keep": ("--shard_by sample", "--data_dir images --shard_by folder"),
    "--lr_decay 0.5": ("--lr_schedule step", "--lr_schedule cosine"),
    "--lr_power 1": ("--lr_schedule polynomial", ""),
    "--no_decay_norm_bias": ("--weight_decay 1e-4", "--weight_decay 0"),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    configs: list[TrainConfig] = []
    monkeypatch.setattr(reference, "run", configs.append)
    return configs


def test_every_row_of_the_table_has_a_case() -> None:
    assert {case.split()[0].removeprefix("--") for case in CASES} == set(NEEDS)


@pytest.mark.parametrize("option", CASES)
def test_an_option_without_its_companion_is_refused(option: str, started: list[TrainConfig]) -> None:
    with_it, without_it = CASES[option]
    result = CliRunner().invoke(command, [*option.split(), *without_it.split()])
    assert isinstance(result.exception, FleetTrainError)
    name = option.split()[0]
    assert str(result.exception).startswith(f"{name} ")
    assert " would have no effect: it " in str(result.exception)
    assert str(result.exception).endswith(f", or leave {name} out")
    assert started == []
    assert CliRunner().invoke(command, [*option.split(), *with_it.split()]).exit_code == 0
    assert len(started) == 1


def test_a_default_is_never_refused(started: list[TrainConfig]) -> None:
    for flags in ("", "--data_dir images --shard_by folder", "--lr_schedule constant", "--loader thread"):
        assert CliRunner().invoke(command, flags.split()).exit_code == 0, flags
    assert len(started) == 4
