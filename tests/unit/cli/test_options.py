"""Scripts of users depend on these options: changes must be deliberate, see ``options.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from fleet_train.cli import COMMANDS
from tests.unit.cli.command_options import FILE, REWRITE, described, kind, parameters_of

PINNED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
FOUND = described()


def differences(pinned: dict[str, Any], found: dict[str, Any]) -> list[str]:
    told = [f"{name}: is gone" for name in pinned if name not in found]
    told += [f"{name}: is new: {found[name]}" for name in found if name not in pinned]
    both = [name for name in pinned if name in found]
    return told + [f"{name}: was {pinned[name]}, is {found[name]}" for name in both if pinned[name] != found[name]]


@pytest.mark.parametrize("command", sorted({*PINNED, *FOUND}))
def test_a_command_takes_what_it_took(command: str) -> None:
    told = differences(PINNED.get(command, {}), FOUND.get(command, {}))
    assert (command in PINNED, command in FOUND, told) == (True, True, []), (
        f"the options of {command or 'fleet_train itself'!r} differ from {FILE.name}; if that is meant, run "
        f"`{REWRITE}` and tell users in CHANGELOG.md:\n" + "\n".join(told)
    )


def test_every_command_and_those_below_manifest_are_pinned() -> None:
    assert {name for name in PINNED if " " not in name} == {"", *COMMANDS}
    assert {"manifest slurm", "manifest job", "manifest paddlejob", "manifest trainjob"} <= set(PINNED)


@click.command()
@click.argument("script")
@click.option("--steps", "--updates", type=click.IntRange(1, 9), default=3)
@click.option("--share", type=click.FloatRange(min=0, min_open=True))
@click.option("--way", type=click.Choice(["up", "down"]), required=True)
@click.option("--folder", type=click.Path(path_type=Path), multiple=True, default=(Path("runs"),))
@click.option("--secret", hidden=True)
@click.option("--fast", is_flag=True)
@click.option("--slow", is_flag=True, default=True)
def sample() -> None:
    """A command with every kind."""


def test_what_is_written_of_each_kind() -> None:
    assert parameters_of(sample) == {
        "SCRIPT": {"kind": "text", "required": True},
        "--steps/--updates": {"kind": "integer 1..9", "default": 3},
        "--share": {"kind": "float >0.."},
        "--way": {"kind": "choice", "required": True, "choices": ["up", "down"]},
        "--folder": {"kind": "path", "many": True, "default": ["runs"]},
        "--secret": {"kind": "text", "hidden": True},
        "--fast": {"kind": "flag"},
        "--slow": {"kind": "flag", "default": True},
    }


@pytest.mark.parametrize(
    ("of", "shown"),
    [
        (click.IntRange(max=5), "integer ..5"),
        (click.FloatRange(0, 1, max_open=True), "float 0..<1"),
        (click.INT, "integer"),
    ],
)
def test_bounds_are_part_of_a_kind(of: click.ParamType, shown: str) -> None:
    assert kind(of) == shown


def test_differences_name_what_is_removed_added_and_changed() -> None:
    told = differences({"--a": {"kind": "flag"}, "--b": {"kind": "text"}}, {"--b": {"kind": "integer"}, "--c": {}})
    assert told == ["--a: is gone", "--c: is new: {}", "--b: was {'kind': 'text'}, is {'kind': 'integer'}"]
