"""What a shell may put behind an option or an argument when TAB is pressed."""

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
    """Names of the catalogue; files where none begins so."""
    from fleet_train.profile import profile_names

    named = [CompletionItem(name) for name in profile_names() if name.startswith(incomplete)]
    return named or files(context, parameter, incomplete)
