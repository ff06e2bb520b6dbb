"""Scripts of users depend on the command line's options: changes must be deliberate.

``python -m tests.unit.cli.test_options`` writes each command's arguments and options, with their kinds, defaults and
choices, to ``options.json``, which the command line is held to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from fleet_train.cli import cli

FILE = Path(__file__).parent / "options.json"
PINNED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


def described() -> dict[str, Any]:
    """``{"launch": {"--strategy": {...}, ...}, "recommend": ..., "": the options before a command}``."""
    context = click.Context(cli)
    found = {"": parameters_of(cli)}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        found[name] = parameters_of(command)
    return found


def parameters_of(command: click.Command) -> dict[str, Any]:
    """Keyed by how a user writes each: all spellings of an option; an argument by its name in capitals."""
    return {
        "/".join((*p.opts, *p.secondary_opts)) if isinstance(p, click.Option) else p.name.upper(): one(p)
        for p in command.params
    }


def one(parameter: click.Parameter) -> dict[str, Any]:
    """Without what differs between releases of click: an option that has no default has no ``default`` here."""
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    told: dict[str, Any] = {"kind": "flag" if is_flag else kind(parameter.type)}
    if parameter.required:
        told["required"] = True
    if parameter.multiple or parameter.nargs != 1:
        told["many"] = True
    if isinstance(parameter, click.Option) and parameter.hidden:
        told["hidden"] = True
    if isinstance(parameter.type, click.Choice):
        told["choices"] = list(parameter.type.choices)
    default = parameter.to_info_dict()["default"]
    if default is not None and not (is_flag and default is False):
        told["default"] = plain(default)
    return told


def plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def kind(of: click.ParamType) -> str:
    """``integer 1..``: bounds where there are some, ``..<1`` where the bound itself is excluded."""
    name = str(of.to_info_dict()["name"]).lower().removesuffix(" range")
    low, high = getattr(of, "min", None), getattr(of, "max", None)
    if low is None and high is None:
        return name
    low_text = "" if low is None else f"{'>' if getattr(of, 'min_open', False) else ''}{low:g}"
    high_text = "" if high is None else f"{'<' if getattr(of, 'max_open', False) else ''}{high:g}"
    return f"{name} {low_text}..{high_text}"


def text() -> str:
    """JSON with a line for each option."""
    commands = []
    for name, options in described().items():
        lines = ",\n".join(f"  {json.dumps(option)}: {json.dumps(told)}" for option, told in options.items())
        commands.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(commands) + "\n}\n"


FOUND = described()


@pytest.mark.parametrize("command", sorted({*PINNED, *FOUND}))
def test_a_command_takes_what_it_took(command: str) -> None:
    assert FOUND.get(command) == PINNED.get(command), (
        f"the options of {command or 'fleet_train itself'!r} differ from {FILE.name}; if that is meant, run "
        f"`python -m tests.unit.cli.test_options` and tell users in CHANGELOG.md"
    )


if __name__ == "__main__":
    FILE.write_text(text())
    print(f"wrote {FILE}")
