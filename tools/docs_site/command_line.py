"""The command-line reference: the --help of each command."""

from __future__ import annotations

from collections.abc import Iterator

import click

from fleet_train.cli import cli

WIDTH = 100
HEAD = """# Command line

Every command's `--help`. `python -m fleet_train` and, once the package is installed, `fleet_train` are the same.
"""


def command_line_page() -> str:
    """One section for each command, in the order of ``fleet_train --help``; a group's commands behind it."""
    top = click.Context(cli, info_name="python -m fleet_train", terminal_width=WIDTH, max_content_width=WIDTH)
    sections = (f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in _helps(cli, top, ""))
    return HEAD + "".join(sections)


def _helps(command: click.Command, context: click.Context, name: str) -> Iterator[tuple[str, str]]:
    yield name or "fleet_train", command.get_help(context).rstrip()
    if not isinstance(command, click.Group):
        return
    for word in command.list_commands(context):
        inner = command.get_command(context, word)
        if inner is not None:
            below = click.Context(inner, parent=context, info_name=word)
            yield from _helps(inner, below, f"{name} {word}".strip())
