"""Completions of options' and arguments' values."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

Items = list[CompletionItem[str]]


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """The shell's own completion of files."""
    del context, parameter
    return [CompletionItem(incomplete, type="file")]


def folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    del context, parameter
    return [CompletionItem(incomplete, type="dir")]


def profiles(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Names of the catalogue; files if no name matches."""
    from fleet_train.profile import profile_names

    named = [CompletionItem(name) for name in profile_names() if name.startswith(incomplete)]
    return named or files(context, parameter, incomplete)
