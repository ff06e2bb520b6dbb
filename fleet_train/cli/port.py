"""`fleet_train port`: rewrites old Paddle scripts for Paddle 3 and fleet_train."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet_train.cli.options import HELP
from fleet_train.errors import GUIDE, ConversionError, printable

if TYPE_CHECKING:
    from fleet_train.port import Ported

PORT_PROGRESS_SECONDS = 5.0
"""Pause between two lines of `port` about how many scripts it has read."""

EXIT_WOULD_CHANGE = 1
_EPILOG = """\b
Examples:
  fleet_train port train.py                  (show the diff, change nothing)
  fleet_train port --write train.py models/  (change the files; a second run changes nothing)
  fleet_train port --check .                 (for CI: fails while something would change)

\b
Code that cannot be rewritten automatically stays as it was, below a line that says what to use,
  # TODO(fleet_train): fluid.layers.py_reader -> paddle.io.DataLoader(...)
and is listed at the end with its line number in the ported script. An import of paddle.fluid
stays as long as a marked line needs it, so an unfinished script fails at its first line and
not in the middle of training. docs/old-programs.md explains each.

\b
Characters of web pages in code (no-break spaces, typographic quotes) become Python's own.

\b
Below a folder, hidden folders and those called build, dist, node_modules or __pycache__ are
skipped, and listed if there are scripts in them; they are ported where they are named themselves.

\b
Exit codes:
  0   done; with --check: nothing would change (remaining TODO lines are listed)
  1   --check: something would change
  7   files are not Python 3 (listed with file and line), the others are ported; or no script is
      for Paddle, but some for another framework
  10  no such file or folder
"""


@click.command(name="port", epilog=_EPILOG, context_settings=HELP)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE|FOLDER...")
@click.option("--write", is_flag=True, help="Change the files instead of printing a diff.")
@click.option("--check", is_flag=True, help="Print which files would change, write nothing, exit 1 if there are any.")
def command(paths: tuple[Path, ...], write: bool, check: bool) -> None:
    """Rewrite scripts for Paddle 1.6 to 2.x (paddle.fluid, Fleet 1.x and 2.x) for Paddle 3 and fleet_train.

    Imports, layers with their changed arguments, programs, executors, optimizers, initializers, places, Fleet's API,
    fetch lists, saving. Comments and layout stay. Code that might mean something else today is not rewritten.
    """
    if write and check:
        raise click.UsageError("--write changes files, --check changes none: give only one of them")
    from fleet_train.port import script
    from fleet_train.port.published import PADDLE

    scripts, skipped = script.scripts_in(paths)
    ported, unreadable = _ported(scripts)
    changed = [result for result in ported if result.changed]
    for result in changed:
        if write:
            script.write(result)
        if check or write:
            click.echo(printable(f"{'would change' if check else 'changed'} {result.path}"))
        else:
            click.echo(script.difference(result), nl=False)
    _list_marks(ported)
    others = [f"{each.path}: a script for {each.framework}" for each in ported if each.framework not in ("", PADDLE)]
    notes = [f"{each.path}: Python's own characters for {each.replaced}" for each in ported if each.replaced]
    for note in (*notes, *(f"skipped {each}" for each in (*skipped, *others))):
        click.echo(printable(note), err=True)
    if unreadable and len(scripts) == 1:
        raise ConversionError(unreadable[0])
    for problem in unreadable:
        click.echo(printable(f"skipped {problem}"), err=True)
    if others and not any(each.framework == PADDLE for each in ported):
        raise ConversionError(
            f"{others[0]}; port translates none: it rewrites those for Paddle, whose static programs fleet_train "
            f"trains. {GUIDE} has what takes the place of lines of PyTorch's DDP, Apex, Horovod and DALI"
        )
    click.echo(_summary(len(ported), len(changed), write, check), err=True)
    if unreadable:
        raise ConversionError(
            f"{len(unreadable)} of {len(scripts)} file(s) are not Python 3 and were skipped, see above"
        )
    if check and changed:
        sys.exit(EXIT_WOULD_CHANGE)


def _ported(scripts: list[Path]) -> tuple[list[Ported], list[str]]:
    """Port the scripts, before one is written; also returns what is wrong with those that cannot be read. Says every
    few seconds how far it has come."""
    from fleet_train.port import script

    ported, unreadable, told = list[script.Ported](), list[str](), time.monotonic()
    for number, path in enumerate(scripts, start=1):
        try:
            ported.append(script.port(path.read_bytes(), str(path)))
        except (ConversionError, OSError) as error:
            unreadable.append(str(error) if isinstance(error, ConversionError) else f"{path}: {error}")
        if time.monotonic() - told > PORT_PROGRESS_SECONDS:
            told = time.monotonic()
            click.echo(f"{number} of {len(scripts)} scripts read", err=True)
    return ported, unreadable


def _list_marks(ported: list[Ported]) -> None:
    """Print what is left to do by hand to stderr, so that stdout stays a diff that `patch` accepts."""
    marks = [mark for result in ported for mark in result.marks]
    if marks:
        click.echo(f"\nTo do by hand ({len(marks)}; lines of the ported scripts):", err=True)
    for mark in marks:
        click.echo(printable(f"  {mark}"), err=True)


def _summary(scripts: int, changed: int, write: bool, check: bool) -> str:
    if write:
        done = f"{changed} changed"
    else:
        done = f"{changed} would change" + (" (--write changes them)" if changed and not check else "")
    return f"{scripts} script(s), {done}"
